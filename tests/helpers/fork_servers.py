"""A fork server in this process, and processes that report their surroundings."""

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

from ckpt.recovery.ranks import process_kill, processes
from ckpt.recovery.ranks.fork_client import ForkServerClient
from helpers.folders import PROGRAMS

PROGRAM = PROGRAMS / "process_surroundings.py"
Starter = Callable[..., ForkServerClient]


@pytest.fixture
def start_fork_server(tmp_path: Path) -> Iterator[Starter]:
    """Yield a function that starts a fork server; the servers are closed after the test."""
    made: list[ForkServerClient] = []

    def start(command: Sequence[str], imports: dict[str, object] | Path | None = None, **environ: str) -> ForkServerClient:
        """Start a fork server; wait until it is ready or has a reason. imports: modules to import, as a rank reports them."""
        if not isinstance(imports, Path):
            file = tmp_path / "rank.imports"
            file.write_text(json.dumps(imports or {"modules": {}, "environ": {}}))
            imports = file
        server = ForkServerClient.start(command, surroundings(**environ), imports)
        made.append(server)
        deadline = time.monotonic() + 600
        while not server.is_ready and not server.reason and time.monotonic() < deadline:
            time.sleep(0.01)
        return server

    yield start
    for server in made:
        server.close()
    process_kill._prctl(process_kill._SET_CHILD_SUBREAPER, 0)


def surroundings(rank: int = 0, **more: str) -> dict[str, str]:
    """Return the environment in which ckpt-run starts a rank."""
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **variables, **more}


def modules(*names: str) -> dict[str, object]:
    """Return what a rank reports after importing these modules."""
    origins = {name: spec.origin for name in names if (spec := importlib.util.find_spec(name))}
    return {"modules": origins, "environ": {}}


def script(folder: Path, text: str, name: str = "train.py") -> str:
    """Write a program and return its path."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(textwrap.dedent(text))
    return str(folder / name)


def run_cold(command: Sequence[str], log: Path, rank: int = 0, **environ: str) -> int:
    """Return the exit status of a rank that is started without a fork server."""
    with log.open("ab") as out:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=surroundings(rank, **environ),
            start_new_session=True, check=False,
        ).returncode  # fmt: skip


def run_warm(server: ForkServerClient, log: Path, rank: int = 0, **environ: str) -> int:
    """Return the exit status of a rank that a fork server forks."""
    child = server.fork(surroundings(rank, **environ), log)
    assert child is not None, server.reason
    return child.wait()


def have_ended(*pids: int | None) -> bool:
    """Return whether these processes end within ten minutes."""
    deadline = time.monotonic() + 600
    while any(processes.process_state(pid) not in ("", "Z") for pid in pids if pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def write_packages(folder: Path, **texts: str) -> Path:
    """Write packages with these texts, and return the folder to put on the path."""
    site = folder / "site-packages"
    site.mkdir()
    for name, text in texts.items():
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(textwrap.dedent(text))
    return site
