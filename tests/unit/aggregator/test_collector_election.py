"""One client of a namespace collects tombstones in the background, however long that takes."""

from __future__ import annotations

import threading
from pathlib import Path

import msgpack
import pytest
from helpers.nodes import directories
from helpers.processes import until

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.records import tombstone_collection
from ckpt.aggregator.records.namespace_records import NamespaceRecords
from ckpt.aggregator.records.tombstone_collection import TombstoneCollector

TERMS = 8
"""The collector renews its term three times in the length of a term, so these renewals take two lengths."""


def term_number(namespace: Namespace) -> int:
    """Return the number of the term in the register of the collector."""
    (value,) = namespace.read_records(["collector"]).values()
    return 0 if value is None else int(msgpack.unpackb(value.head)[1])


@pytest.mark.slow
def test_no_other_client_collects_while_a_collection_takes_several_terms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each one interrupts the one before, and none finishes."""
    monkeypatch.setattr(tombstone_collection, "_PAUSE_SECONDS", 0.7)
    ended, collecting = threading.Event(), []

    def collect_slowly(records: NamespaceRecords) -> int:
        collecting.append(records)
        ended.wait(300)
        return 0

    monkeypatch.setattr(tombstone_collection, "collect_tombstones", collect_slowly)
    namespaces = [Namespace(directories(tmp_path, 3)) for _ in range(2)]
    namespaces[0].put("a", b"1")
    first, second = map(TombstoneCollector, namespaces)
    first.start()
    until(lambda: bool(collecting), "the first client collects")

    def has_time_passed() -> bool:
        second.start()
        return len(collecting) > 1 or term_number(namespaces[0]) > TERMS

    try:
        until(has_time_passed, "the first client renews its term, or the second one takes over")
        assert collecting == [namespaces[0]]
        ended.set()
        until(lambda: second.start() or len(collecting) > 1, "the second client collects after that")
        assert namespaces[1] in collecting
    finally:
        ended.set()
        for each in namespaces:
            each.close()
