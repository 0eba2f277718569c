"""ckpt-run on several hosts: agents that are processes of this one, with their state in a file or in a real etcd."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import IO

import numpy as np
import pytest
from etcd_server import EtcdProcess, needs_etcd, until
from netns import Hosts, hosts_on_a_wire
from support import SOAK
from test_run import none_left

from ckpt.aggregator.cluster.etcd_client import EtcdClient
from ckpt.recovery.goodput.ledger import read_ledgers, total_seconds_by_category
from ckpt.recovery.ranks import processes
from ckpt.recovery.run_log.base import LogEntry, open_run_log
from ckpt.storage.base.errors import CkptError, StoreError

PROGRAM = str(Path(__file__).parent / "hosts_program.py")
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


def test_a_quiet_run(job: Callable[..., Job]) -> None:
    run = job()
    for name in "abc":
        run.start(name)
    assert run.ends(*"abc") == {"a": 0, "b": 0, "c": 0}
    log = run.log()
    assert [sorted(hosts) for hosts in starts(log)] == [["a", "b", "c"]]
    assert log[-1].text == "all ranks have ended well"
    is_right(run, 6)


@ENGINES
def test_a_rank_is_killed(job: Callable[..., Job]) -> None:
    run = job()
    for name in "abc":
        run.start(name)
    run.until_step(12)
    os.kill(run.pid(3), signal.SIGKILL)
    assert set(run.ends(*"abc").values()) == {0}
    log = run.log()
    assert [(e.facts["cause"], e.facts["ranks"]) for e in log if e.kind == "failure"] == [("signal", [3])]
    assert starts(log)[0] == starts(log)[1]
    is_right(run, 6)


@pytest.mark.parametrize("which", ["leader", "other"])
def test_a_host_is_lost_and_a_spare_takes_its_place(job: Callable[..., Job], which: str) -> None:
    run = job(steps=500)  # more than are done while the log is read
    for name in "abcd":
        run.start(name)
    run.until_step(12)
    log = run.log()
    leader = leader_of(log)
    (spare,) = set("abcd") - set(starts(log)[0])
    lost = leader if which == "leader" else next(name for name in starts(log)[0] if name != leader)
    run.agents[lost].kill()
    others = sorted(set("abcd") - {lost})
    assert set(run.ends(*others).values()) == {0}
    log = run.log()
    if lost != spare:
        assert [sorted(hosts) for hosts in starts(log)][-1] == others
        places = starts(log)
        assert [b if b != lost else spare for b in places[0]] == places[-1], "the others keep their ranks"
    is_right(run, 6)


def test_a_host_is_lost_and_it_goes_on_with_fewer(job: Callable[..., Job]) -> None:
    run = job("--min", "2")
    for name in "abc":
        run.start(name)
    run.until_step(12)
    run.agents["b"].kill()
    assert run.ends("a", "c") == {"a": 0, "c": 0}
    log = run.log()
    assert [len(hosts) for hosts in starts(log)] == [3, 2], [(e.kind, e.text) for e in log]
    assert "without b (gone)" in [e.text for e in log if e.kind == "start"][-1]
    is_right(run, 4)


def test_too_few_hosts(job: Callable[..., Job]) -> None:
    run = job("--give-up", "1")
    run.start("a")
    assert run.ends("a") == {"a": 1}
    assert "1 of 3 hosts came within 1 s; start ckpt-run on more, or lower --min" in run.said("a")


@pytest.mark.parametrize("place", [0, 2])
@ETCD
def test_a_stopped_agent_that_comes_back(job: Callable[..., Job], place: int) -> None:
    """Others went on without it. What it still ran has been ended, and it is a spare."""
    run = job("--min", "2", steps=400)
    for name in "abc":
        run.start(name)
    run.until_step(12)
    victim = starts(run.log())[0][place]
    ranks = [run.pid(2 * place), run.pid(2 * place + 1)]
    os.kill(run.agents[victim].pid, signal.SIGSTOP)
    run.until(lambda log: len(starts(log)) >= 2, "gone on")
    assert none_left(ranks)
    os.kill(run.agents[victim].pid, signal.SIGCONT)
    assert set(run.ends(*"abc").values()) == {0}
    is_right(run, 4)


def is_accounted(job: Job) -> dict[str, float]:
    """The time by its names: from the start of the run to its end, without a gap, and no second twice."""
    found, log = read_ledgers(job.folder / "run"), job.log()
    for one, other in pairwise(found):
        assert abs(other.began - one.at) < 1e-3, (one, other)
    assert found[0].began < log[0].at < log[-1].at < found[-1].at
    return dict(total_seconds_by_category(job.folder / "run"))


def test_every_second_is_accounted_where_the_leader_stands_still(job: Callable[..., Job]) -> None:
    """It comes back while another leads, and does not know it yet."""
    run = job("--spares", "1", hosts=2, steps=100_000)
    for name in "abc":
        run.start(name)
    run.until_step(5)
    leader = leader_of(run.log())
    os.kill(run.agents[leader].pid, signal.SIGSTOP)
    run.until(lambda log: leader_of(log) != leader, "led by another")
    time.sleep(1)  # the other one writes lines, too
    os.kill(run.agents[leader].pid, signal.SIGCONT)
    assert run.ask("drain").returncode == 0
    assert set(run.ends(*"abc").values()) == {0}
    leaders = {e.facts["name"] for e in run.log() if e.kind == "lead"}
    assert len(list((run.folder / "run").glob("ledger-*.jsonl"))) == len(leaders) > 1
    assert is_accounted(run).get("detect", 0.0) >= (2.0 if leader in starts(run.log())[0] else 0.0)


@ENGINES
def test_who_leads_is_not_passed_over_before_it_has_said_anything(job: Callable[..., Job]) -> None:
    run = job()
    run.start("a", failpoints="agent.begun=sleep:2")
    run.until(lambda log: any(e.kind == "lead" for e in log), "led")
    for name in "bc":
        run.start(name)
    assert set(run.ends(*"abc").values()) == {0}
    assert [e.facts["name"] for e in run.log() if e.kind == "lead"] == ["a"]


def test_one_that_took_the_lead_and_was_killed_leaves_no_gap(job: Callable[..., Job]) -> None:
    run = job("--min", "2", hosts=4, steps=100_000)
    run.start("a")
    run.until(lambda log: any(e.kind == "lead" for e in log), "led")
    run.start("b", failpoints="coordinator.lead.written=kill")
    run.until(lambda log: (run.folder / "run" / "b.lock").exists(), "b is there")
    for name in "cd":
        run.start(name)
    run.until_step(5)
    run.agents["a"].kill()
    run.until(lambda log: leader_of(log) == "b", "led by b")
    run.until(lambda log: leader_of(log) in "cd" and len(starts(log)) > 1, "gone on without b")
    assert run.ask("drain").returncode == 0
    assert set(run.ends(*"cd").values()) == {0}
    is_accounted(run)


def test_a_lost_host_is_in_the_ledger(job: Callable[..., Job]) -> None:
    run = job("--spares", "1", hosts=2, steps=100_000)
    for name in "abc":
        run.start(name)
    run.until_step(5)
    log = run.log()
    leader = leader_of(log)
    lost = next(name for name in starts(log)[0] if name != leader)
    run.agents[lost].kill()
    run.until(lambda log: len(starts(log)) == 2, "gone on")
    assert run.ask("drain").returncode == 0
    assert set(run.ends(*(set("abc") - {lost})).values()) == {0}
    took, log = is_accounted(run), run.log()
    cause = next(e.facts["cause"] for e in log if e.kind == "failure")
    assert cause == "lost", "though a rank may miss those of the other host in a save before the agent does"
    handed_over = sum(e.kind == "lead" for e in log) > 1  # a slow machine: who leads now found the failure written
    least = 0.0 if handed_over else 2.5
    assert took.get("detect", 0.0) >= least, (took, [(e.kind, e.text) for e in log])


def test_what_a_spare_does_again_is_no_useful_time(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has rank 0 now, whose time is that of the run, and has not seen the steps that were done before."""
    monkeypatch.setenv("CKPT_TEST_EVERY", "1000000")  # nothing is saved by then: all is done again
    run = job("--spares", "1", hosts=2, steps=100_000)
    run.start("a")
    run.until(lambda log: any(e.kind == "lead" for e in log), "led")
    run.start("b")
    run.until_step(5)
    run.start("c")
    run.until(lambda log: (run.folder / "run" / "c.lock").exists(), "c is there")
    first = starts(run.log())[0][0]
    run.agents[first].kill()
    run.until(lambda log: len(starts(log)) == 2, "gone on")
    run.until_step(max(e.facts["step"] for e in run.log() if e.kind == "failure") + 10, 1)
    assert run.ask("drain").returncode == 0
    assert set(run.ends(*(set("abc") - {first})).values()) == {0}
    assert starts(run.log())[1][0] == "c"
    assert is_accounted(run).get("redo", 0.0) > 0.0


def test_a_lost_agent_is_started_again(job: Callable[..., Job]) -> None:
    """At once, under its name: its ranks are no more, so all start again, with it."""
    run = job()
    for name in "abc":
        run.start(name)
    run.until_step(12)
    run.agents["b"].kill()
    run.agents["b"].wait()
    run.start("b")
    assert set(run.ends(*"abc").values()) == {0}
    log = run.log()
    assert [e.facts["cause"] for e in log if e.kind == "failure"] == ["lost"]
    assert starts(log)[0] == starts(log)[1]
    is_right(run, 6)


KILLED_AT = [("start", ".written"), ("failure", ""), ("end", "")]
if SOAK:
    KILLED_AT = [(kind, written) for kind in ("start", "failure", "end") for written in ("", ".written")]


@pytest.mark.soak
@ETCD
@pytest.mark.parametrize(("kind", "written"), KILLED_AT)
def test_the_coordinator_is_killed(job: Callable[..., Job], kind: str, written: str) -> None:
    """At each point of deciding. Another one goes on from the log, and nothing is done twice."""
    run = job("--min", "2", "--give-up", "8")
    run.start("a", failpoints=f"coordinator.{kind}{written}=kill")
    run.until(lambda log: any(e.kind == "lead" for e in log), "led")
    for name in "bc":
        run.start(name)
    if kind == "failure":
        run.until_step(12)
        os.kill(run.pid(3), signal.SIGKILL)
    run.ends("b", "c")
    log = run.log()
    assert [e.facts["name"] for e in log if e.kind == "lead"][:2] in (["a", "b"], ["a", "c"], ["a"])
    assert log[-1].text == "all ranks have ended well"
    assert len([e for e in log if e.kind == "start"]) == len({e.attempt for e in log if e.kind == "start"})
    is_right(run, len(starts(log)[-1]) * 2)
    run.agents["a"].wait()


@pytest.mark.parametrize("point", ["agent.start", "agent.started", "agent.stop"])
def test_an_agent_is_killed(job: Callable[..., Job], point: str) -> None:
    run = job("--min", "2")
    run.start("a")
    run.until(lambda log: any(e.kind == "lead" for e in log), "led")
    run.start("b", failpoints=f"{point}=kill")
    run.start("c")
    if point == "agent.stop":
        run.until_step(12)
        os.kill(run.pid(0), signal.SIGKILL)
    assert run.ends("a", "c") == {"a": 0, "c": 0}
    assert starts(run.log())[-1] == ["a", "c"]
    is_right(run, 4)


@ETCD
def test_one_host_is_asked_to_leave(job: Callable[..., Job]) -> None:
    """All save after the same step, and the others go on from there."""
    run = job("--min", "2")
    for name in "abc":
        run.start(name)
    run.until_step(12)
    run.agents["b"].send_signal(signal.SIGTERM)
    assert run.ends("b") == {"b": 128 + signal.SIGTERM}
    assert run.ends("a", "c") == {"a": 0, "c": 0}
    log = run.log()
    (failure,) = [e for e in log if e.kind == "failure"]
    assert failure.facts["cause"] == "preempted"
    assert failure.facts["step"] == failure.facts["committed"], "nothing is done twice"
    assert sorted(starts(log)[-1]) == ["a", "c"]
    is_right(run, 4)


def test_all_are_asked_to_end(job: Callable[..., Job]) -> None:
    run = job()
    for name in "abc":
        run.start(name)
    run.until_step(12)
    for name in "abc":
        run.agents[name].send_signal(signal.SIGTERM)
    assert set(run.ends(*"abc").values()) == {128 + signal.SIGTERM}
    for name in "abc":
        run.start(name)
    assert set(run.ends(*"abc").values()) == {0}
    is_right(run, 6)


def test_who_comes_after_the_end(job: Callable[..., Job]) -> None:
    """Is told how it was; to begin anew must be asked for."""
    run = job("--give-up", "60", hosts=2, steps=30)
    for name in "ab":
        run.start(name)
    assert run.ends(*"ab") == {"a": 0, "b": 0}
    run.start("b")
    assert run.ends("b") == {"b": 0}
    assert run.said("b") == "ckpt-run: the run has ended: all ranks have ended well; to begin another, give --again\n"
    assert len([e for e in run.log() if e.kind == "run"]) == 1
    run.options += ["--again"]
    for name in "ab":
        run.start(name)
    assert run.ends(*"ab") == {"a": 0, "b": 0}
    assert len([e for e in run.log() if e.kind == "run"]) == 2


def test_drain(job: Callable[..., Job]) -> None:
    run = job(steps=10_000)
    for name in "abc":
        run.start(name)
    run.until_step(5)
    assert run.ask("drain").returncode == 0
    assert set(run.ends(*"abc").values()) == {0}
    log = run.log()
    (agreed,) = [e.facts["step"] for e in log if e.kind == "stop" and e.facts["agreed"]]
    (told,) = [line for line in run.ask("why").stdout.splitlines() if "  stop  " in line]
    assert told.endswith(f"  stop  drain, after step {agreed}")
    assert "have saved and ended, as drain asked" in log[-1].text


def test_status_and_plan(job: Callable[..., Job]) -> None:
    run = job("--min", "2", "--spares", "2", steps=10_000)
    for name in "abcd":
        run.start(name)
    run.until_step(5)
    run.until(lambda log: log[-1].text == "1 of 2 spare hosts wait; start the same command on more", "said")
    log = run.log()
    (spare,) = set("abcd") - set(starts(log)[0])
    status = run.ask("status").stdout
    assert f"{spare} " in status
    assert "spare" in status
    assert "coordinates" in status
    assert "1 of 2 spare hosts wait" in status
    lost = starts(log)[0][1]
    planned = run.ask("plan", "--dry-run", "--lose", lost).stdout
    assert planned.startswith(f"suppose  {lost} is lost\ndecision  host {lost} says nothing")
    assert f"without {lost} (gone) with {spare} instead" in planned
    planned = run.ask("plan", "--dry-run", "--lose", lost, "--lose", spare).stdout
    assert "4 ranks on" in planned
    assert "rank 3 was killed by SIGKILL" in run.ask("plan", "--dry-run", "--fail", "3").stdout
    assert run.ask("plan").stdout.startswith("suppose  rank 0 is killed\ndecision  rank 0 was killed by SIGKILL")
    everyone = [word for name in "abcd" for word in ("--lose", name)]
    assert "without any host nothing is decided" in run.ask("plan", *everyone).stderr
    assert run.ask("plan", "--lose", "nobody").returncode == 1
    assert "there is no rank 6: the run has 6 ranks, numbered from 0" in run.ask("plan", "--fail", "6").stderr
    assert [e.kind for e in run.log()] == [e.kind for e in log], "nothing was done"


def test_another_command(job: Callable[..., Job]) -> None:
    run = job(steps=10_000)
    run.start("a")
    run.until(lambda log: bool(log), "begun")
    run.start("b", program=("sleep", "1"))
    assert run.ends("b") == {"b": 1}
    assert "another run is under way there (3 hosts with 2 ranks each" in run.said("b")


@ETCD
def test_hosts_without_their_number(job: Callable[..., Job]) -> None:
    """Each is a job on one host: they can't share a state."""
    run = job(hosts=1)
    run.start("a", program=("sleep", "60"))
    run.until(lambda log: bool(log), "begun")
    run.start("b", program=("sleep", "60"))
    assert run.ends("b") == {"b": 1}
    said = "another run is under way there (1 host with 2 ranks: sleep 60); for one job on several hosts give --nnodes on each"
    assert said in run.said("b")


def test_a_run_on_one_host_in_the_same_place(job: Callable[..., Job]) -> None:
    run = job(steps=10_000)
    for name in "abc":
        run.start(name)
    run.until_step(3)
    command = [*RUN, "--run-dir", str(run.folder / "run"), "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "another ckpt-run works in" in done.stderr
    assert all(agent.poll() is None for agent in run.agents.values())


@ETCD
def test_two_hosts_of_one_name(job: Callable[..., Job]) -> None:
    run = job(steps=10_000)
    run.start("a")
    run.until(lambda log: bool(log), "begun")
    time.sleep(1)
    first = run.agents["a"]
    run.start("a", files="elsewhere")
    try:
        assert run.ends("a") == {"a": 1}
        assert "another host of this run is called a; give this one another --name" in run.said("a")
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()


def test_nothing_is_left(job: Callable[..., Job]) -> None:
    run = job(steps=10_000)
    for name in "abc":
        run.start(name)
    run.until_step(3)
    pids = [run.pid(rank) for rank in range(6)]
    for agent in run.agents.values():
        agent.kill()
    assert none_left(pids)


@needs_etcd
def test_etcd_goes_away_for_a_while(tmp_path: Path) -> None:
    """The ranks go on; what happens to them meanwhile is dealt with afterwards, and nobody is taken for lost."""
    server = EtcdProcess(tmp_path / "etcd")
    server.start()
    run = Job(tmp_path / "job", f"etcd://{server.endpoint.removeprefix('http://')}/lab", steps=600)
    try:
        for name in "abc":
            run.start(name)
        run.until_step(12)
        before = max(run.steps_done(0))
        server.kill()
        time.sleep(4.5)
        until(lambda: max(run._step(run.folder / f"at-0-{rank}") for rank in range(6)) > before + 20)
        assert all(processes.process_state(run.pid(rank)) for rank in range(6))
        os.kill(run.pid(2), signal.SIGKILL)
        waits = "rank 2 was killed by SIGKILL; what is done about it is decided when the state answers"
        until(lambda: any(waits in run.said(name) for name in "abc"))
        server.start()
        assert set(run.ends(*"abc").values()) == {0}
        log = run.log()
        assert [(e.facts["cause"], e.facts["ranks"]) for e in log if e.kind == "failure"] == [("signal", [2])]
        is_right(run, 6)
        assert sum(run.said(name).count(waits) for name in "abc") == 1
    finally:
        run.close()
        server.kill()
        shutil.rmtree(server.folder, ignore_errors=True)


@needs_etcd
def test_etcd_goes_away_for_good(tmp_path: Path) -> None:
    """Each host says how it stands there, and ends when it is asked to."""
    server = EtcdProcess(tmp_path / "etcd")
    server.start()
    run = Job(tmp_path / "job", f"etcd://{server.endpoint.removeprefix('http://')}/lab", "--grace", "1", hosts=2, steps=300)
    try:
        for name in "ab":
            run.start(name)
        run.until_step(5)
        server.kill()
        ended = "all ranks of this host have ended well; the run ends when the state answers, or by another signal"
        until(lambda: all((run.folder / f"end-{rank}.npy").exists() for rank in range(4)), 90)
        time.sleep(4)  # the ranks have yet to end, and their agents to see it
        for agent in run.agents.values():
            agent.send_signal(signal.SIGTERM)
        assert run.ends(*"ab") == dict.fromkeys("ab", 128 + signal.SIGTERM)
        for name in "ab":
            assert run.said(name).count(ended) == 1
            assert "SIGTERM: without the state the ranks can't be asked to save; they are ended within 7 s" in run.said(name)
        is_right(run, 4)
    finally:
        run.close()
        server.kill()


# --- hosts that are cut off --------------------------------------------------------------------------------------


@needs_etcd
def test_a_host_is_cut_off(tmp_path: Path) -> None:
    """The others notice and go on without it. What its ranks still save counts for nothing; when it is back it is a spare."""
    with hosts_on_a_wire(4) as hosts:
        hosts.run_etcd(3, tmp_path / "etcd")
        until(lambda: answers(f"http://{hosts.etcd_at(3)}"))
        run = OnHosts(tmp_path / "job", f"etcd://{hosts.etcd_at(3)}/lab", "--min", "2", steps=900)
        run.hosts = hosts
        for name in "abc":
            run.start(name)
        run.until_step(12)
        victim = starts(run.log())[0][1]
        hosts.cut("abc".index(victim), 3)
        run.until(lambda log: len(starts(log)) == 2, "gone on")
        log = run.log()
        assert [(e.facts["cause"], e.facts["host"]) for e in log if e.kind == "failure"] == [("lost", victim)]
        run.until_step(12, attempt=1)
        hosts.mend("abc".index(victim), 3)
        assert set(run.ends(*"abc").values()) == {0}
        is_right(run, 4)


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
