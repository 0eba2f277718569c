"""Groups of ranks that meet at a store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt.groups import EnvGroup
from ckpt.storage.base.store import Store
from helpers.folders import PROGRAMS, fast_folder

PROGRAM = PROGRAMS / "meeting_rank.py"
LAUNCHERS = ("RANK", "WORLD_SIZE", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_", "CKPT_RUN_ID", "MASTER_", "MPI")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may themselves run in a job."""
    for name in os.environ:
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with fast_folder(tmp_path) as made:
        yield made


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What the calls return or raise, each made by a thread of its own."""
    results: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def env_groups(size: int, monkeypatch: pytest.MonkeyPatch, timeout: float = 60, run_id: str = "") -> list[EnvGroup]:
    """The ranks of a job as objects of this process; each may be used by one thread."""
    groups = []
    for rank in range(size):
        with monkeypatch.context() as patch:
            patch.setenv("RANK", str(rank))
            patch.setenv("WORLD_SIZE", str(size))
            if run_id:
                patch.setenv("CKPT_RUN_ID", run_id)
            groups.append(EnvGroup(timeout))
    return groups


def meet(groups: list[EnvGroup], store: Store) -> list[Any]:
    return together(*(lambda g=g: g.meet_at(store) for g in groups))


def gather(groups: list[EnvGroup], word: str) -> list[Any]:
    return together(*(lambda g=g: g.all_gather(f"{word} {g.rank}".encode()) for g in groups))


def words(word: str, size: int) -> list[bytes]:
    return [f"{word} {rank}".encode() for rank in range(size)]


def launch(*command: object, **env: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **{name: str(value) for name, value in env.items()}},
    )  # fmt: skip


def rank_process(folder: Path, rank: int, size: int, **env: object) -> subprocess.Popen[str]:
    """A rank that knows its number from the environment; it has said "waiting" when this returns."""
    made = launch(sys.executable, PROGRAM, "env", folder, RANK=rank, WORLD_SIZE=size, **env)
    assert made.stdout is not None
    assert made.stdout.readline() == "waiting\n"
    return made


def reports(folder: Path, size: int) -> list[list[str]]:
    """What the ranks have found."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


LAUNCHER = "import subprocess, sys; subprocess.run(sys.argv[1:])"


def elsewhere(folder: Path, rank: int, size: int) -> tuple[subprocess.Popen[str], int]:
    """A rank that another process has started, which is returned with the number of that of the rank."""
    launcher = launch(sys.executable, "-c", LAUNCHER, sys.executable, PROGRAM, "env", folder, RANK=rank, WORLD_SIZE=size)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "waiting\n"
    (child,) = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return launcher, int(child)
