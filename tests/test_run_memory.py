"""The memory tier of a run on several hosts: no step is lost that is in the memory of a host that is left.

The agents are processes of this host; each has memory, nodes and ranks of its own.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from etcd_server import needs_etcd
from hypothesis import given, settings
from hypothesis import strategies as st
from netns import hosts_on_a_wire
from support import SOAK, until
from test_advance import agent, world
from test_nodes import certificates
from test_run import none_left
from test_run_hosts import RUN, Job, OnHosts, answers, leader_of, starts

import ckpt
from ckpt.aggregator.cluster.config import parse_namespace_url
from ckpt.recovery.memory_tier import local
from ckpt.recovery.memory_tier.memory_nodes import MemoryNodes, NodeSecurity
from ckpt.recovery.ranks import processes
from ckpt.recovery.run_log import memory_placement
from ckpt.recovery.run_log.agent_reports import AgentReport, HostFailure
from ckpt.recovery.run_log.base import LogEntry, open_run_log
from ckpt.recovery.run_log.memory_placement import MemoryNamespace, choose_memories
from ckpt.storage.base.errors import InvalidArgument

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


@in_full
def test_the_ranks_of_a_host_are_killed(job: Callable[..., InMemory]) -> None:
    """All of a host: what they saved is in its memory and another's, and at most the step under way is done again."""
    run = job(hosts=2, steps=13)
    for name in "ab":
        run.start(name)
    run.until_step(6)
    os.kill(run.pid(1), signal.SIGKILL)
    assert run.ends(*"ab") == {"a": 0, "b": 0}
    log = run.log()
    assert len(failures(log)) == 1
    assert run.begins(1) >= 5, "the save of step 5 may have been under way"
    assert memories_of(log)[1][1:] == memories_of(log)[0], "fresh nodes, and those before to read from"
    assert run.saved()[-1] == 12
    run.is_right(2)
    run.is_gone(*"ab")


def test_a_host_is_lost(job: Callable[..., InMemory]) -> None:
    """With its memory. A spare takes its place, in a new namespace; the newest step comes from what is left of the old one,
    which is given free then."""
    run = job(hosts=2, steps=13)
    for name in "abc":
        run.start(name)
    run.until_step(6)
    lost = starts(run.log())[0][1]
    run.agents[lost].kill()
    rest = sorted(set("abc") - {lost})
    assert set(run.ends(*rest).values()) == {0}
    log = run.log()
    assert len(failures(log)) == 1
    assert run.begins(1) >= 5, "the save of step 5 may have been under way"
    first, second = memories_of(log)
    assert [host for host, _ in second[0]] == rest
    assert second[1:] == first
    (dropped, ended) = [e for e in log if e.kind == "memory"]
    assert dropped.facts["memory"] == second[:1]
    assert ended.facts["memory"] == []
    run.is_right(2)
    run.is_gone(*rest)


def test_a_job_that_is_given_up(job: Callable[..., InMemory]) -> None:
    """Nobody could copy what is only in memory: the one that leads does, and the others serve theirs as long."""
    run = job("--restarts", "0", hosts=2, steps=10_000)
    for name in "ab":
        run.start(name)
    run.until_step(6)
    os.kill(run.pid(1), signal.SIGKILL)
    assert run.ends(*"ab") == {"a": 1, "b": 1}
    log = run.log()
    (failure,) = failures(log)
    assert [e.kind for e in log][-2:] == ["end", "memory"]
    assert "was brought from ckpt://127.0.0.1:" in run.said("a")
    assert run.saved()[-1] >= max(4, failure.facts["committed"])
    run.is_gone(*"ab")


@in_full
@pytest.mark.parametrize("which", ["both", "one"])
def test_agents_are_killed_and_started_again(job: Callable[..., InMemory], which: str) -> None:
    """Of two: what is still in their memory is served again, at the same ports."""
    run = job("--patience", "20", hosts=2, steps=15)
    for name in "ab":
        run.start(name)
    run.until_step(6)
    done = min(run.steps_done(0))
    victims = "ab" if which == "both" else "b"
    for name in victims:
        run.agents[name].kill()
    for name in victims:
        run.agents[name].wait()
        run.start(name)
    assert run.ends(*"ab") == {"a": 0, "b": 0}
    log = run.log()
    assert memories_of(log)[0][0] in memories_of(log)[-1]
    assert run.begins(len(starts(log)) - 1) >= done - 1
    run.is_right(2)
    run.is_gone(*"ab")


@in_full
def test_the_last_of_two_goes_on_alone(job: Callable[..., InMemory]) -> None:
    run = job("--min", "1", hosts=2, steps=20)
    for name in "ab":
        run.start(name)
    run.until_step(6)
    leader = leader_of(run.log())
    other = "b" if leader == "a" else "a"
    run.agents[leader].kill()
    assert run.ends(other) == {other: 0}
    log = run.log()
    assert run.begins(1) >= failures(log)[0].facts["step"] - 1
    assert [len(each[0]) for each in memories_of(log)] == [2, 1]
    run.is_right(1)
    run.is_gone(other)


@in_full
def test_nothing_is_left_running(job: Callable[..., InMemory]) -> None:
    """Where all agents are killed. What is in memory stays, for those that are started again."""
    run = job(hosts=2, steps=10_000)
    for name in "ab":
        run.start(name)
    run.until_step(6)
    assert len(keepers(run)) == 2
    pids = [run.pid(rank) for rank in range(2)]
    for process in run.agents.values():
        process.kill()
    until(lambda: not keepers(run))
    assert none_left(pids)
    assert all(run.files(name) for name in "ab")


@in_full
def test_a_host_that_is_silent(job: Callable[..., InMemory]) -> None:
    """Its agent and what serves its memory are stopped: calls to it are taken, and never answered. Nobody waits for it."""
    run = job("--min", "2", steps=30)
    for name in "abc":
        run.start(name)
    run.until_step(6)
    victim = starts(run.log())[0][1]
    agent = run.agents[victim].pid
    (keeper,) = [pid for pid in keepers(run) if int(processes._stat_fields(pid)[1]) == agent]
    for pid in (agent, keeper):
        os.kill(pid, signal.SIGSTOP)
    run.until_step(25, attempt=1)
    assert run.begins(1) >= failures(run.log())[0].facts["step"] - 1
    for pid in (keeper, agent):
        os.kill(pid, signal.SIGCONT)
    assert set(run.ends(*"abc").values()) == {0}
    run.is_right(2)
    run.is_gone(*"abc")


@needs_etcd
@in_full
def test_a_host_whose_wire_is_cut(job: Callable[..., InMemory], tmp_path: Path) -> None:
    """What is sent to it is lost without a word."""
    with hosts_on_a_wire(4) as hosts:
        hosts.run_etcd(3, tmp_path / "etcd")
        until(lambda: answers(f"http://{hosts.etcd_at(3)}"))
        job()
        state = f"etcd://{hosts.etcd_at(3)}/lab"
        run = OnHosts(tmp_path / "job", state, "-n", "1", "--memory", "--insecure", "--min", "2", steps=90)
        run.hosts = hosts
        for name in "abc":
            run.start(name)
        run.until_step(6)
        log = run.log()
        victim = starts(log)[0][1]
        assert all(at.startswith(f"{hosts.network}.") for _, at in memories_of(log)[0][0])
        hosts.unplug("abc".index(victim))
        run.until(lambda log: len(starts(log)) == 2, "gone on")
        run.until_step(30, attempt=1)
        failure = failures(run.log())[0]
        assert (failure.facts["cause"], failure.facts["host"]) == ("lost", victim)
        assert int((run.folder / "from-1-0").read_text()) >= failure.facts["step"] - 1
        hosts.plug("abc".index(victim))
        assert set(run.ends(*"abc").values()) == {0}
        InMemory.is_right(run, 2)  # type: ignore[arg-type]
        assert not keepers(run)


@in_full
def test_the_leader_dies_while_it_brings_the_newest_home(job: Callable[..., InMemory]) -> None:
    """The next one does it, from what the others still serve."""
    run = job("--restarts", "0", steps=10_000)
    run.start("a", failpoints="agent.home=kill")
    run.until(lambda log: any(e.kind == "lead" for e in log), "led")
    for name in "bc":
        run.start(name)
    run.until_step(6)
    os.kill(run.pid(1), signal.SIGKILL)
    assert run.ends(*"abc") == {"a": -signal.SIGKILL, "b": 1, "c": 1}
    log = run.log()
    assert len([e for e in log if e.kind == "lead"]) == 2
    assert log[-1].kind == "memory"
    assert run.saved()[-1] >= failures(log)[0].facts["step"] - 2
    run.is_gone(*"bc")


@in_full
def test_the_repository_is_away_at_the_end(job: Callable[..., InMemory]) -> None:
    """The memory is kept, and the next run finds what is in it."""
    run = job("--restarts", "0", hosts=2, steps=13)
    for name in "ab":
        run.start(name)
    run.until_step(6)
    repo, away = run.folder / "repo", run.folder / "away"
    os.kill(run.pid(1), signal.SIGSTOP)
    repo.rename(away)
    repo.write_text("no folder")
    assert run.ends(*"ab") == {"a": 1, "b": 1}
    assert "the memory is kept: start ckpt-run again" in run.said("a")
    assert not keepers(run)
    assert run.files("a")
    repo.unlink()
    away.rename(repo)
    done = failures(run.log())[0].facts["step"]
    for path in run.folder.glob("from-*"):
        path.unlink()
    for name in "ab":
        run.start(name)
    assert run.ends(*"ab") == {"a": 0, "b": 0}
    assert run.begins(1) >= done - 1
    run.is_right(2)
    run.is_gone(*"ab")


@in_full
def test_asked_to_end(job: Callable[..., InMemory]) -> None:
    run = job(hosts=2, steps=10_000)
    for name in "ab":
        run.start(name)
    run.until_step(6)
    for name in "ab":
        run.agents[name].send_signal(signal.SIGTERM)
    assert set(run.ends(*"ab").values()) == {128 + signal.SIGTERM}
    assert run.saved()[-1] == failures(run.log())[0].facts["step"], "the last step that was done"
    run.is_gone(*"ab")


@in_full
def test_one_host_leaves(job: Callable[..., InMemory]) -> None:
    run = job("--min", "2", steps=40)
    for name in "abc":
        run.start(name)
    run.until_step(6)
    run.agents["b"].send_signal(signal.SIGTERM)
    assert run.ends("b") == {"b": 128 + signal.SIGTERM}
    assert not run.files("b")
    assert run.ends("a", "c") == {"a": 0, "c": 0}
    log = run.log()
    assert run.begins(1) == failures(log)[0].facts["step"] + 1, "nothing is done twice"
    run.is_right(2)
    run.is_gone(*"abc")


@in_full
def test_a_flipped_byte_in_memory(job: Callable[..., InMemory]) -> None:
    """In each object that one host has: the other copy is taken."""
    run = job(hosts=2, steps=15)
    for name in "ab":
        run.start(name)
    run.until_step(6)
    for rank in range(2):
        os.kill(run.pid(rank), signal.SIGSTOP)
    flipped = 0
    for path in run.files("a"):
        if "objects" in path.parts and path.stat().st_size > 4096:
            with path.open("r+b") as file:
                file.seek(100)
                byte = file.read(1)[0]
                file.seek(100)
                file.write(bytes([byte ^ 1]))
            flipped += 1
    assert flipped
    assert run.ends(*"ab") == {"a": 0, "b": 0}
    assert run.begins(1) >= failures(run.log())[0].facts["committed"] + 1
    run.is_right(2)
    run.is_gone(*"ab")


@in_full
def test_what_serves_the_memory_of_a_host_is_killed(job: Callable[..., InMemory]) -> None:
    """The job goes on without it; it is back at once, with all that it had."""
    run = job(steps=60)
    for name in "abc":
        run.start(name)
    run.until_step(6)
    killed = keepers(run)[1]
    os.kill(killed, signal.SIGKILL)
    run.until_step(30)
    assert len(keepers(run)) == 3
    assert killed not in keepers(run)
    assert not failures(run.log())
    os.kill(run.pid(1), signal.SIGKILL)
    assert set(run.ends(*"abc").values()) == {0}
    assert run.begins(1) >= 29
    run.is_right(3)
    run.is_gone(*"abc")


@in_full
def test_all_that_serves_memory_is_killed(job: Callable[..., InMemory]) -> None:
    """A save fails then, and the ranks start again from what is served once more."""
    run = job(hosts=2, steps=30)
    for name in "ab":
        run.start(name)
    run.until_step(6)
    for pid in keepers(run):
        os.kill(pid, signal.SIGKILL)
    assert run.ends(*"ab") == {"a": 0, "b": 0}
    for attempt, failure in enumerate(failures(run.log()), 1):
        assert run.begins(attempt) >= max(5, failure.facts["step"] - 1)
    run.is_right(2)
    run.is_gone(*"ab")


@in_full
def test_with_token_and_tls(job: Callable[..., InMemory], tmp_path: Path) -> None:
    certificate, key = certificates(tmp_path)
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123")
    guard = ["--token-file", token, "--tls-cert", certificate, "--tls-key", key, "--ca-file", certificate]
    run = job(*map(str, guard), "--restarts", "0", hosts=2, steps=10_000)
    for name in "ab":
        run.start(name)
    run.until_step(6)
    at = memories_of(run.log())[0][0][0][1]
    with pytest.raises(ckpt.CkptError):
        ckpt.open(f"ckpt://{at}/x").steps()
    for pid in keepers(run):
        assert token.read_text().encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    os.kill(run.pid(1), signal.SIGKILL)
    assert run.ends(*"ab") == {"a": 1, "b": 1}
    log = run.log()
    assert run.saved()[-1] >= failures(log)[0].facts["step"] - 2
    assert not any(token.read_text() in str(e) for e in log)
    run.is_gone(*"ab")


def test_hosts_that_strangers_reach(tmp_path: Path) -> None:
    """Without a token and certificates there is no memory, and one line says so."""
    command = [*RUN, "--nnodes", "2", "--give-up", "1", "--run-dir", str(tmp_path), "--address", "0.0.0.0", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "memory" in line]
    assert "give --token-file, --tls-cert, --tls-key, --ca-file, or --insecure or --no-memory" in line


# --- which nodes -------------------------------------------------------------------------------------------------


def serving(name: str, *ports: int, fresh: int | None = None, **more: object) -> AgentReport:
    at = tuple(f"{name}:{port}" for port in (*ports, *(() if fresh is None else (fresh,))))
    said = replace(agent(name), memory="coming" if fresh is None else "ready", nodes=at)
    return replace(said, fresh="" if fresh is None else f"{name}:{fresh}", **more)  # type: ignore[arg-type]


def test_each_attempt_has_fresh_nodes() -> None:
    old = MemoryNamespace((("a", "a:1"), ("b", "b:1")))
    new = MemoryNamespace((("a", "a:2"), ("c", "c:5")))
    assert choose_memories([old], {"c": serving("c", fresh=5), "a": serving("a", 1, fresh=2)}) == (new, old)
    assert choose_memories([old], {"c": serving("c"), "a": serving("a", 1, fresh=2)}) is None
    assert choose_memories([old], {"a": serving("a", 1, fresh=2)}) == (MemoryNamespace((("a", "a:2"),)), old)
    again = {"a": serving("a", 1, fresh=2), "b": serving("b", fresh=7)}
    assert choose_memories([old], again) == (MemoryNamespace((("a", "a:2"), ("b", "b:7"))), old)
    many = [MemoryNamespace((("a", f"a:{port}"),)) for port in range(9, 2, -1)]
    kept = choose_memories(many, {"a": serving("a", fresh=10)})
    assert kept == (MemoryNamespace((("a", "a:10"),)), *many[:2], many[-1]), "the last has what was committed for certain"


def test_hosts_without_memory() -> None:
    off = replace(agent("b"), memory="off")
    assert choose_memories([], {"a": serving("a", fresh=1), "b": off}) == ()
    three = {"a": serving("a", fresh=1), "b": off, "c": serving("c", fresh=3)}
    assert choose_memories([], three) == (MemoryNamespace((("a", "a:1"), ("c", "c:3"))),)
    old = MemoryNamespace((("a", "a:1"), ("b", "b:1")))
    assert choose_memories([old], {"a": serving("a", fresh=2), "b": off}) == (MemoryNamespace(), old), "it can still be read"


def test_how_ranks_name_it() -> None:
    two = MemoryNamespace((("a", "10.0.0.1:5"), ("b", "[::1]:6")))
    assert two.url("b") == "ckpt://10.0.0.1:5,[::1]:6?redundancy=2x&near=[::1]:6"
    config, _ = parse_namespace_url(two.url("b").replace("?", "/run?"))
    assert config.host_domain == ("[::1]:6",)
    assert [m.location.domain for m in config.members] == [("10.0.0.1:5",), ("[::1]:6",)]
    assert MemoryNamespace((("a", "a:1"),)).url() == "ckpt://a:1?redundancy=1x"
    assert memory_placement.from_facts(memory_placement.to_facts([two, MemoryNamespace()])) == (two, MemoryNamespace())
    with pytest.raises(InvalidArgument, match="near= names one of the nodes"):
        parse_namespace_url("ckpt://a:1,b:2/run?near=c:3")


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_happens_what_is_in_memory_is_named(seed: int) -> None:
    """In random worlds: an attempt writes to nodes of its own hosts that are there; no node is written to in two namespaces;
    and what was written before stays named until something newer is committed."""
    rng = random.Random(seed)
    run = world(hosts=3, least=1, agents=5)
    ports = iter(range(1, 10_000))
    held: dict[str, list[str]] = {}  # of hosts, whatever becomes of their agents
    homes: dict[str, frozenset[str]] = {}  # of each node that was written to: the nodes of its namespace

    def served(name: str, said: AgentReport) -> AgentReport:
        named = memory_placement.node_addresses(run.course.memory)
        mine = held[name] = [at for at in held.setdefault(name, []) if at in named or at == said.fresh]
        fresh = said.fresh if said.fresh in mine and said.fresh not in named else ""
        if not fresh and rng.random() < 0.7:
            fresh = f"{name}:{next(ports)}"
            mine.append(fresh)
        return replace(said, nodes=tuple(mine), fresh=fresh, memory="ready" if fresh else "coming")

    for _ in range(60):
        run.clock += 40.0
        run.step += rng.randrange(3)
        name = rng.choice("abcde")
        if name in run.agents and rng.random() < 0.3:
            del run.agents[name]
        elif name not in run.agents:
            run.agents[name] = replace(agent(name, run.clock), incarnation=f"{name}-{run.clock}")
            if rng.random() < 0.3:
                held[name] = []  # the host was booted
        elif run.agents[name].doing == "running" and rng.random() < 0.3:
            run.agents[name] = replace(run.agents[name], wrong=HostFailure("exit", (0,), "failed"))
        newer = rng.random() < 0.3
        for each, said in list(run.agents.items()):
            saved = run.step if newer and said.doing == "running" else -1
            run.agents[each] = replace(served(each, said), saved=saved)
        before, was = run.course.memory, len(run.log)
        run.turn()
        for entry in run.log[was:]:
            now = memory_placement.from_facts(entry.facts["memory"]) if "memory" in entry.facts else before
            if entry.kind == "start" and now:
                members = {m["name"] for m in entry.facts["members"]}
                assert {host for host, _ in now[0].nodes} == members
                assert all(at in run.agents[host].nodes for host, at in now[0].nodes)
                assert not before or before[-1] in now
                space = frozenset(memory_placement.node_addresses(now[:1]))
                assert all(homes.setdefault(at, space) == space for at in space)
            elif entry.kind == "memory":
                assert newer
                assert now == before[:1]
        if run.course.has_ended:
            break


def test_what_keeps_strangers_out() -> None:
    assert NodeSecurity().missing_options("127.0.0.1") == ""
    assert NodeSecurity(token=True).missing_options("10.0.0.1") == "--tls-cert, --tls-key, --ca-file"
    assert NodeSecurity(insecure=True).missing_options("10.0.0.1") == ""
    assert NodeSecurity(True, "c", "k", "a").missing_options("10.0.0.1") == ""
    assert NodeSecurity(insecure=True, authority="a").missing_options("10.0.0.1") == "--tls-cert, --tls-key", (
        "clients would speak TLS"
    )


# --- the process that serves them --------------------------------------------------------------------------------


def test_a_node_comes_back_where_it_was(tmp_path: Path) -> None:
    state = {"w": np.arange(50_000.0)}

    def look(keeper: MemoryNodes, *named: str) -> bool:
        keeper.update(named)
        return keeper.state == "ready"

    first = MemoryNodes(tmp_path, "127.0.0.1", NodeSecurity())
    until(lambda: look(first))
    used = first.fresh
    until(lambda: look(first, used) and first.fresh != used)
    ckpt.save(state, f"ckpt://{used}/run", step=3)
    unused = first.fresh
    first.close(remove=False)
    second = MemoryNodes(tmp_path, "127.0.0.1", NodeSecurity())
    until(lambda: look(second, used))
    assert used in second.nodes
    assert unused not in second.nodes
    assert np.array_equal(ckpt.load(f"ckpt://{used}/run")["w"], state["w"])
    until(lambda: look(second) and used not in second.nodes)
    until(lambda: not (tmp_path / used.rpartition(":")[2]).exists())
    second.close(remove=True)
    assert not tmp_path.exists()


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    """What was served there is kept, and a fresh node has another."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (tmp_path / str(port)).mkdir()
        keeper = MemoryNodes(tmp_path, "127.0.0.1", NodeSecurity())
        until(lambda: (keeper.update(()), keeper.state == "ready")[1])
        assert keeper.nodes == (keeper.fresh,)
        assert not keeper.fresh.endswith(f":{port}")
        assert (tmp_path / str(port)).exists()
        keeper.close(remove=False)
