"""ckpt-run on several hosts with a memory tier."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import ckpt
from ckpt.recovery.memory_tier import local
from ckpt.recovery.ranks import processes
from ckpt.recovery.run_log.base import LogEntry, open_run_log
from helpers.host_runs import Job
from helpers.processes import SOAK

COLUMNS = 2000
"""Columns of 24 rows of float64: too much for a record of a namespace, so that objects are written."""


class InMemory(Job):
    """A job that saves each step to memory, and every 20th step to the repository, too."""

    def __init__(self, folder: Path, *options: str, **more: int) -> None:
        super().__init__(folder, None, "-n", "1", "--memory", *options, **more)
        self.run_log = open_run_log(folder / "run")

    def log(self) -> list[LogEntry]:
        """Return the entries without starting a subcommand."""
        return self.run_log.entries()

    def close(self) -> None:
        super().close()
        self.run_log.close()

    def lose_log(self) -> None:
        """Remove the run log and what the ranks wrote, while no agent runs."""
        self.run_log.close()
        for path in [*(self.folder / "run").glob("run.sqlite*"), *self.folder.glob("at-*"), *self.folder.glob("pid-*")]:
            path.unlink()
        self.run_log = open_run_log(self.folder / "run")

    def folder_of(self, name: str) -> Path:
        """Return the folder in memory of a host."""
        found = local.memory_folder(self.folder / "run", name)
        assert found is not None
        return found

    def files(self, name: str) -> list[Path]:
        return [path for path in self.folder_of(name).rglob("*") if path.is_file()]

    def first_step(self, attempt: int) -> int:
        """Return the first step of an attempt, which is the same on all ranks."""
        found = {path.read_text() for path in self.folder.glob(f"from-{attempt}-*")}
        assert len(found) == 1, found
        return int(found.pop())

    def saved(self) -> list[int]:
        """Return the steps in the repository of record."""
        return ckpt.open(self.folder / "repo").steps()

    def is_right(self, world: int) -> None:
        """Check the rows that the ranks computed."""
        whole = np.concatenate([np.load(self.folder / f"end-{rank}.npy") for rank in range(world)])
        expected = np.zeros((24, COLUMNS))
        for step in range(self.steps):
            expected += np.sin(step * 1.7 + np.arange(24)[:, None])
        assert np.array_equal(whole, expected)

    def assert_memory_is_released(self, *names: str) -> None:
        """Check that no file is left in the memory of these hosts, and no process that serves it."""
        assert not [path for name in names for path in self.files(name)]
        assert not memory_server_pids(self)


def with_make_soak(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test with `make soak` only, as it takes some seconds."""
    return pytest.mark.soak(pytest.mark.skipif(not SOAK, reason="by make soak")(test))


def memory_server_pids(run: Job) -> list[int]:
    """Return the processes that serve the memory of a job."""
    found = processes.find_processes([], f"CKPT_TEST_JOB={run.folder}")
    return [pid for pid in found if b"ckpt.recovery.memory_tier.memory_nodes" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., InMemory]]:
    """Yield a function that makes a job with a memory tier; the jobs are ended after the test."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no shared memory at /dev/shm that can be written to")
    monkeypatch.setenv("CKPT_TEST_COLUMNS", str(COLUMNS))
    monkeypatch.setenv("CKPT_TEST_JOB", str(tmp_path / "job"))
    made: list[InMemory] = []

    def begin(*options: str, **more: int) -> InMemory:
        made.append(InMemory(tmp_path / "job", *options, **more))
        return made[-1]

    yield begin
    for one in made:
        one.close()
        for name in "abcd":
            shutil.rmtree(one.folder_of(name), ignore_errors=True)


def memories_of(log: list[LogEntry]) -> list[list[list[list[str]]]]:
    """Return the memory namespaces of each attempt."""
    return [e.facts["memory"] for e in log if e.kind == "start"]


def failures(log: list[LogEntry]) -> list[LogEntry]:
    return [e for e in log if e.kind == "failure"]
