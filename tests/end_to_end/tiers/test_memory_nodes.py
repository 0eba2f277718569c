"""The nodes that serve the memory of hosts: how ranks name them, their port, their token."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.agent_worlds import agent, world
from helpers.certificates import certificates
from helpers.host_runs import RUN
from helpers.memory_runs import InMemory, failures, in_full, keepers, memories_of
from helpers.memory_runs import job as job
from helpers.processes import until
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.aggregator.cluster.config import parse_namespace_url
from ckpt.recovery.memory_tier.memory_nodes import MemoryNodes, NodeSecurity
from ckpt.recovery.run_log import memory_placement
from ckpt.recovery.run_log.agent_reports import AgentReport, HostFailure
from ckpt.recovery.run_log.memory_placement import MemoryNamespace, choose_memories
from ckpt.storage.base.errors import InvalidArgument


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
