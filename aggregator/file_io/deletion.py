"""The deletion of paths: the change of a record to a tombstone, whether it was done, and the objects to remove then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from ckpt.aggregator.file_io.object_names import new_version
from ckpt.aggregator.records import file_record
from ckpt.aggregator.records.file_record import FileLayout, FileRecord, RecordHead
from ckpt.storage.registers.base import RegisterValue


class Deletion:
    """The state of one deletion of one or more paths, for changes of their records. Used by one thread.

    is_deletable: returns whether a record is to be deleted; any other record stays. waits_for_quorum: whether the first call
    for a path only adds it to `unsettled_paths`, if its record has a full history.
    """

    def __init__(self, is_deletable: Callable[[FileRecord], bool], waits_for_quorum: bool = False) -> None:
        self._is_deletable = is_deletable
        self._waits_for_quorum = waits_for_quorum
        self._version, self._now = new_version(), time.time()
        self.seen: dict[str, FileRecord | None] = {}
        """The last record of each path that a member returned. It may be older than the one that was deleted."""
        self.replaced: dict[str, dict[str, FileRecord]] = {}
        """The paths for which a tombstone was proposed, each with the records that such tombstones replace, by version."""
        self.unsettled_paths: set[str] = set()
        """The paths that were left once, so that a quorum settles their newest record. Those not in `replaced` need another
        update.

        A tombstone over a record from a member that was down is easily mistaken for one that others have replaced often.
        """
        self.is_unsettled = False
        """Whether a member may have accepted a tombstone in a try that failed."""

    def decide(self, name: str, value: RegisterValue | None) -> RegisterValue | None:
        """Return the tombstone for a register, or None to keep its value: the `Decide` of this deletion."""
        path = name[1:]
        current = None if value is None else file_record.decode_record(path, value)
        if file_record.has_version(current, self._version):
            return None  # an earlier try, which seemed to fail, has done it
        self.seen[path] = current
        if current is None or not self._is_deletable(current) or self._is_unknown(path, current):
            return None
        is_first = path not in self.replaced and path not in self.unsettled_paths
        if self._waits_for_quorum and is_first and file_record.is_history_truncated(current):
            self.unsettled_paths.add(path)
            return None
        file_record.note_replaced(self.replaced.setdefault(path, {}), current)
        head = RecordHead("deleted", 0, self._now, self._now, self._version)
        return file_record.encode_record(FileRecord(file_record.next_head(head, current)))

    def deleted_paths(self, after: Mapping[str, RegisterValue | None]) -> set[str]:
        """Return the paths that this deletion has deleted. after: the value of each register now."""
        return {path for path in self.replaced if self.is_done(path, after[f"/{path}"])}

    def deleted_files(self, after: Mapping[str, RegisterValue | None]) -> dict[str, FileRecord]:
        """Return the files that this deletion has deleted, by path, where the tombstone shows which record it replaced."""
        found = {}
        for path in self.deleted_paths(after):
            value = after[f"/{path}"]
            assert value is not None
            tombstone = file_record.decode_record(path, value)
            if (replaced := file_record.replaced_record(self.replaced[path], tombstone, self._version)) is not None:
                found[path] = replaced
        return found

    def possibly_deleted(self, after: Mapping[str, RegisterValue | None]) -> set[str]:
        """Return the paths whose tombstones may have been collected already, or that another client has deleted.

        Their objects are left to a repair.
        """
        return {path for path in self.replaced if self.is_unsettled and after[f"/{path}"] is None}

    def unknown_paths(self, after: Mapping[str, RegisterValue | None]) -> list[str]:
        """Return the paths of files that may be new ones, after others have completed this deletion. They are not deleted."""
        found = {path: file_record.decode_record(path, value) for path in self.replaced if (value := after[f"/{path}"])}
        return [path for path, file in found.items() if file.exists and self._is_unknown(path, file)]

    def _is_unknown(self, path: str, current: FileRecord) -> bool:
        """Return whether a record shows neither a tombstone of this deletion nor what it replaced, though one was proposed."""
        versions = self.replaced.get(path, {})
        return bool(versions) and not any(file_record.has_version(current, v) for v in (self._version, *versions))

    def on_outdated(self, may_be_accepted: bool, _: int) -> None:
        """Note that a member may have accepted a tombstone: the `OnOutdated` of this deletion."""
        self.is_unsettled = self.is_unsettled or may_be_accepted

    def is_done(self, path: str, value: RegisterValue | None) -> bool:
        """Return whether this deletion, and not another one, has deleted a path whose register has this value now."""
        return value is not None and file_record.has_version(file_record.decode_record(path, value), self._version)


def unneeded_layouts(files: Iterable[FileRecord]) -> list[FileLayout]:
    """Return the layouts of deleted files; that of a renamed file is needed, since its new name may have the objects."""
    return [file.layout for file in files if file.layout is not None and not file.rename_token]
