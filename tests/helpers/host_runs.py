"""ckpt-run on several hosts: agents are child processes, with their run log in a file or in a real etcd."""

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
STEP_SECONDS = 0.05
"""The time of a step. Every fifth step is saved by all ranks, so shorter steps would keep all processors busy with saves."""


class Job:
    """Some agents of one run, with two ranks each. The job does not begin its last step before the test calls `ends`."""

    def __init__(self, folder: Path, state: str | None, *options: str, hosts: int = 3, steps: int = 100) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        (folder / "hold").touch()
        self.state = ["--state", state] if state else []
        self.options = ["--nnodes", str(hosts), "-n", "2", "--patience", "0", "--cold", "--no-memory", *options]
        self.steps = steps
        self.agents: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, failpoints: str = "", program: tuple[str, ...] | None = None, files: str | None = None) -> None:
        folder = self.folder / (files or ("run" if not self.state else f"run-{name}"))
        arguments = ["--run-dir", str(folder), *self.state, "--name", name, "--address", "127.0.0.1"]
        program = program or (sys.executable, PROGRAM, str(self.folder), str(self.steps), str(STEP_SECONDS))
        with self._open_messages(name) as messages:
            self.agents[name] = subprocess.Popen(
                [*RUN, *self.options, *arguments, "--", *program], text=True, stderr=messages, stdout=subprocess.DEVNULL,
                env=os.environ | {"CKPT_FAILPOINTS": failpoints},
            )  # fmt: skip

    def _open_messages(self, name: str) -> IO[str]:
        """Open a new file: ranks of a killed agent of this name may still write to the previous one."""
        path = self.folder / f"{name}.messages"
        path.unlink(missing_ok=True)
        return path.open("a")

    def ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Return the result of a subcommand of ckpt-run about this run."""
        arguments = ["--run-dir", str(self.folder / "run"), *self.state]
        return subprocess.run(
            [*RUN, words[0], *arguments, *words[1:]], capture_output=True, text=True, timeout=600, check=False
        )

    def log(self) -> list[LogEntry]:
        """Return the entries, or nothing while no log answers. It is read here: a subcommand takes as long as many steps."""
        try:
            with closing(open_run_log(self.folder / "run", self.state[-1] if self.state else None, read_only=True)) as state:
                return state.entries()
        except (CkptError, sqlite3.Error):
            return []

    def until(self, true: Callable[[list[LogEntry]], bool], what: str) -> None:
        """Wait until a condition holds for the entries."""
        self._wait(lambda: true(self.log()), what, pause=0.1)

    def until_step(self, step: int, attempt: int = 0) -> None:
        """Wait until every rank has done this step."""
        self.until(lambda log: any(e.kind == "start" and e.attempt == attempt for e in log), f"attempt {attempt}")
        world = self._world(attempt)
        self._wait(
            lambda: min(self._steps(attempt, world), default=-1) >= step, f"step {step} in attempt {attempt}", pause=0.02
        )

    def _wait(self, true: Callable[[], bool], what: str, pause: float) -> None:
        """Wait until a condition holds. Fail at once if all agents have ended before, as nothing changes then."""
        deadline = time.monotonic() + 600
        while True:
            is_over = all(agent.poll() is not None for agent in self.agents.values()) or time.monotonic() > deadline
            if true():
                return
            assert not is_over, f"not {what}: {[(e.kind, e.text) for e in self.log()]}"
            time.sleep(pause)

    def steps_done(self, attempt: int) -> list[int]:
        return self._steps(attempt, self._world(attempt))

    def _world(self, attempt: int) -> int:
        """Return the number of ranks of an attempt."""
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

    def release(self) -> None:
        """Let the job do its last step."""
        (self.folder / "hold").unlink(missing_ok=True)

    def kill(self, *names: str) -> None:
        """Kill these agents and wait for their ends."""
        for name in names:
            self.agents[name].kill()
            self.agents[name].wait()

    def ends(self, *names: str) -> dict[str, int]:
        """Let the job end, wait for these agents, and return their exit statuses."""
        self.release()
        for name in names:
            self.agents[name].wait(timeout=600)
        return {name: self.agents[name].returncode for name in names}

    def messages(self, name: str) -> str:
        """Return the messages of an agent."""
        return (self.folder / f"{name}.messages").read_text()

    def close(self) -> None:
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.kill()
                agent.wait()


ENGINES = pytest.mark.parametrize("job", ["file", pytest.param("etcd", marks=needs_etcd)], indirect=True)
ETCD = pytest.mark.parametrize("job", [pytest.param("etcd", marks=needs_etcd)], indirect=True)


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Yield a function that makes a job with its run log in a file or in etcd; the jobs are ended after the test."""
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


def assert_result(job: Job, world: int) -> None:
    """Check the rows that the ranks computed, whichever ranks had them."""
    whole = np.concatenate([np.load(job.folder / f"end-{rank}.npy") for rank in range(world)])
    expected = np.zeros((24, 100))
    for step in range(job.steps):
        expected += np.sin(step * 1.7 + np.arange(24)[:, None])
    assert np.array_equal(whole, expected)


def starts(log: list[LogEntry]) -> list[list[str]]:
    """Return the hosts of each attempt."""
    return [[m["name"] for m in e.facts["members"]] for e in log if e.kind == "start"]


def leader_of(log: list[LogEntry]) -> str:
    """Return the host that leads now."""
    return str(next(e.facts["name"] for e in reversed(log) if e.kind == "lead"))


def answers(client: str) -> bool:
    """Return whether the etcd at this address answers and is empty."""
    try:
        return EtcdClient((client,), 1.0).range("/") == []
    except StoreError:
        return False


class OnHosts(Job):
    """A job whose agents are on hosts of their own."""

    hosts: Hosts

    def start(self, name: str, failpoints: str = "", program: tuple[str, ...] | None = None, files: str | None = None) -> None:
        arguments = ["--run-dir", str(self.folder / f"run-{name}"), *self.state, "--name", name]
        program = (sys.executable, PROGRAM, str(self.folder), str(self.steps), str(STEP_SECONDS))
        with self._open_messages(name) as messages:
            self.agents[name] = self.hosts.run(
                "abc".index(name), *RUN, *self.options, *arguments, "--", *program, stderr=messages, stdout=subprocess.DEVNULL,
                env=os.environ | {"CKPT_FAILPOINTS": failpoints},
            )  # fmt: skip
