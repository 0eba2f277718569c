"""The examples under ckpt-run: killed and hung, they end with the same bits as an undisturbed run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.folders import EXAMPLES

import ckpt


def ckpt_run(folder: Path, ranks: int, *command: str) -> subprocess.Popen[str]:
    job = [sys.executable, "-m", "ckpt.tools.run", "-n", str(ranks), "--run-dir", str(folder), "--show", "none", "--"]
    return subprocess.Popen([*job, *command], stderr=subprocess.PIPE, text=True)


def wait_for_end(process: subprocess.Popen[str]) -> str:
    """Check that the process ends with status 0, and return its standard error."""
    try:
        _, stderr = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    return stderr


def wait_until_saved(url: Path) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        try:
            if ckpt.open(url).steps():
                return
        except ckpt.CkptError:
            pass
        time.sleep(0.02)
    raise AssertionError("nothing was saved")


def child_of(process: subprocess.Popen[str], words: str) -> int:
    """Return the number of a process below ckpt-run whose command line contains these words."""
    below = {process.pid}
    found = []
    for path in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            line = (path / "cmdline").read_text().replace("\0", " ")
        except (OSError, IndexError):
            continue
        if parent in below:
            below.add(int(path.name))
            if (
                line.startswith(sys.executable)
                and words in line
                and "ckpt.tools.run" not in line
                and "fork_server.py" not in line
            ):
                found.append(int(path.name))
    return found[-1]


def arrays(url: Path) -> dict[str, bytes]:
    newest = ckpt.open(url)[ckpt.open(url).steps()[-1]]
    return {name: np.asarray(newest[name]).tobytes() for name in newest}


@pytest.mark.parametrize("name", ["train.py", "run_numpy.py", "run_mpi.py"])
def test_an_example_uses_fewer_than_ten_lines_of_ckpt(name: str) -> None:
    """Comments and docstrings that mention ckpt count, too."""
    lines = [line for line in (EXAMPLES / name).read_text().splitlines() if "ckpt" in line or "ck." in line]
    assert len(lines) < 10, lines


def test_the_numpy_example_survives_a_kill(tmp_path: Path) -> None:
    program = [sys.executable, str(EXAMPLES / "run_numpy.py")]
    options = ["--steps", "120", "--every", "10"]
    wait_for_end(ckpt_run(tmp_path / "a", 2, *program, str(tmp_path / "quiet"), *options, "--seconds", "0"))
    job = ckpt_run(tmp_path / "b", 2, *program, str(tmp_path / "rough"), *options, "--seconds", "0.02")
    wait_until_saved(tmp_path / "rough")
    os.kill(child_of(job, "run_numpy.py"), signal.SIGKILL)
    assert "was killed by SIGKILL" in wait_for_end(job)
    assert ckpt.open(tmp_path / "rough").steps()[-1] == 119
    assert arrays(tmp_path / "rough") == arrays(tmp_path / "quiet")


def test_the_mpi_example_survives_a_killed_rank(tmp_path: Path) -> None:
    """ckpt-run starts mpiexec, which ends with a rank that dies. The result equals that of one process."""
    pytest.importorskip("mpi4py")
    mpiexec = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or shutil.which("mpiexec")
    assert mpiexec, "no mpiexec: install the wheel mpich"
    program, options = [sys.executable, str(EXAMPLES / "run_mpi.py")], ["--steps", "150", "--every", "10"]
    subprocess.run([*program, str(tmp_path / "alone"), *options, "--seconds", "0"], check=True, timeout=600)
    job = ckpt_run(tmp_path / "run", 1, mpiexec, "-n", "3", *program, str(tmp_path / "rough"), *options, "--seconds", "0.02")
    wait_until_saved(tmp_path / "rough")
    os.kill(child_of(job, "run_mpi.py"), signal.SIGKILL)
    assert "exited with status" in wait_for_end(job)
    assert arrays(tmp_path / "rough") == arrays(tmp_path / "alone")


def test_the_comeback_demo_recovers_from_a_busy_loop(tmp_path: Path) -> None:
    """The demo is made small: a rank falls into a busy loop."""
    pytest.importorskip("torch")
    small = ["--ranks", "2", "--steps", "70", "--every", "5", "--faults", "busy", "--seconds", "0.2"]
    command = [sys.executable, str(EXAMPLES / "comeback.py"), "--dir", str(tmp_path / "run"), *small]
    command += ["--model", "--width 32 --layers 1 --context 16 --batch 4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every loss is equal, bit for bit" in done.stdout
    assert "arrays of" in done.stdout
    assert re.search(r"step \d+ is done, ", done.stdout)
    assert done.stdout.count("ckpt-run: rank") == 1
    assert "sent no heartbeat for" in done.stdout
    assert "1 failure" in done.stdout
