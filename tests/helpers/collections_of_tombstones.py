"""Collect tombstones until a number of them is collected."""

from __future__ import annotations

import time

from ckpt.aggregator.records.namespace_records import NamespaceRecords
from ckpt.aggregator.records.tombstone_collection import collect_tombstones


def count_collected(records: NamespaceRecords, count: int, seconds: float = 60.0) -> int:
    """Collect tombstones of any age, and return how many, after at most `seconds` seconds.

    count: how many there are. A call collects none while a member does not answer, or has not received the deletion yet.
    """
    deadline, found = time.monotonic() + seconds, 0
    while (found := found + collect_tombstones(records, 0.0)) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    return found
