"""`ckpt-run` on a system without the calls of Linux that it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys
del os.pidfd_open
from ckpt.tools.run import main
sys.argv = ["ckpt-run", "--", sys.executable, "-c", "print('started')"]
main()
"""


def test_ckpt_run_names_the_missing_system_and_starts_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "ckpt-run needs Linux" in done.stderr
    assert "Traceback" not in done.stderr
    assert "started" not in done.stdout
    assert list(tmp_path.iterdir()) == []
