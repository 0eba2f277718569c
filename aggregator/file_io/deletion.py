"""Putting a tombstone in the place of a record."""

from __future__ import annotations

import time
from collections.abc import Callable

from ckpt.aggregator.file_io.object_names import new_version
from ckpt.aggregator.records import file_record
from ckpt.aggregator.records.file_record import PathRecord, RecordHead
from ckpt.storage.registers.base import RegisterValue


class Deletion:
    """One deletion of one or more paths: what a change of their records asks, and what it has seen. Used by one thread.

    is_deletable: whether a record is one to delete; any other stays.
    """

    def __init__(self, is_deletable: Callable[[PathRecord], bool]) -> None:
        self._is_deletable = is_deletable
        self._version, self._now = new_version(), time.time()
        self.seen: dict[str, PathRecord | None] = {}
        """What each path was when it was last looked at, before the deletion."""
        self.proposed: set[str] = set()
        """Paths whose tombstone was proposed."""
        self.is_unsettled = False
        """Whether a member may have taken a tombstone in a try that failed."""

    @property
    def targets(self) -> dict[str, PathRecord]:
        """The records that were to be deleted, by path."""
        return {path: file for path, file in self.seen.items() if file is not None and self._is_deletable(file)}

    def decide(self, name: str, value: RegisterValue | None) -> RegisterValue | None:
        """The tombstone for a register, None where it stays as it is."""
        path = name[1:]
        current = None if value is None else file_record.decode_record(path, value)
        if file_record.has_version(current, self._version):
            return None  # done already, in a try that seemed to fail
        self.seen[path] = current
        if current is None or not self._is_deletable(current):
            return None
        self.proposed.add(path)
        head = RecordHead("deleted", 0, self._now, self._now, self._version)
        return file_record.encode_record(PathRecord(file_record.next_head(head, current)))

    def on_outdated(self, may_be_taken: bool, _: int) -> None:
        self.is_unsettled = self.is_unsettled or may_be_taken

    def is_done(self, path: str, value: RegisterValue | None) -> bool:
        """Whether this deletion, and not another, has deleted a path whose register has this value now."""
        return value is not None and file_record.has_version(file_record.decode_record(path, value), self._version)
