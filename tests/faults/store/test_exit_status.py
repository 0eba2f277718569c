"""The exit status of a program whose last save failed: non-zero, and unchanged where the program fails for another reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BEFORE = """
import resource, sys
import numpy as np
import ckpt

state = {"weight": np.arange(4_000_000)}
saver = ckpt.Checkpointer(sys.argv[1], every=None)
saver.save(1, state, blocking=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))  # from here each pack fails with EFBIG
state["weight"] = state["weight"] + 1
"""

NOT_CLOSED = "saver.save(2, state)"
CLOSED = "saver.save(2, state)\nsaver.close()"
IN_A_BLOCK = "with saver:\n    saver.save(2, state)"
EXIT_0_IN_A_BLOCK = "with saver:\n    saver.save(2, state)\n    sys.exit(0)"
EXIT_IN_A_BLOCK = "with saver:\n    saver.save(2, state)\n    sys.exit()"
EXIT_3_IN_A_BLOCK = "with saver:\n    saver.save(2, state)\n    sys.exit(3)"
EXIT_0 = "saver.save(2, state)\nsys.exit(0)"
HANDLE = "saver.close()\nhandle = ckpt.save(state, sys.argv[1], step=2, blocking=False)"
HANDLE_READ = """
saver.close()
try:
    ckpt.save(state, sys.argv[1], step=2, blocking=False).result()
except ckpt.CkptError:
    pass
"""
RAISES = "saver.save(2, state)\nraise ValueError('the user sees this')"
RAISES_IN_A_BLOCK = "with saver:\n    saver.save(2, state)\n    raise ValueError('the user sees this')"
TIERS = """
saver.close()
saver = ckpt.Checkpointer(sys.argv[1], every=None, tiers=[ckpt.Tier(sys.argv[1] + "-near")])
with saver:
    saver.save(2, state)
    sys.exit(0)
"""

TIERS_NOT_CLOSED = TIERS.replace("with saver:\n    saver.save(2, state)\n    sys.exit(0)", "saver.save(2, state)")
TIERS_THEN_SAVED = TIERS.replace(
    "sys.exit(0)",
    """saver.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    saver.save(3, state)""",
)


def run(code: str, url: Path) -> subprocess.CompletedProcess[str]:
    """Run a program whose first save works and whose next saves fail, followed by this code."""
    return subprocess.run(
        [sys.executable, "-c", BEFORE + code, str(url)], capture_output=True, text=True, timeout=600, check=False
    )


FAILED = {
    "not closed": NOT_CLOSED,
    "closed": CLOSED,
    "in a block": IN_A_BLOCK,
    "exit(0) in a block": EXIT_0_IN_A_BLOCK,
    "exit() in a block": EXIT_IN_A_BLOCK,
    "exit(0)": EXIT_0,
    "handle": HANDLE,
    "tiers": TIERS,
    "tiers, not closed": TIERS_NOT_CLOSED,
}


@pytest.mark.parametrize("code", FAILED.values(), ids=FAILED)
def test_a_program_whose_last_save_failed_ends_with_a_non_zero_status(tmp_path: Path, code: str) -> None:
    done = run(code, tmp_path / "run")
    assert done.returncode != 0, done.stderr
    assert "step 2" in done.stderr
    assert "File too large" in done.stderr
    assert ckpt_steps(tmp_path / "run") == [1]


@pytest.mark.parametrize(
    ("code", "status"), [(EXIT_3_IN_A_BLOCK, 3), (RAISES, 1), (RAISES_IN_A_BLOCK, 1)],
    ids=["exit(3) in a block", "an exception", "an exception in a block"],
)  # fmt: skip
def test_the_exit_status_of_an_exception_is_kept(tmp_path: Path, code: str, status: int) -> None:
    done = run(code, tmp_path / "run")
    assert done.returncode == status, done.stderr
    assert "step 2" in done.stderr
    assert ("the user sees this" in done.stderr) == (status == 1)


def test_an_error_that_the_program_has_caught_does_not_change_the_status(tmp_path: Path) -> None:
    done = run(HANDLE_READ, tmp_path / "run")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_later_save_to_a_failed_tier_ends_with_status_zero(tmp_path: Path) -> None:
    done = run(TIERS_THEN_SAVED, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "step 2 could not be saved to the tier" in done.stderr
    assert ckpt_steps(tmp_path / "run") == [1, 3]


def test_exit_handlers_registered_before_the_import_still_run(tmp_path: Path) -> None:
    """They run after the report of ckpt."""
    first = "import atexit\natexit.register(print, 'registered before the import', flush=True)\n"
    code = first + BEFORE + NOT_CLOSED
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode != 0
    assert done.stdout == "registered before the import\n"


def ckpt_steps(url: Path) -> list[int]:
    import ckpt

    return ckpt.open(url).steps()
