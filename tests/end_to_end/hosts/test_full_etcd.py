"""etcd refuses writes for a while because it is full."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from helpers.etcd_server import EtcdProcess, needs_etcd
from helpers.host_runs import Job, assert_result
from helpers.processes import until

from ckpt.aggregator.cluster.etcd_client import EtcdClient
from ckpt.recovery.run_log.agent_reports import LOST_SECONDS
from ckpt.storage.base.errors import Unavailable


def _fill(client: EtcdClient) -> None:
    """Write until etcd refuses it."""
    with pytest.raises(Unavailable, match="etcd is full"):
        while True:
            client.put("/full", b"x" * 500_000)


def _free(client: EtcdClient) -> None:
    """Free the space, as the runbook says."""
    client.compact(client.current_revision("/"))
    client._call("maintenance/defragment", {})
    member = client._call("maintenance/status", {})["header"]["member_id"]
    client._call("maintenance/alarm", {"action": "DEACTIVATE", "memberID": member, "alarm": "NOSPACE"})


@needs_etcd
def test_no_host_is_lost_while_etcd_is_full(tmp_path: Path) -> None:
    """Nobody can publish a report then, so the silence of the other hosts means nothing. The message says what to do."""
    server = EtcdProcess(tmp_path / "etcd")
    server.options = ("--quota-backend-bytes", "8000000")
    server.start()
    run = Job(tmp_path / "job", f"etcd://{server.endpoint.removeprefix('http://')}/lab", steps=240)
    try:
        for name in "abc":
            run.start(name)
        run.until_step(12)
        client = EtcdClient(server.endpoints, 300)
        _fill(client)
        until(lambda: all("etcd is full" in run.messages(name) for name in "abc"))
        time.sleep(3 * LOST_SECONDS)
        _free(client)
        assert set(run.ends(*"abc").values()) == {0}
        assert [entry.kind for entry in run.log() if entry.kind != "note"] == ["run", "lead", "start", "end"], (
            "no host was taken for lost"
        )
        assert all("etcdctl alarm disarm" in run.messages(name) for name in "abc")
        assert_result(run, 6)
    finally:
        run.close()
        server.kill()
