"""Malformed values in etcd, beside those of a running job: its agents continue."""

from __future__ import annotations

import json
import time
from pathlib import Path

from helpers.etcd_server import EtcdProcess, needs_etcd
from helpers.host_runs import Job, starts
from helpers.processes import until

from ckpt.aggregator.cluster.etcd_client import EtcdClient

LOG = "/ckpt-run/lab/log/"
AGENTS = "/ckpt-run/lab/agents/"


def _newer(data: dict[str, object]) -> dict[str, object]:
    return {**data, "added_later": [{"a": 1}]}


@needs_etcd
def test_bad_reports_and_entries_end_no_agent(tmp_path: Path) -> None:
    server = EtcdProcess(tmp_path / "etcd")
    server.start()
    job = Job(tmp_path / "job", f"etcd://{server.endpoint.removeprefix('http://')}/lab", hosts=2, steps=1_000_000)
    try:
        job.start("a")
        job.start("b")
        job.until_step(5)
        start = next(entry for entry in job.log() if entry.kind == "start")
        etcd = EtcdClient(server.endpoints)
        report = json.loads(etcd.get(f"{AGENTS}a").value)
        bad = (b"", b"?", b"[]", b'{"name": "x"}', b"[" * 100_000, json.dumps({**report, "wrong": {"cause": 3}}).encode())
        for i, value in enumerate(bad):
            etcd.put(f"{AGENTS}bad{i}", value)
        rows = [
            [time.time(), 1, "start", "", {**start.facts, "members": 3}], [time.time(), 1, "start", "", {}], "?", [],
            [time.time(), 1, "decision", "", {"action": "halt"}], ["now", 1, "end", "", {"status": 0}],
            [time.time(), 0, "note", "read", _newer({})],
        ]  # fmt: skip
        for row in rows:
            while not etcd.put_new({f"{LOG}{len(etcd.range(LOG)) + 1:012d}": json.dumps(row).encode()}):
                pass
        expected = [f"{AGENTS}bad{i} in etcd is not a report" for i in (0, 1, 2, 4)]
        expected += [f"report of agent bad{i}" for i in (3, 5)]
        until(lambda: all(text in job.messages(name) for text in expected for name in "ab"))
        job.until(lambda log: any(entry.text == "read" for entry in log), "the last entry is read")
        reached = min(job.steps_done(0))
        until(lambda: min(job.steps_done(0)) > reached + 20)
        assert [agent.poll() for agent in job.agents.values()] == [None, None]
        log = job.log()
        assert [sorted(hosts) for hosts in starts(log)] == [["a", "b"]]
        assert sum("is skipped" in entry.text for entry in log) == len(rows) - 1
        assert "Traceback" not in job.messages("a") + job.messages("b")
    finally:
        job.close()
        server.kill()
