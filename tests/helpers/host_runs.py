"""ckpt-run on several hosts: agents that are processes of this one, with their run log in a file or in a real etcd."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from ckpt.aggregator.cluster.etcd_client import EtcdClient
from ckpt.recovery.run_log.base import LogEntry, open_run_log
from ckpt.storage.base.errors import CkptError, StoreError
from helpers.etcd_server import EtcdProcess, needs_etcd
from helpers.folders import PROGRAMS
from helpers.network_namespaces import Hosts

PROGRAM = str(PROGRAMS / "job_on_hosts.py")
RUN = [sys.executable, "-m", "ckpt.tools.run"]


class Job:
    """Some agents of one run, two ranks each."""

    def __init__(self, folder: Path, state: str | None, *options: str, hosts: int = 3, steps: int = 250) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.state = ["--state", state] if state else []
        self.options = ["--nnodes", str(hosts), "-n", "2", "--patience", "0", "--cold", "--no-memory", *options]
        self.steps = steps
        self.agents: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, failpoints: str = "", program: tuple[str, ...] | None = None, files: str | None = None) -> None:
        folder = self.folder / (files or ("run" if not self.state else f"run-{name}"))
        where = ["--run-dir", str(folder), *self.state, "--name", name, "--address", "127.0.0.1"]
        program = program or (sys.executable, PROGRAM, str(self.folder), str(self.steps), "0.02")
        with self._hears(name) as said:
            self.agents[name] = subprocess.Popen(
                [*RUN, *self.options, *where, "--", *program], text=True, stderr=said, stdout=subprocess.DEVNULL,
                env=os.environ | {"CKPT_FAILPOINTS": failpoints},
            )  # fmt: skip

    def _hears(self, name: str) -> IO[str]:
        """A new file: ranks of an agent of this name that was killed may still write to the one before."""
        path = self.folder / f"{name}.said"
        path.unlink(missing_ok=True)
        return path.open("a")

    def ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        where = ["--run-dir", str(self.folder / "run"), *self.state]
        return subprocess.run([*RUN, words[0], *where, *words[1:]], capture_output=True, text=True, timeout=60, check=False)

    def log(self) -> list[LogEntry]:
        """Empty where there is none yet, or the state does not answer. Read here: a process takes as long as many steps."""
        try:
            with closing(open_run_log(self.folder / "run", self.state[-1] if self.state else None, read_only=True)) as state:
                return state.entries()
        except (CkptError, sqlite3.Error):
            return []

    def until(self, true: Callable[[list[LogEntry]], bool], what: str) -> None:
        end = time.monotonic() + 90
        while not true(self.log()):
            assert time.monotonic() < end, f"not {what}: {[(e.kind, e.text) for e in self.log()]}"
            time.sleep(0.1)

    def until_step(self, step: int, attempt: int = 0) -> None:
        """Until every rank has come to it."""
        self.until(lambda log: any(e.kind == "start" and e.attempt == attempt for e in log), f"attempt {attempt}")
        end, world = time.monotonic() + 90, self._world(attempt)
        while min(self._steps(attempt, world), default=-1) < step:
            assert time.monotonic() < end, f"step {step} is not reached in attempt {attempt}"
            time.sleep(0.02)

    def steps_done(self, attempt: int) -> list[int]:
        return self._steps(attempt, self._world(attempt))

    def _world(self, attempt: int) -> int:
        """How many ranks it has."""
        return next(int(e.facts["ranks"]) for e in self.log() if e.kind == "start" and e.attempt == attempt)

    def _steps(self, attempt: int, world: int) -> list[int]:
        return [self._step(self.folder / f"at-{attempt}-{rank}") for rank in range(world)]

    def _step(self, path: Path) -> int:
        try:
            return int(path.read_text() or -1)
        except FileNotFoundError:
            return -1

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def ends(self, *names: str) -> dict[str, int]:
        for name in names:
            self.agents[name].wait(timeout=120)
        return {name: self.agents[name].returncode for name in names}

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.said").read_text()

    def close(self) -> None:
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.kill()
                agent.wait()


ENGINES = pytest.mark.parametrize("job", ["file", pytest.param("etcd", marks=needs_etcd)], indirect=True)
ETCD = pytest.mark.parametrize("job", [pytest.param("etcd", marks=needs_etcd)], indirect=True)


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []
    server = None
    if getattr(request, "param", "file") == "etcd":
        server = EtcdProcess(tmp_path / "etcd")
        server.start()

    def begin(*options: str, **more: int) -> Job:
        state = None if server is None else f"etcd://{server.endpoint.removeprefix('http://')}/lab"
        made.append(Job(tmp_path / "job", state, *options, **more))
        return made[-1]

    yield begin
    for one in made:
        one.close()
    if server is not None:
        server.kill()


def is_right(job: Job, world: int) -> None:
    """What the rows must have come to, whoever had them."""
    whole = np.concatenate([np.load(job.folder / f"end-{rank}.npy") for rank in range(world)])
    want = np.zeros((24, 100))
    for step in range(job.steps):
        want += np.sin(step * 1.7 + np.arange(24)[:, None])
    assert np.array_equal(whole, want)


def starts(log: list[LogEntry]) -> list[list[str]]:
    """The hosts of each attempt."""
    return [[m["name"] for m in e.facts["members"]] for e in log if e.kind == "start"]


def leader_of(log: list[LogEntry]) -> str:
    """The host that coordinates now."""
    return str(next(e.facts["name"] for e in reversed(log) if e.kind == "lead"))


def answers(client: str) -> bool:
    try:
        return EtcdClient((client,), 1.0).range("/") == []
    except StoreError:
        return False


class OnHosts(Job):
    """Each agent on a host of its own."""

    hosts: Hosts

    def start(self, name: str, failpoints: str = "", program: tuple[str, ...] | None = None, files: str | None = None) -> None:
        where = ["--run-dir", str(self.folder / f"run-{name}"), *self.state, "--name", name]
        program = (sys.executable, PROGRAM, str(self.folder), str(self.steps), "0.02")
        with self._hears(name) as said:
            self.agents[name] = self.hosts.run(
                "abc".index(name), *RUN, *self.options, *where, "--", *program, stderr=said, stdout=subprocess.DEVNULL,
            )  # fmt: skip
