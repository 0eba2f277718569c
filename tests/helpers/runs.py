"""ckpt-run as a process on this host, with programs/job.py as its job."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ckpt.recovery.memory_tier import local
from ckpt.recovery.ranks import processes
from ckpt.recovery.run_log.base import entry_to_json
from ckpt.recovery.run_log.sqlite import SqliteRunLog
from ckpt.storage.base.errors import CkptError
from ckpt.training.heartbeat_page import HeartbeatPage
from helpers.folders import PROGRAMS

PROGRAM = str(PROGRAMS / "job.py")
RANKS = 3


class Run:
    """A job of three ranks under ckpt-run, as a user starts it. It does not begin its last step before the test calls `end`."""

    def __init__(
        self, folder: Path, *options: str, steps: int = 40, seconds: float = 0.02, fault: tuple[object, ...] = (),
        stdout: int = subprocess.DEVNULL, stderr: int = subprocess.PIPE,
    ) -> None:  # fmt: skip
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.hold()
        self.files = folder / "run"
        command = [sys.executable, "-m", "ckpt.tools.run", "-n", str(RANKS), "--run-dir", str(self.files), "--cold"]
        command += [*options, "--"]
        program = [sys.executable, PROGRAM, str(folder), str(steps), str(seconds), *map(str, fault)]
        self.process = subprocess.Popen([*command, *program], stderr=stderr, stdout=stdout, text=True)

    def hold(self) -> None:
        """Keep the job from its last step, so that it can't end before the test has seen it."""
        (self.folder / "hold").touch()

    def release(self) -> None:
        """Let the job do its last step."""
        (self.folder / "hold").unlink(missing_ok=True)

    def end(self, timeout: float = 600) -> int:
        """Let the job end, wait for this, keep the output in `messages`, and return the exit status."""
        self.release()
        _, self.messages = self.process.communicate(timeout=timeout)
        return self.process.returncode

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def until_step(self, step: int, attempt: int = 0) -> None:
        """Wait until all ranks have done this step. Fail at once if the attempt has ended before this was seen."""
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            has_ended = self.process.poll() is not None
            starts = [entry for entry in self.record() if entry["kind"] == "start"]
            pages = [Path(entry["facts"]["pages"]) for entry in starts if entry["attempt"] == attempt]
            try:
                if pages and all(HeartbeatPage(pages[0] / f"{attempt}-{i}").read().step >= step for i in range(RANKS)):
                    return
            except FileNotFoundError:
                pass
            is_over = has_ended or any(entry["attempt"] > attempt for entry in starts)
            assert not is_over, f"attempt {attempt} ended before step {step} was seen: {[e['text'] for e in self.record()]}"
            time.sleep(0.01)
        raise AssertionError(f"step {step} was not reached")

    def record(self) -> list[dict]:  # type: ignore[type-arg]
        """Return the entries of the run log, as `ckpt-run why --json` prints them, but without a process that takes as long as
        some steps."""
        try:
            run_log = SqliteRunLog(self.files, read_only=True)
        except CkptError:  # the run has not begun
            return []
        try:
            return [json.loads(entry_to_json(entry)) for entry in run_log.entries()]
        finally:
            run_log.close()

    def failures(self) -> list[tuple[str, list[int]]]:
        """Return cause and ranks of each failure."""
        return [(e["facts"]["cause"], e["facts"]["ranks"]) for e in self.record() if e["kind"] == "failure"]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Yield a function that starts a job; the jobs are ended after the test."""
    made: list[Run] = []

    def begin(*options: str, **arguments: object) -> Run:
        made.append(Run(tmp_path / "job", *options, **arguments))  # type: ignore[arg-type]
        return made[-1]

    yield begin
    for run in made:
        run.close()


def expected(steps: int) -> list[np.ndarray]:
    """Return the arrays that the job must compute: the same sums in the same order, bit for bit."""
    found = []
    for rank in range(RANKS):
        w = np.zeros((4, 100))
        for step in range(steps):
            w += np.sin(step * 1.7 + rank)
        found.append(w)
    return found


def assert_result(run: Run, steps: int = 40) -> None:
    """Check the arrays that the job has computed."""
    for rank, array in enumerate(expected(steps)):
        assert np.array_equal(np.load(run.folder / f"end-{rank}.npy"), array)


def kill_ranks(run: Run) -> None:
    """Kill all ranks at once, or nearly so: ckpt-run may end some of them after the first dies."""
    for pid in [run.pid(rank) for rank in range(RANKS)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def have_ended(pids: list[int]) -> bool:
    """Return whether these processes end within ten minutes."""
    deadline = time.monotonic() + 600
    while any(processes.process_state(pid) not in ("", "Z") for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def memory_folder_of(run: Run) -> Path:
    """Return the folder of a run in shared memory, or skip the test."""
    found = local.memory_folder(run.files)
    if found is None:
        pytest.skip("no shared memory at /dev/shm that can be written to")
    return found


def assert_no_memory_is_left(folder: Path, host: str = "") -> None:
    """Check that a run has no folder in shared memory."""
    found = local.memory_folder(folder, host)
    assert found is None or not found.exists()
