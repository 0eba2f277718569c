"""Many members as one place: files by path, written in pieces to several members and read back from whichever answer."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ckpt.aggregator.cluster.config import NamespaceConfig, parse_namespace_url
from ckpt.aggregator.file_io.deletion import Deletion
from ckpt.aggregator.file_io.member_io import MemberIO
from ckpt.aggregator.file_io.object_names import new_version
from ckpt.aggregator.file_io.publication import Condition, MembersRemoved, Publication, Publisher, Relink
from ckpt.aggregator.file_io.reader import FileReader
from ckpt.aggregator.file_io.writer import FileWriter
from ckpt.aggregator.placement.redundancy import Redundancy
from ckpt.aggregator.records import file_record
from ckpt.aggregator.records.file_record import INLINE_BYTES, PathRecord, RecordHead
from ckpt.aggregator.records.namespace_records import NamespaceRecords
from ckpt.aggregator.records.paths import check_path
from ckpt.aggregator.records.record_collection import TombstoneCollector
from ckpt.aggregator.records.ring_change import ensure_record_redundancy
from ckpt.storage.base.errors import NotFound, StoreError
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.store import Buffer, require_length
from ckpt.storage.member.device import MemberInfo
from ckpt.storage.registers.base import NO_BALLOT, Ballot, DamagedRecord, RegisterValue

log = logging.getLogger("ckpt")

MAX_TOMBSTONES = 500
"""So many records of deleted files a listing may meet, or as many as there are files, before they are collected."""
_APPEND_BYTES = 8 << 20


class Namespace(NamespaceRecords):
    """A namespace, opened. Safe to use from many threads."""

    def __init__(self, config: NamespaceConfig) -> None:
        super().__init__(config)
        self.member_io = MemberIO(self, self.commit_timeout_seconds)
        self._publisher = Publisher(self, self.member_io)
        self._is_few_members_warned = False
        self._collector: TombstoneCollector | None = None
        self._checked_infos: Mapping[str, MemberInfo] | None = None

    # --- records -----------------------------------------------------------------------------------------------

    def list(self, folder: str = "") -> dict[str, RecordHead]:
        """The heads of all files and folders below a folder, at any depth, by path, in order.

        Raises Unavailable where so many members are missing that a file could be overlooked.
        """
        prefix = f"/{check_path(folder)}/" if folder else "/"
        if not self.exists():
            return {}
        answers, _ = self.scan(prefix, wait_for_all=False)
        newest: dict[str, tuple[Ballot, bytes, int]] = {}  # and on how many members it is
        for records in answers.values():
            for name, record in records:
                if isinstance(record, DamagedRecord) or record.value is None:
                    continue
                ballot, _, count = newest.get(name, (NO_BALLOT, b"", 0))
                if ballot < record.accepted:
                    newest[name] = record.accepted, record.value.head, 1
                elif ballot == record.accepted:
                    newest[name] = ballot, record.value.head, count + 1
        found = {name[1:]: file_record.decode_record_head(name[1:], head) for name, (_, head, _) in newest.items()}
        self._start_collection_if_needed(found)
        # What too few have is half-done, or old: it is settled, so that a listing shows what the file says when it is opened.
        needed = self.ring.quorum.write
        for path, file in self.stat_all([name[1:] for name, (_, _, count) in newest.items() if count < needed]).items():
            found.pop(path, None)
            if file is not None:
                found[path] = file.head
        return {path: found[path] for path in sorted(found) if found[path].kind != "deleted"}

    def _start_collection_if_needed(self, found: Mapping[str, RecordHead]) -> None:
        """Let tombstones be collected in the background where a listing meets too many."""
        deleted = sum(head.kind == "deleted" for head in found.values())
        if deleted > max(MAX_TOMBSTONES, len(found) - deleted):
            if self._collector is None:
                self._collector = TombstoneCollector(self)
            self._collector.start()

    def _prepare_write(self, redundancy: Redundancy) -> None:
        """Before anything is written: know where to, and see to it that its record outlives as many members as its redundancy
        says."""
        self.update_domains()
        if (infos := self._infos) is not self._checked_infos:
            self.check_devices([spot.name for spot in self.locations])
            self._checked_infos = infos
        if not self.ring.can_tolerate(redundancy.tolerated_losses, len(self.locations)):
            ensure_record_redundancy(self, redundancy)
        if (member_count := len(self.ring.members)) < 2 * redundancy.tolerated_losses and not self._is_few_members_warned:
            self._is_few_members_warned = True
            log.warning(
                "%s has %d members: after the loss of %d the others do not know what there is, though %s keeps the bytes; with "
                "%d members they do",
                self.url,
                member_count,
                redundancy.tolerated_losses,
                redundancy,
                2 * redundancy.tolerated_losses,
            )

    def publish(self, publication: Publication, relink: Relink = lambda file: file) -> PathRecord:
        """Make a record what its path is; see `Publisher.publish`. Raises StoreError where members were removed meanwhile."""
        check_path(publication.path)
        outcome = self._publisher.publish(publication, relink)
        if isinstance(outcome, MembersRemoved):
            raise outcome.error()
        return outcome

    def delete(self, paths: Iterable[str]) -> Sequence[str]:
        """Remove files and folder marks; the paths that were there. What is not there is no error."""
        every = [check_path(path) for path in paths]
        if not every:
            return []
        deletion = Deletion(lambda file: file.exists)
        names = [f"/{path}" for path in every]
        after = self.update_records_fenced(self.ring.fence_number, names, deletion.decide, deletion.on_outdated)
        targets = deletion.targets
        # Its tombstone may have been collected by now. Its objects are left to a repair: another client may have deleted it.
        possibly_deleted = {
            path for path in deletion.proposed if deletion.is_unsettled and path not in targets and after[f"/{path}"] is None
        }
        deleted = {path: file for path, file in targets.items() if deletion.is_done(path, after[f"/{path}"])}
        objects_by_member: dict[str, list[str]] = defaultdict(list)
        for file in deleted.values():
            if file.layout is not None and not file.rename_token:
                for holder in file.layout.objects:
                    objects_by_member[holder.member].append(holder.name)
        self.member_io.discard(objects_by_member)
        return [path for path in every if path in deleted or path in possibly_deleted]

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, in place of what was there. Raises NotFound.

        Nothing is copied. A crash in the middle leaves the old name, or both: then a scrub finds out who needs what.
        """
        number = self.ring.fence_number if self.exists() else 0
        file = self.stat(check_path(old))
        if file is None or file.head.kind != "file":
            raise NotFound(f"{old} in {self.url}: {'no such file' if file is None else 'a folder, no file'}")
        if old == new:
            return
        token = new_version()
        if file.layout is not None:
            file = self._set_rename_token(old, file.head.version, "", token)
            if file is None:
                raise StoreError(f"{old} in {self.url} was changed while it was renamed; try again")
        is_own_token = file.rename_token == token  # else others share it already, and only a scrub knows when nobody does
        failpoint("namespace.rename")
        before = file

        def still(moved: PathRecord) -> PathRecord:
            current = self.stat(old)
            if current is None or (current.head.version, current.rename_token) != (before.head.version, before.rename_token):
                raise StoreError(f"{old} in {self.url} was changed while it was renamed; try again")
            return moved

        moved = replace(file, head=replace(file.head, version=new_version(), history=()))
        self.publish(Publication(new, moved, fence_number=number), still)
        failpoint("namespace.renamed")
        deletion = Deletion(
            lambda current: (current.head.version, current.rename_token) == (before.head.version, before.rename_token)
        )
        after = self.update_record(old, deletion.decide)  # what was changed meanwhile stays
        if file.layout is not None and is_own_token and old in deletion.targets and deletion.is_done(old, after):
            self._set_rename_token(new, moved.head.version, token, "")

    def _set_rename_token(self, path: str, version: str, old_token: str, new_token: str) -> PathRecord | None:
        """Mark the objects of a file as shared, or not any more; the file as it is then, None where it is another."""

        def decide(_: str, value: RegisterValue | None) -> RegisterValue | None:
            there = None if value is None else file_record.decode_record(path, value)
            if there is None or there.head.version != version or there.rename_token != old_token:
                return None
            return file_record.encode_record(replace(there, rename_token=new_token))

        value = self.update_record(path, decide)
        current = None if value is None else file_record.decode_record(path, value)
        return current if current is not None and current.head.version == version else None

    def make_folder(self, path: str) -> None:
        """Mark a folder, so that it is there while it is empty. Raises AlreadyExists."""
        self._prepare_write(self.config.redundancy)
        now = time.time()
        mark = PathRecord(RecordHead("folder", 0, now, now, new_version()))
        self.publish(Publication(path, mark, Condition(new=True)))

    # --- files -------------------------------------------------------------------------------------------------

    def put(
        self, path: str, data: Buffer, new: bool = False, redundancy: Redundancy | None = None, replaces: str | None = None
    ) -> PathRecord:
        """Store a whole file, atomically and durably, in place of what was there, or only where nothing was (`new`), or only of
        a version (`replaces`)."""
        view = memoryview(data).cast("B")
        if len(view) <= INLINE_BYTES:
            self._prepare_write(redundancy or self.config.redundancy)
            now = time.time()
            file = PathRecord(RecordHead("file", len(view), now, now, new_version()), inline_data=bytes(view))
            return self.publish(Publication(path, file, Condition(new, replaces=replaces)))
        with self.create(path, redundancy, len(view), new=new, aligned=False, replaces=replaces) as writer:
            for start in range(0, len(view), _APPEND_BYTES):
                writer.append(view[start : start + _APPEND_BYTES])
            return writer.publish()

    def truncate(self, path: str, expected: PathRecord) -> PathRecord:
        """Let a file be empty, at once; what it is then. Raises Changed if it is another one by now."""
        now = time.time()
        empty = PathRecord(RecordHead("file", 0, now, now, new_version()), inline_data=b"")
        return self.publish(Publication(path, empty, Condition(base=expected)))

    def create(
        self, path: str, redundancy: Redundancy | None = None, size_hint: int = 0, *, new: bool = False,
        aligned: bool = True, base: PathRecord | None = None, replaces: str | None = None,
    ) -> FileWriter:  # fmt: skip
        """Begin to write a file. base: what is there already and is written on. replaces: the only version that it replaces."""
        redundancy = redundancy or self.config.redundancy
        if base is not None and base.layout is not None:
            redundancy = base.layout.redundancy
        check_path(path)
        self._prepare_write(redundancy)
        condition = Condition(new, base, replaces)
        return FileWriter(self.member_io, self._publisher, path, redundancy, condition, size_hint=size_hint, aligned=aligned)

    def open(self, path: str) -> FileReader:
        """Open a file for reading; raises NotFound."""
        file = self.stat(path)
        if self.host_domain:  # for copies that are near
            self.update_domains(0)
        if file is None or file.head.kind != "file":
            raise NotFound(f"{path} in {self.url}: {'no such file' if file is None else 'a folder, no file'}")
        return FileReader(self.member_io, path, file)

    def get(self, path: str) -> bytes:
        """A whole file; the new content where it is replaced meanwhile."""
        return self.get_versioned(path)[0]

    def get_versioned(self, path: str, limit: int | None = None) -> tuple[bytes, str]:
        """A whole file, and its version, for `put`. Raises IntegrityError where it is longer than `limit` bytes."""
        while True:
            with self.open(path) as reader:
                require_length(f"{self.url}/{path}", reader.file.head.nbytes, limit)
                data = bytearray(reader.file.head.nbytes)
                try:
                    reader.read_into(0, memoryview(data))
                    return bytes(data), reader.file.head.version
                except StoreError:
                    current = self.stat(path)
                    if current is not None and current.head.version == reader.file.head.version:
                        raise

    def close(self) -> None:
        self.fan_out.close()
        self.member_io.close()
        for open_member in self.open_members.values():
            open_member.close()


_open_namespaces: dict[NamespaceConfig, Namespace] = {}
_open_lock = threading.Lock()


def open_namespace(url: str) -> tuple[Namespace, str]:
    """The namespace of a URL, shared by all who name the same in this process, and the path in it."""
    config, path = parse_namespace_url(url)
    with _open_lock:
        found = _open_namespaces.get(config)
        if found is None:
            found = _open_namespaces[config] = Namespace(config)
        return found, path


def _clear_after_fork() -> None:
    """A child makes its own connections."""
    _open_namespaces.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_clear_after_fork)
