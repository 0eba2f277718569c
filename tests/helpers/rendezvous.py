"""Groups of ranks that meet at a store (rendezvous)."""

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

PROGRAM = PROGRAMS / "rendezvous_rank.py"
LAUNCHERS = ("RANK", "WORLD_SIZE", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_", "CKPT_RUN_ID", "MASTER_", "MPI")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of launchers: the tests may themselves run in a job."""
    for name in os.environ:
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield a fast folder for the store."""
    with fast_folder(tmp_path) as made:
        yield made


def run_in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Return what each call returns or raises; each runs in a thread of its own."""
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


def env_groups(size: int, monkeypatch: pytest.MonkeyPatch, timeout: float = 600, run_id: str = "") -> list[EnvGroup]:
    """Return the ranks of a job as groups of this process; each may be used by one thread."""
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
    """Let all groups meet at a store; return the error of each, or None."""
    return run_in_threads(*(lambda g=g: g.meet_at(store) for g in groups))


def gather(groups: list[EnvGroup], text: str) -> list[Any]:
    """Let all groups gather this text and their rank; return the result or error of each."""
    return run_in_threads(*(lambda g=g: g.all_gather(f"{text} {g.rank}".encode()) for g in groups))


def gathered(text: str, size: int) -> list[bytes]:
    """Return what a gather of this text must return."""
    return [f"{text} {rank}".encode() for rank in range(size)]


def launch(*command: object, **env: object) -> subprocess.Popen[str]:
    """Start a command whose output is read through pipes."""
    return subprocess.Popen(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **{name: str(value) for name, value in env.items()}},
    )  # fmt: skip


def rank_process(folder: Path, rank: int, size: int, **env: object) -> subprocess.Popen[str]:
    """Start a rank that gets its number from the environment, and return it once it has printed "waiting"."""
    made = launch(sys.executable, PROGRAM, "env", folder, RANK=rank, WORLD_SIZE=size, **env)
    assert made.stdout is not None
    assert made.stdout.readline() == "waiting\n"
    return made


def reports(folder: Path, size: int) -> list[list[str]]:
    """Return the report of each rank."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


LAUNCHER = "import subprocess, sys; subprocess.run(sys.argv[1:])"


def start_through_a_launcher(folder: Path, rank: int, size: int) -> tuple[subprocess.Popen[str], int]:
    """Start a rank through another process; return that process, and the process id of the rank."""
    launcher = launch(sys.executable, "-c", LAUNCHER, sys.executable, PROGRAM, "env", folder, RANK=rank, WORLD_SIZE=size)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "waiting\n"
    (child,) = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return launcher, int(child)
