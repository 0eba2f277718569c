"""`make demo` shows that nothing is lost, and ends quietly after Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.folders import EXAMPLES


@pytest.mark.slow
def test_the_demo_ends_with_equal_losses(tmp_path: Path) -> None:
    """Its exit status is 1 if a loss of the killed training differs from that of the undisturbed one, or is missing."""
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_interrupted_demo_ends_without_a_traceback(tmp_path: Path) -> None:
    """Ctrl-C reaches all processes of a terminal; here it reaches all of the new session."""
    demo = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "demo.py"), "--dir", str(tmp_path / "run")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert demo.stdout is not None
    for line in demo.stdout:
        if line.startswith("1  A training run"):
            break
    os.killpg(demo.pid, signal.SIGINT)
    _, errors = demo.communicate(timeout=600)
    assert demo.returncode == 130
    assert "demo.py" not in errors
