"""Compacts etcd while a run uses it, so that replaced reports do not fill its database.

Each report replaces a key, and etcd keeps every replaced value until a compaction. Without one, the reports of 64 hosts reach
the default quota of 2 GiB in two hours, and etcd then refuses all writes.
"""

from __future__ import annotations

import logging
from collections import deque

from ckpt.aggregator.cluster.etcd_client import Compacted, EtcdClient
from ckpt.storage.base.errors import StoreError

log = logging.getLogger("ckpt.run")

_PERIOD_SECONDS = 60.0
"""The time between two compactions, and so between two noted revisions."""

_KEPT_SECONDS = 300.0
"""The age of what is compacted. Other programs may use the same etcd, and read it in pages or watch it; Kubernetes compacts its
etcd at the same age."""


class EtcdCompaction:
    """Notes the revision of etcd once a minute, and compacts to a noted one that is some minutes old.

    key: a key that the client may read.
    """

    def __init__(self, etcd: EtcdClient, key: str) -> None:
        self._etcd, self._key = etcd, key
        self._noted: deque[tuple[float, int]] = deque()
        """Times by CLOCK_MONOTONIC, and the revisions then."""
        self._next_at = 0.0
        self._has_failed = False

    def compact_if_due(self, now: float) -> None:
        """Compact if a period is over. Of failures in a row, only the first is logged. now: the time by CLOCK_MONOTONIC."""
        if now < self._next_at:
            return
        self._next_at = now + _PERIOD_SECONDS
        try:
            self._compact(now)
            self._has_failed = False
        except StoreError as error:
            if not self._has_failed:
                log.warning("etcd can't be compacted, and fills up; give it --auto-compaction-retention=5m: %s", error)
            self._has_failed = True

    def _compact(self, now: float) -> None:
        current = self._etcd.current_revision(self._key)
        due = 0
        while self._noted and now - self._noted[0][0] >= _KEPT_SECONDS:
            due = self._noted.popleft()[1]
        self._noted.append((now, current))
        if not 0 < due <= current:  # nothing is old enough, or etcd has lost its data and begun anew
            return
        try:
            self._etcd.compact(due)
        except Compacted:
            pass  # by etcd itself, or by the leader of another run
