"""The nodes that serve the memory of hosts: their URLs for ranks, their ports, their token."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.agent_worlds import agent, world
from helpers.certificates import certificates
from helpers.host_runs import RUN
from helpers.memory_runs import InMemory, failures, memories_of, memory_server_pids, with_make_soak
from helpers.memory_runs import job as job
from helpers.processes import python, until
from helpers.unread_pipe import full_pipe
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.aggregator.cluster.config import parse_namespace_url
from ckpt.recovery.memory_tier import memory_nodes
from ckpt.recovery.memory_tier.memory_nodes import MemoryNodes
from ckpt.recovery.run_log import memory_placement
from ckpt.recovery.run_log.agent_reports import AgentReport, HostFailure
from ckpt.recovery.run_log.memory_placement import MemoryNamespace, choose_memories
from ckpt.storage.base.errors import InvalidArgument, StoreError
from ckpt.storage.node.client import NodeStore
from ckpt.storage.node.client_credentials import NodeCredentials
from ckpt.storage.node.security_options import NodeSecurity


@with_make_soak
def test_memory_nodes_use_a_token_and_tls(job: Callable[..., InMemory], tmp_path: Path) -> None:
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
    for pid in memory_server_pids(run):
        assert token.read_text().encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    os.kill(run.pid(1), signal.SIGKILL)
    assert run.ends(*"ab") == {"a": 1, "b": 1}
    log = run.log()
    assert run.saved()[-1] >= failures(log)[0].facts["step"] - 2
    assert not any(token.read_text() in str(e) for e in log)
    run.assert_memory_is_released(*"ab")


def test_memory_on_reachable_hosts_needs_a_token_and_certificates(tmp_path: Path) -> None:
    """Without them a run has no memory tier, and one line reports it."""
    command = [*RUN, "--nnodes", "2", "--give-up", "1", "--run-dir", str(tmp_path), "--address", "0.0.0.0", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "memory" in line]
    assert "give --token-file, --tls-cert, --tls-key, --ca-file, or --insecure or --no-memory" in line


def serving(name: str, *ports: int, fresh: int | None = None, **more: object) -> AgentReport:
    """Return the report of a host whose memory nodes serve at these ports."""
    at = tuple(f"{name}:{port}" for port in (*ports, *(() if fresh is None else (fresh,))))
    report = replace(agent(name), memory="coming" if fresh is None else "ready", nodes=at)
    return replace(report, fresh="" if fresh is None else f"{name}:{fresh}", **more)  # type: ignore[arg-type]


def test_each_attempt_writes_to_fresh_memory_nodes() -> None:
    old = MemoryNamespace((("a", "a:1"), ("b", "b:1")))
    new = MemoryNamespace((("a", "a:2"), ("c", "c:5")))
    assert choose_memories([old], {"c": serving("c", fresh=5), "a": serving("a", 1, fresh=2)}) == (new, old)
    assert choose_memories([old], {"c": serving("c"), "a": serving("a", 1, fresh=2)}) is None
    assert choose_memories([old], {"a": serving("a", 1, fresh=2)}) == (MemoryNamespace((("a", "a:2"),)), old)
    again = {"a": serving("a", 1, fresh=2), "b": serving("b", fresh=7)}
    assert choose_memories([old], again) == (MemoryNamespace((("a", "a:2"), ("b", "b:7"))), old)
    many = [MemoryNamespace((("a", f"a:{port}"),)) for port in range(9, 2, -1)]
    kept = choose_memories(many, {"a": serving("a", fresh=10)})
    assert kept == (MemoryNamespace((("a", "a:10"),)), *many[:2], many[-1]), (
        "the last namespace has the newest step that is certainly committed"
    )


def test_hosts_without_memory_are_left_out_of_the_namespace() -> None:
    off = replace(agent("b"), memory="off")
    assert choose_memories([], {"a": serving("a", fresh=1), "b": off}) == ()
    three = {"a": serving("a", fresh=1), "b": off, "c": serving("c", fresh=3)}
    assert choose_memories([], three) == (MemoryNamespace((("a", "a:1"), ("c", "c:3"))),)
    old = MemoryNamespace((("a", "a:1"), ("b", "b:1")))
    assert choose_memories([old], {"a": serving("a", fresh=2), "b": off}) == (MemoryNamespace(), old), (
        "the old namespace is not kept for reading"
    )


def test_the_url_of_a_memory_namespace_names_its_nodes() -> None:
    two = MemoryNamespace((("a", "10.0.0.1:5"), ("b", "[::1]:6")))
    assert two.url("b") == "ckpt://10.0.0.1:5,[::1]:6?redundancy=2x&near=[::1]:6"
    config, _ = parse_namespace_url(two.url("b").replace("?", "/run?"))
    assert config.host_domain == ("[::1]:6",)
    assert [m.location.domain for m in config.members] == [("10.0.0.1:5",), ("[::1]:6",)]
    assert MemoryNamespace((("a", "a:1"),)).url() == "ckpt://a:1?redundancy=1x"
    assert memory_placement.from_facts(memory_placement.to_facts([two, MemoryNamespace()])) == (two, MemoryNamespace())
    with pytest.raises(InvalidArgument, match="near=c:3 is not one of the nodes"):
        parse_namespace_url("ckpt://a:1,b:2/run?near=c:3")


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_memory_stays_named_until_a_newer_step_is_committed(seed: int) -> None:
    """In random worlds, an attempt writes only to nodes of its own live hosts, no node is written to in two namespaces, and
    written memory stays named until a newer step is committed."""
    rng = random.Random(seed)
    run = world(hosts=3, least=1, agents=5)
    ports = iter(range(1, 10_000))
    nodes_of_host: dict[str, list[str]] = {}  # survives the agents of the hosts
    namespace_of_node: dict[str, frozenset[str]] = {}  # for each node that was written to, all nodes of its namespace

    def next_report(name: str, report: AgentReport) -> AgentReport:
        named = memory_placement.node_addresses(run.run_state.memory)
        own_nodes = nodes_of_host[name] = [at for at in nodes_of_host.setdefault(name, []) if at in named or at == report.fresh]
        fresh = report.fresh if report.fresh in own_nodes and report.fresh not in named else ""
        if not fresh and rng.random() < 0.7:
            fresh = f"{name}:{next(ports)}"
            own_nodes.append(fresh)
        return replace(report, nodes=tuple(own_nodes), fresh=fresh, memory="ready" if fresh else "coming")

    for _ in range(60):
        run.clock += 40.0
        run.step += rng.randrange(3)
        name = rng.choice("abcde")
        if name in run.agents and rng.random() < 0.3:
            del run.agents[name]
        elif name not in run.agents:
            run.agents[name] = replace(agent(name, run.clock), incarnation=f"{name}-{run.clock}")
            if rng.random() < 0.3:
                nodes_of_host[name] = []  # the host was rebooted
        elif run.agents[name].doing == "running" and rng.random() < 0.3:
            run.agents[name] = replace(run.agents[name], wrong=HostFailure("exit", (0,), "failed"))
        newer = rng.random() < 0.3
        for each, report in list(run.agents.items()):
            saved = run.step if newer and report.doing == "running" else -1
            run.agents[each] = replace(next_report(each, report), saved=saved)
        before, entries_before = run.run_state.memory, len(run.log)
        run.advance()
        for entry in run.log[entries_before:]:
            now = memory_placement.from_facts(entry.facts["memory"]) if "memory" in entry.facts else before
            if entry.kind == "start" and now:
                members = {m["name"] for m in entry.facts["members"]}
                assert {host for host, _ in now[0].nodes} == members
                assert all(at in run.agents[host].nodes for host, at in now[0].nodes)
                assert not before or before[-1] in now
                namespace = frozenset(memory_placement.node_addresses(now[:1]))
                assert all(namespace_of_node.setdefault(at, namespace) == namespace for at in namespace)
            elif entry.kind == "memory":
                assert newer
                assert now == before[:1]
        if run.run_state.has_ended:
            break


def test_missing_security_options_are_named() -> None:
    assert NodeSecurity().missing_options("127.0.0.1") == ""
    assert NodeSecurity(token=True).missing_options("10.0.0.1") == "--tls-cert, --tls-key, --ca-file"
    assert NodeSecurity(insecure=True).missing_options("10.0.0.1") == ""
    assert NodeSecurity(True, "c", "k", "a").missing_options("10.0.0.1") == ""
    assert NodeSecurity(insecure=True, authority="a").missing_options("10.0.0.1") == "--tls-cert, --tls-key", (
        "with an authority clients use TLS"
    )


def test_a_used_memory_node_restarts_at_its_port(tmp_path: Path) -> None:
    state = {"w": np.arange(50_000.0)}

    def update_until_ready(nodes: MemoryNodes, *named: str) -> bool:
        nodes.update(named)
        return nodes.state == "ready"

    first = MemoryNodes(tmp_path, "127.0.0.1", NodeSecurity())
    until(lambda: update_until_ready(first))
    used = first.fresh
    until(lambda: update_until_ready(first, used) and first.fresh != used)
    ckpt.save(state, f"ckpt://{used}/run", step=3)
    unused = first.fresh
    first.close()
    second = MemoryNodes(tmp_path, "127.0.0.1", NodeSecurity())
    until(lambda: update_until_ready(second, used))
    assert used in second.nodes
    assert unused not in second.nodes
    assert np.array_equal(ckpt.load(f"ckpt://{used}/run")["w"], state["w"])
    until(lambda: update_until_ready(second) and used not in second.nodes)
    until(lambda: not (tmp_path / used.rpartition(":")[2]).exists())
    second.close()
    second.remove()
    assert not tmp_path.exists()


def test_a_memory_node_whose_port_is_taken_gets_another(tmp_path: Path) -> None:
    """The objects of the old port are kept."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (tmp_path / str(port)).mkdir()
        nodes = MemoryNodes(tmp_path, "127.0.0.1", NodeSecurity())
        until(lambda: (nodes.update(()), nodes.state == "ready")[1])
        assert nodes.nodes == (nodes.fresh,)
        assert not nodes.fresh.endswith(f":{port}")
        assert (tmp_path / str(port)).exists()
        nodes.close()


def test_a_host_whose_memory_process_dies_again_and_again_counts_as_one_without_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other hosts wait for its fresh node only for a while, although each of its processes is ready before it dies."""
    monkeypatch.setattr(memory_nodes, "_FRESH_SECONDS", 5.0)
    monkeypatch.setenv("CKPT_FAILPOINTS", "memory_nodes.serve=an unknown action@*")
    nodes = MemoryNodes(tmp_path, "127.0.0.1", NodeSecurity())
    try:
        until(lambda: (nodes.update(()), nodes.state == "off")[1])
    finally:
        nodes.close()


def test_a_key_of_another_certificate_ends_no_memory_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As while a certificate is renewed, and its key is not written yet."""
    for each in ("old", "new"):
        (tmp_path / each).mkdir()
    (_, old_key), (certificate, _) = certificates(tmp_path / "old"), certificates(tmp_path / "new")
    nodes = MemoryNodes(tmp_path / "memory", "127.0.0.1", NodeSecurity(False, str(certificate), str(old_key), str(certificate)))
    try:
        until(lambda: (nodes.update(()), caplog.messages)[1])
        (message,) = caplog.messages
        assert "can't listen at 127.0.0.1" in message
        assert "has ended" not in message
    finally:
        nodes.close()


def test_memory_nodes_answer_although_nobody_reads_their_log(tmp_path: Path) -> None:
    """An unexpected error of a call is logged before it is sent to the client."""
    command = [sys.executable, "-P", "-m", "ckpt.recovery.memory_tier.memory_nodes"]
    options: dict[str, Any] = {"text": True, "env": os.environ | {"CKPT_FAILPOINTS": "node.get=error"}}
    with (
        full_pipe() as (_, unread),
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=unread, **options) as nodes,
    ):
        assert nodes.stdin is not None
        assert nodes.stdout is not None
        try:
            nodes.stdin.write(json.dumps([str(tmp_path), "127.0.0.1", "", ""]) + "\nfresh\n")
            nodes.stdin.flush()
            assert nodes.stdout.readline() == "ready\n"
            address = nodes.stdout.readline().split()[1]
            with pytest.raises(StoreError, match="see its log"):
                list(NodeStore(address, NodeCredentials(deadline_seconds=300)).read("a", 0, 1))
        finally:
            nodes.kill()


LIMITED = """
import sys, threading
from pathlib import Path

limit, start = Path(sys.argv[1]), threading.Thread.start

def start_below_limit(thread):
    if limit.exists() and thread.name.startswith(limit.read_text()):
        raise RuntimeError("can't start new thread")
    start(thread)

threading.Thread.start = start_below_limit
from ckpt.recovery.memory_tier.memory_nodes import serve_nodes
serve_nodes()
"""
"""The process of memory nodes, which gets no more threads while the file exists. It contains the beginning of their names."""


@pytest.mark.parametrize("refused", ["", "ckpt-node-fd", "ckpt-node-reaper"], ids=["all", "fd", "reaper"])
def test_a_lack_of_threads_ends_no_memory_node(tmp_path: Path, refused: str) -> None:
    folder, limit = tmp_path / "memory", tmp_path / "limit"
    folder.mkdir()
    with python(LIMITED, limit) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(line: str) -> list[str]:
            print(line, file=process.stdin, flush=True)
            return process.stdout.readline().split(maxsplit=1)  # type: ignore[union-attr]

        try:
            assert ask(json.dumps([str(folder), "127.0.0.1", "", ""])) == ["ready"]
            used, unused = ask("fresh")[1].strip(), ask("fresh")[1].strip()
            NodeStore(used).put("a", b"1")
            limit.write_text(refused)
            kind, reason = ask("fresh")
            assert (kind, "thread" in reason) == ("fails", True), reason
            print(f"drop {unused}", file=process.stdin, flush=True)
            until(lambda: [path.name for path in folder.iterdir()] == [used.rpartition(":")[2]], "the unused node is removed")
            assert NodeStore(used).get("a") == b"1"
            limit.unlink()
            fresh = ask("fresh")[1].strip()
            assert not NodeStore(fresh).exists("a")
        finally:
            process.kill()
