"""What ckpt-run on one host prints at the end about the steps that were only in memory."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.faulty_runs import RUN

import ckpt
from ckpt.recovery.memory_tier import local
from ckpt.recovery.run_log.sqlite import SqliteRunLog

PROGRAM = """
import os, sys, ckpt
from pathlib import Path
ck = ckpt.Checkpointer(every=None, tiers=[ckpt.Tier("memory")], group=None)
for step in range(3):
    ck.step(step, {"w": [step] * 10})
ck.wait()
for path in map(Path(os.environ["CKPT_MEMORY"]).joinpath, os.listdir(os.environ["CKPT_MEMORY"])):
    for name in sys.argv[1:]:
        data = bytearray((path / name).read_bytes())
        data[20] ^= 1
        (path / name).write_bytes(data)
os._exit(1)
"""


@pytest.fixture(params=["run", "has step 9 of run"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Yield the folder of a run, whose name may look like a text about a step."""
    memory = local.memory_folder(tmp_path / request.param)
    if memory is None:
        pytest.skip("no shared memory at /dev/shm that can be written to")
    yield tmp_path / request.param
    shutil.rmtree(memory, ignore_errors=True)


def run_to_the_end(folder: Path, *damaged: str) -> tuple[str, str]:
    """Run a job that fails while its newest step is only in memory. Return what is printed, and the last text in the log.

    damaged: the files in memory in which a bit flips.
    """
    program = folder.parent / "train.py"
    program.write_text(PROGRAM)
    command = [*RUN, "--run-dir", str(folder), "--dir", str(folder / "repo"), "--restarts", "0", "--"]
    done = subprocess.run(
        [*command, sys.executable, str(program), *damaged], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 1, done.stderr
    return done.stderr, SqliteRunLog(folder, read_only=True).entries()[-1].text


@pytest.mark.parametrize("name", ["tier.json", "steps/2/commit.json"])
def test_a_step_that_stays_in_memory_is_printed(folder: Path, name: str) -> None:
    printed, logged = run_to_the_end(folder, name)
    assert re.search(rf"{name} .*; the memory is kept: start ckpt-run again, or copy it with ckpt-restore\n", printed), printed
    assert "could not be drained" in logged
    assert f"ckpt-run: {logged}\n" in printed
    memory = local.memory_folder(folder)
    assert memory is not None
    assert list(memory.glob("*/steps/2/commit.json"))


def test_a_copied_step_is_printed(folder: Path) -> None:
    printed, logged = run_to_the_end(folder)
    assert re.fullmatch(r"step 2 was brought from file:///dev/shm/\S+ to file://\S+", logged)
    assert f"ckpt-run: {logged}\n" in printed
    assert ckpt.open(folder / "repo").steps() == [2]
