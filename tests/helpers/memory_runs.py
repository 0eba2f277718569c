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
"""Of 24 rows of float64: too much for a record, so that there are objects."""


class InMemory(Job):
    """A job whose steps are all in memory, every 20th in the repository, too."""

    def __init__(self, folder: Path, *options: str, **more: int) -> None:
        super().__init__(folder, None, "-n", "1", "--memory", *options, **more)
        self.record = open_run_log(folder / "run")

    def log(self) -> list[LogEntry]:
        """Without a process for each look."""
        return self.record.entries()

    def close(self) -> None:
        super().close()
        self.record.close()

    def folder_of(self, name: str) -> Path:
        found = local.memory_folder(self.folder / "run", name)
        assert found is not None
        return found

    def files(self, name: str) -> list[Path]:
        return [path for path in self.folder_of(name).rglob("*") if path.is_file()]

    def begins(self, attempt: int) -> int:
        """The first step of an attempt, the same on all ranks."""
        found = {path.read_text() for path in self.folder.glob(f"from-{attempt}-*")}
        assert len(found) == 1, found
        return int(found.pop())

    def saved(self) -> list[int]:
        """The steps in the repository of record."""
        return ckpt.open(self.folder / "repo").steps()

    def is_right(self, world: int) -> None:
        whole = np.concatenate([np.load(self.folder / f"end-{rank}.npy") for rank in range(world)])
        want = np.zeros((24, COLUMNS))
        for step in range(self.steps):
            want += np.sin(step * 1.7 + np.arange(24)[:, None])
        assert np.array_equal(whole, want)

    def is_gone(self, *names: str) -> None:
        """Nothing is left in memory, nor serves it."""
        assert not [path for name in names for path in self.files(name)]
        assert not keepers(self)


def in_full(test: Callable[..., None]) -> Callable[..., None]:
    """By `make soak` only: some seconds each."""
    return pytest.mark.soak(pytest.mark.skipif(not SOAK, reason="by make soak")(test))


def keepers(run: Job) -> list[int]:
    """The processes that serve the memory of a job."""
    found = processes.find_processes([], f"CKPT_TEST_JOB={run.folder}")
    return [pid for pid in found if b"ckpt.recovery.memory_tier.memory_nodes" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., InMemory]]:
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
    """Of each attempt."""
    return [e.facts["memory"] for e in log if e.kind == "start"]


def failures(log: list[LogEntry]) -> list[LogEntry]:
    return [e for e in log if e.kind == "failure"]
