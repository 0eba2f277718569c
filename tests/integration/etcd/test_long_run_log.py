"""The log of a long run of many hosts in a real etcd."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from helpers.etcd_server import EtcdProcess, needs_etcd
from helpers.etcd_server import running_etcd as running_etcd
from helpers.processes import until

from ckpt.aggregator.cluster.etcd_client import EtcdClient
from ckpt.recovery.run_log.base import LogEntry
from ckpt.recovery.run_log.etcd import EtcdRunLog
from ckpt.storage.base.errors import Unavailable

START_BYTES = 150_000
"""A bit more than the entry of a start on 512 hosts has."""
STARTS = 120


@needs_etcd
def test_the_log_of_many_starts_on_many_hosts_is_read(server: EtcdProcess) -> None:
    """All entries together are longer than an answer of etcd may be."""
    etcd = EtcdClient(server.endpoints, 300)
    for number in range(1, STARTS + 1):
        row = [time.time(), number, "note", str(number), {"hosts": "." * START_BYTES}]
        etcd.put(f"/ckpt-run/lab/log/{number:012d}", json.dumps(row).encode())
    run_log, found = EtcdRunLog(f"etcd://{server.endpoint.removeprefix('http://')}/lab"), list[LogEntry]()

    def is_read() -> bool:
        with suppress(Unavailable):  # a busy host, as a call has only a second
            found.extend(run_log.entries())
        return bool(found)

    until(is_read, "etcd answers")
    assert [entry.number for entry in found] == list(range(1, STARTS + 1))
    assert [entry.text for entry in run_log.entries(STARTS - 1)] == [str(STARTS)]
    assert run_log.entries(STARTS) == []


class _Changed(EtcdClient):
    """A client of an etcd in which another client deletes a key after each call."""

    def _call(self, method: str, message: Mapping[str, object]) -> dict[str, Any]:
        answer = super()._call(method, message)
        if method == "kv/range":
            self.delete("/a/5")
        return answer


@needs_etcd
def test_the_pages_of_a_range_are_of_one_revision(server: EtcdProcess) -> None:
    etcd = _Changed(server.endpoints, 300)
    for page_keys in range(7):
        for key in [*(f"/a/{number}" for number in range(7)), "/b"]:
            etcd.put(key, b"1")
        assert [item.key for item in etcd.range("/a/", "/a/2", page_keys)] == [f"/a/{number}" for number in range(2, 7)]
    assert etcd.range("/c/", page_keys=2) == []
