"""A fork server in this process, and processes that report what they find around them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from ckpt.recovery.ranks import processes
from ckpt.recovery.ranks.fork_client import ForkServerClient
from helpers.folders import PROGRAMS

PROGRAM = PROGRAMS / "process_surroundings.py"
Starter = Callable[..., ForkServerClient]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Starter]:
    made: list[ForkServerClient] = []

    def one(command: Sequence[str], told: dict[str, object] | Path | None = None, **environ: str) -> ForkServerClient:
        """A forge that is ready, or has a reason. told: modules by name, as a rank would tell."""
        if not isinstance(told, Path):
            file = tmp_path / "told.imports"
            file.write_text(json.dumps(told or {"modules": {}, "environ": {}}))
            told = file
        forge = ForkServerClient.start(command, surroundings(**environ), told)
        made.append(forge)
        until = time.monotonic() + 120
        while not forge.is_ready and not forge.reason and time.monotonic() < until:
            time.sleep(0.01)
        return forge

    yield one
    for forge in made:
        forge.close()
    processes._prctl(processes._SET_CHILD_SUBREAPER, 0)


def surroundings(rank: int = 0, **more: str) -> dict[str, str]:
    told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **told, **more}


def modules(*names: str) -> dict[str, object]:
    origins = {name: spec.origin for name in names if (spec := importlib.util.find_spec(name))}
    return {"modules": origins, "environ": {}}


def script(folder: Path, text: str, name: str = "train.py") -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(textwrap.dedent(text))
    return str(folder / name)


def cold(command: Sequence[str], log: Path, rank: int = 0, **environ: str) -> int:
    """As ckpt-run starts a rank today."""
    with log.open("ab") as out:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=surroundings(rank, **environ),
            start_new_session=True, check=False,
        ).returncode  # fmt: skip


def warm(forge: ForkServerClient, log: Path, rank: int = 0, **environ: str) -> int:
    forged = forge.fork(surroundings(rank, **environ), log)
    assert forged is not None, forge.reason
    return forged.wait()


def gone(*pids: int | None) -> bool:
    until = time.monotonic() + 20
    while any(processes.process_state(pid) not in ("", "Z") for pid in pids if pid):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def libraries(folder: Path, **texts: str) -> Path:
    site = folder / "site-packages"
    site.mkdir()
    for name, text in texts.items():
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(textwrap.dedent(text))
    return site
