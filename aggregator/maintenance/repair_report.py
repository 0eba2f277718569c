"""What a repair, a drain or a rebalance has done, and its count while threads work."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt.storage.base.store import ByteProgress


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What a repair, a drain or a rebalance has done."""

    files: int = 0
    """The number of repaired or moved files."""
    nbytes: int = 0
    """The number of bytes that were written."""
    records: int = 0
    """The number of records that were settled."""
    orphans: int = 0
    """The number of deleted objects that no record named."""
    collected: int = 0
    """The number of collected tombstones."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """The reason for each path that could not be repaired or moved; "the records" stands for the redundancy of all records."""


class RepairCount:
    """Counts what several threads repair or move.

    progress: called with the number of bytes just written, from many threads.
    """

    def __init__(self, progress: ByteProgress) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        """Guards `_files`, `_nbytes` and `_failed`."""
        self._files = 0
        self._nbytes = 0
        self._failed: dict[str, str] = {}

    def add_bytes(self, nbytes: int) -> None:
        """Count written bytes."""
        with self._lock:
            self._nbytes += nbytes
        self._progress(nbytes)

    def add_file(self) -> None:
        """Count a file that was repaired or moved."""
        with self._lock:
            self._files += 1

    def add_failure(self, path: str, reason: str) -> None:
        """Record why a path could not be repaired or moved."""
        with self._lock:
            self._failed[path] = reason

    def report(self, records: int = 0, orphans: int = 0, collected: int = 0) -> RepairReport:
        """Return the report. The arguments are those of its fields that this does not count."""
        with self._lock:
            return RepairReport(self._files, self._nbytes, records, orphans, collected, dict(self._failed))
