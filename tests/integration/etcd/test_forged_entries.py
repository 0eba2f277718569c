"""An attacker who can write to etcd, and does not know the token of a job, writes into the log of its run."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.etcd_server import EtcdProcess, needs_etcd, running_etcd  # noqa: F401  a fixture
from helpers.host_runs import Job, starts
from helpers.processes import until

from ckpt.aggregator.cluster.etcd_client import EtcdClient
from ckpt.recovery.run_log.base import Draft
from ckpt.recovery.run_log.entry_signatures import Signer, UntrustedValue
from ckpt.recovery.run_log.etcd import EtcdRunLog
from ckpt.storage.base.errors import Refused

TOKEN = "the token of the job, which is long enough"
LOG = "/ckpt-run/lab/log/"
AGENTS = "/ckpt-run/lab/agents/"


def _state(server: EtcdProcess, token: str | None = TOKEN, read_only: bool = False) -> EtcdRunLog:
    return EtcdRunLog(f"etcd://{server.endpoint.removeprefix('http://')}/lab", token, read_only)


def _forge(server: EtcdProcess, kind: str, facts: dict[str, Any], signer: Signer | None = None) -> int:
    """Write an entry after the last one, as anybody who reaches etcd can, and return its number."""
    etcd = EtcdClient(server.endpoints)
    while True:
        number = len(etcd.range(LOG)) + 1
        key, value = f"{LOG}{number:012d}", json.dumps([time.time(), 1, kind, "forged", facts]).encode()
        if etcd.put_new({key: value if signer is None else signer.sign(key, value)}):
            return number


@needs_etcd
def test_a_forged_start_entry_starts_no_rank(server: EtcdProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_TOKEN", TOKEN)
    job = Job(tmp_path / "job", f"etcd://{server.endpoint.removeprefix('http://')}/lab", hosts=2, steps=1_000_000)
    try:
        job.start("a")
        job.start("b")
        job.until_step(5)
        start = next(entry for entry in job.log() if entry.kind == "start")
        environment = {"LD_PRELOAD": "/tmp/evil.so", "PYTHONSTARTUP": "/tmp/evil.py"}
        forged = [_forge(server, "start", {**start.facts, "environment": environment, "command": ["/tmp/evil"]})]
        other = Signer("another token, which is long enough, too")
        forged.append(_forge(server, "end", {"status": 0, "final": True}, other))
        etcd = EtcdClient(server.endpoints)
        report = json.loads(Signer(TOKEN).verify(f"{AGENTS}a", etcd.get(f"{AGENTS}a").value))
        for name in "zy":  # one of no agent, and a signed one for another name
            stolen = Signer(TOKEN).sign(f"{AGENTS}a", json.dumps(report).encode())
            etcd.put(f"{AGENTS}{name}", stolen if name == "y" else json.dumps({**report, "name": "z"}).encode())
        expected = [f"entry {number} of the log of the run is skipped" for number in forged]
        expected.append(f"{AGENTS}y in etcd is not a report of an agent of this run")
        until(lambda: all(text in job.messages(name) for text in expected for name in "ab"))
        reached = min(job.steps_done(0))
        until(lambda: min(job.steps_done(0)) > reached + 20)
        assert [agent.poll() for agent in job.agents.values()] == [None, None]
        log = job.log()
        assert [sorted(hosts) for hosts in starts(log)] == [["a", "b"]]
        assert [(log[number - 1].kind, log[number - 1].facts) for number in forged] == [("note", {})] * 2
        assert not list(tmp_path.rglob("at-1-*"))

        monkeypatch.delenv("CKPT_TOKEN")
        refused = job.ask("drain")
        assert refused.returncode == 1
        assert "give that token" in refused.stderr, "an unsigned request would be ignored"
        assert "was not checked, as there is no token" in job.ask("why").stderr
        monkeypatch.setenv("CKPT_TOKEN", TOKEN)
        assert job.ask("drain").returncode == 0
        job.ends("a", "b")
    finally:
        job.close()


@needs_etcd
def test_a_copied_entry_counts_only_at_its_own_key(server: EtcdProcess) -> None:
    state = _state(server)
    assert state.append(0, [Draft(0, "note", "first"), Draft(0, "note", "second")])
    etcd = EtcdClient(server.endpoints)
    first = etcd.get(f"{LOG}{1:012d}").value
    etcd.put(f"{LOG}{3:012d}", first)  # the same entry at a later number
    etcd.put("/ckpt-run/other/log/000000000001", first)  # the same entry in another job
    assert [entry.text[:8] for entry in state.entries()] == ["first", "second", "entry 3 "]
    assert state.append(3, [Draft(0, "note", "fourth")]), "an ignored entry has its number, too"
    assert state.entries(3)[0].text == "fourth"
    with pytest.raises(Refused, match="has the log of a job with another token"):
        EtcdRunLog(f"etcd://{server.endpoint.removeprefix('http://')}/other", TOKEN).entries()


@needs_etcd
def test_keys_that_no_agent_writes_are_ignored(server: EtcdProcess, caplog: pytest.LogCaptureFixture) -> None:
    state = _state(server)
    assert state.append(0, [Draft(0, "note", "first")])
    etcd = EtcdClient(server.endpoints)
    for name in ("000000000001x", "000000000900", "zebra"):
        etcd.put(f"{LOG}{name}", b"{}")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert [entry.text for entry in state.entries()] == ["first"]
    assert caplog.text.count("is not the next entry of the run log") == 3
    assert state.append(1, [Draft(0, "note", "second")])
    assert [entry.number for entry in state.entries()] == [1, 2]


@needs_etcd
def test_an_agent_with_another_token_or_none_takes_no_part(server: EtcdProcess, caplog: pytest.LogCaptureFixture) -> None:
    assert _state(server).append(0, [Draft(0, "note", "first")])
    for token in ("another token, which is long enough, too", None):
        with pytest.raises(Refused, match="give that token .*, or another NAME"):
            _state(server, token).entries()
    with caplog.at_level(logging.WARNING):
        assert [entry.text for entry in _state(server, None, read_only=True).entries()] == ["first"]
    assert "was not checked, as there is no token" in caplog.text


def test_without_a_token_there_is_a_warning_beyond_loopback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        EtcdRunLog("etcd://127.0.0.1:2379,[::1]:2379/lab")
        EtcdRunLog("etcd://192.0.2.1:2379/lab", TOKEN)
        assert not caplog.text
        EtcdRunLog("etcd://127.0.0.1:2379,192.0.2.1:2379/lab")
    assert "give --token-file" in caplog.text


def test_a_signature_covers_the_key_and_the_value() -> None:
    signer = Signer(TOKEN)
    stored = signer.sign("a", b"[1]")
    assert signer.verify("a", stored) == b"[1]"
    changed = [("b", stored), ("a", stored[:-1] + b"]]"), ("a", b"[1]"), ("a", b""), ("a", stored[:40]), ("a", b"\xff" * 90)]
    for key, value in changed:
        with pytest.raises(UntrustedValue):
            signer.verify(key, value)
    with pytest.raises(UntrustedValue):
        Signer(None).verify("a", stored)
    assert Signer(None).verify("a", b"[1]") == b"[1]"
