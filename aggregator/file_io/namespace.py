"""An open namespace, with calls to list, read, write, delete and rename its files."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from ckpt.aggregator.cluster.config import NamespaceConfig, parse_namespace_url
from ckpt.aggregator.file_io.deletion import Deletion, unneeded_layouts
from ckpt.aggregator.file_io.member_io import MemberIO
from ckpt.aggregator.file_io.object_names import new_version
from ckpt.aggregator.file_io.publication import Condition, MembersRemoved, Publication, Publisher, Relink
from ckpt.aggregator.file_io.reader import FileReader
from ckpt.aggregator.file_io.writer import FileWriter
from ckpt.aggregator.placement.redundancy import Redundancy
from ckpt.aggregator.records import file_record
from ckpt.aggregator.records.file_record import INLINE_FILE_BYTES, USUAL_STRIPE_BYTES, FileRecord, RecordHead
from ckpt.aggregator.records.namespace_records import NamespaceRecords, ScannedRecords
from ckpt.aggregator.records.paths import check_path
from ckpt.aggregator.records.record_ring import RecordRing
from ckpt.aggregator.records.ring_change import ensure_record_redundancy
from ckpt.aggregator.records.tombstone_collection import TombstoneCollector
from ckpt.storage.base.errors import AlreadyExists, NotFound, StoreError, Unavailable
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.forks import call_in_forked_child, fork_safe_lock
from ckpt.storage.base.store import Buffer, require_length
from ckpt.storage.member.device import MemberInfo
from ckpt.storage.registers.base import Ballot, DamagedRegister, RegisterValue

log = logging.getLogger("ckpt")

MAX_TOMBSTONES = 500
"""A listing that finds more tombstones than this, and more than files and folders, starts their collection."""


@dataclass(slots=True)
class _ListedRecord:
    """The newest record of a name in the listings of members."""

    ballot: Ballot
    head: bytes
    members: list[str]
    """Those that listed this record."""
    is_unanimous: bool
    """Whether no member listed another record."""

    def is_certain(self, name: str, ring: RecordRing) -> bool:
        """Return whether every later read finds this record, or a newer one."""
        if self.is_unanimous and ring.previous is None:  # for long listings: to compute a replica set takes 0.1 ms and more
            return len(self.members) >= ring.quorum.write
        return ring.replica_set(name).must_find(self.members)


def _newest_records(answers: ScannedRecords) -> tuple[dict[str, _ListedRecord], set[str]]:
    """Return the newest record of each listed name that has a value, and the names of which a record is damaged."""
    newest: dict[str, _ListedRecord] = {}
    damaged: set[str] = set()
    for member, records in answers.items():
        for name, record in records:
            if isinstance(record, DamagedRegister):
                damaged.add(name)
            elif record.value is not None:
                ballot, listed = record.accepted_ballot, newest.get(name)
                if listed is None or listed.ballot < ballot:
                    newest[name] = _ListedRecord(ballot, record.value.head, [member], listed is None)
                elif listed.ballot == ballot:
                    listed.members.append(member)
                else:
                    listed.is_unanimous = False
    return newest, damaged


class Namespace(NamespaceRecords):
    """An open namespace. Safe to use from many threads."""

    def __init__(self, config: NamespaceConfig) -> None:
        super().__init__(config)
        self.member_io = MemberIO(self, self.commit_timeout_seconds)
        self._publisher = Publisher(self, self.member_io)
        # Threads set these three without a lock: at worst they warn, check or start a collection twice, which is harmless.
        self._is_few_members_warned = False
        self._collector: TombstoneCollector | None = None
        self._checked_infos: Mapping[str, MemberInfo] | None = None

    # --- records -----------------------------------------------------------------------------------------------

    def list(self, folder: str = "") -> dict[str, RecordHead]:
        """Return the heads of all files and folders below a folder, at any depth, by path, in order.

        Raises Unavailable if so many members are missing, or so many records of a path are damaged, that a file could be
        overlooked; IntegrityError if a record can't be decoded.
        """
        prefix = f"/{check_path(folder)}/" if folder else "/"
        if not self.exists():
            return {}
        answers, _ = self.scan(prefix, wait_for_all=False)
        newest, damaged = _newest_records(answers)
        found = {name[1:]: file_record.decode_record_head(name[1:], each.head) for name, each in newest.items()}
        self._start_collection_if_needed(found)
        # A record that too few members have is half-done or outdated. `stat_all` settles it, so that the listing shows the
        # record with which the file is opened later. It raises where all records of a path that answer are damaged: a caller
        # may delete what a file needs that is not listed.
        ring = self.ring
        unsettled = [name[1:] for name, each in newest.items() if not each.is_certain(name, ring)]
        for path, file in self.stat_all([*unsettled, *(name[1:] for name in sorted(damaged - newest.keys()))]).items():
            found.pop(path, None)
            if file is not None:
                found[path] = file.head
        return {path: found[path] for path in sorted(found) if found[path].kind != "deleted"}

    def _start_collection_if_needed(self, found: Mapping[str, RecordHead]) -> None:
        """Start a collection of tombstones in the background where a listing has found too many."""
        deleted = sum(head.kind == "deleted" for head in found.values())
        if deleted > max(MAX_TOMBSTONES, len(found) - deleted):
            if self._collector is None:
                self._collector = TombstoneCollector(self)
            self._collector.start()

    def _prepare_write(self, redundancy: Redundancy) -> None:
        """Prepare a write: update the failure domains, check the devices, and make records as redundant as the file."""
        self.update_domains()
        if (infos := self._infos) is not self._checked_infos:
            self.check_devices([location.name for location in self.locations])
            self._checked_infos = infos
        if not self.ring.can_tolerate(redundancy.tolerated_losses, len(self.locations)):
            ensure_record_redundancy(self, redundancy)
        if (member_count := len(self.ring.members)) < 2 * redundancy.tolerated_losses and not self._is_few_members_warned:
            self._is_few_members_warned = True
            log.warning(
                "%s has %d members: after the loss of %d the records can't be read, though %s keeps the bytes; use %d members "
                "or more",
                self.url,
                member_count,
                redundancy.tolerated_losses,
                redundancy,
                2 * redundancy.tolerated_losses,
            )

    def publish(self, publication: Publication, relink: Relink = lambda file: file) -> FileRecord:
        """Publish a record, as `Publisher.publish` does. Raises StoreError if members were removed meanwhile."""
        check_path(publication.path)
        outcome = self._publisher.publish(publication, relink)
        if isinstance(outcome, MembersRemoved):
            raise outcome.error()
        return outcome

    def delete(self, paths: Iterable[str], *, only_folders: bool = False) -> Sequence[str]:
        """Delete files and folder marks, and return the paths that were deleted. It is no error if a path does not exist.

        only_folders: keep files.

        Raises Unavailable, also where a file may have been written after others have completed this deletion: it is kept.
        """
        every = [check_path(path) for path in paths]
        if not every or not self.exists():  # only a write creates the namespace
            return []
        kinds = ("folder",) if only_folders else ("file", "folder")
        deletion = Deletion(lambda file: file.head.kind in kinds, waits_for_quorum=True)
        names = [f"/{path}" for path in every]
        after = self.update_records_fenced(self.ring.fence_number, names, deletion.decide, deletion.on_outdated)
        if rest := [f"/{path}" for path in deletion.unsettled_paths if path not in deletion.replaced]:
            after |= self.update_records_fenced(self.ring.fence_number, rest, deletion.decide, deletion.on_outdated)
        deleted, possibly_deleted = deletion.deleted_paths(after), deletion.possibly_deleted(after)
        self.member_io.discard_layouts(unneeded_layouts(deletion.deleted_files(after).values()))
        if unknown := deletion.unknown_paths(after):
            raise Unavailable(
                f"{unknown[0]} in {self.url}: it can't be known whether it was deleted and written again, as others changed "
                "it too often; check its content"
            )
        return [path for path in every if path in deleted or path in possibly_deleted]

    def rename(self, old: str, new: str) -> None:
        """Rename a file, and replace a file at the new name.

        Raises InvalidName, NotFound, AlreadyExists if the new name is a folder, StoreError if the file was changed meanwhile,
        and Unavailable if it can't be known whether it was renamed. Nothing is copied. A crash, or an error after the rename
        began, may leave the file under its old name or under both names; a scrub then finds out which objects are needed.
        """
        number = self.ring.fence_number if self.exists() else 0
        found = self.stat_all([old, new])
        file, replaced = found[old], found[new]
        if file is None or file.head.kind != "file":
            raise NotFound(f"{old} in {self.url}: {'no such file' if file is None else 'a folder, not a file'}")
        if old == new:
            return
        if replaced is not None and replaced.head.kind != "file":  # before the file is marked by a token
            raise AlreadyExists(f"{new} in {self.url}: a folder of this name exists already")
        token = new_version()
        file, is_only_rename = self._mark_for_rename(old, file, token)
        failpoint("namespace.rename")
        before = file

        def take_current_layout(moved: FileRecord) -> FileRecord:
            current = self.stat(old)
            if current is None or (current.head.version, current.rename_token) != (before.head.version, before.rename_token):
                raise StoreError(f"{old} in {self.url} was changed while it was renamed; try again")
            return replace(moved, layout=current.layout)  # a repair may have moved it, and deleted its former objects

        moved = replace(file, head=replace(file.head, version=new_version(), history=()))
        try:
            self.publish(Publication(new, moved, fence_number=number), take_current_layout)
        except AlreadyExists:  # nothing was published
            if file.layout is not None and is_only_rename:
                with suppress(StoreError):
                    self._set_rename_token(old, file.head.version, token, "")
            raise
        failpoint("namespace.renamed")
        is_still_only = self._delete_renamed(old, file)
        if file.layout is not None and is_only_rename and is_still_only:
            self._set_rename_token(new, moved.head.version, token, "")

    def _mark_for_rename(self, path: str, file: FileRecord, token: str) -> tuple[FileRecord, bool]:
        """Mark a file by this rename token. Return it, and whether no other rename may give its objects to another path.

        The token of another rename, which was interrupted or runs now, is replaced, so that it knows that there are two. A file
        without objects has no token. Raises StoreError if the file was changed.
        """
        is_only_rename = True
        while file.layout is not None and file.rename_token != token:
            is_only_rename = is_only_rename and not file.rename_token
            marked = self._set_rename_token(path, file.head.version, file.rename_token, token)
            if marked is None:
                raise StoreError(f"{path} in {self.url} was changed while it was renamed; try again")
            file = marked
        return file, is_only_rename

    def _delete_renamed(self, path: str, file: FileRecord) -> bool:
        """Delete the old name of a renamed file, unless the file was changed meanwhile.

        Return whether it was deleted as it was marked: otherwise another rename may give its objects to another path.
        """
        deletion = Deletion(
            lambda current: (current.head.version, current.rename_token) == (file.head.version, file.rename_token)
        )
        after = self.update_record(path, deletion.decide)
        if path in deletion.replaced and deletion.is_done(path, after):
            return True
        self.update_record(path, Deletion(lambda current: current.head.version == file.head.version).decide)
        return False

    def _set_rename_token(self, path: str, version: str, old_token: str, new_token: str) -> FileRecord | None:
        """Change the rename token of a file from `old_token` to `new_token`.

        Return the record after that; None if the path has another version.
        """

        def decide(_: str, value: RegisterValue | None) -> RegisterValue | None:
            current = None if value is None else file_record.decode_record(path, value)
            if current is None or current.head.version != version or current.rename_token != old_token:
                return None
            return file_record.encode_record(replace(current, rename_token=new_token))

        value = self.update_record(path, decide)
        current = None if value is None else file_record.decode_record(path, value)
        return current if current is not None and current.head.version == version else None

    def make_folder(self, path: str) -> None:
        """Create a folder mark, so that the folder exists while it is empty. Raises AlreadyExists."""
        self._prepare_write(self.config.redundancy)
        now = time.time()
        mark = FileRecord(RecordHead("folder", 0, now, now, new_version()))
        self.publish(Publication(path, mark, Condition(new=True)))

    # --- files -------------------------------------------------------------------------------------------------

    def put(
        self, path: str, data: Buffer, new: bool = False, redundancy: Redundancy | None = None, replaces: str | None = None
    ) -> FileRecord:
        """Write a whole file, atomically and durably, and return its record.

        By default it replaces any file at the path. new: raise AlreadyExists if a file exists. replaces: raise Changed if the
        file at the path does not have this version. redundancy: default is that of the namespace.

        Raises InvalidName, AlreadyExists and Changed: then nothing was published. After another error it may have been.
        """
        view = memoryview(data).cast("B")
        if len(view) <= INLINE_FILE_BYTES:
            self._prepare_write(redundancy or self.config.redundancy)
            now = time.time()
            file = FileRecord(RecordHead("file", len(view), now, now, new_version()), inline_data=bytes(view))
            return self.publish(Publication(path, file, Condition(new, replaces=replaces)))
        with self.create(path, redundancy, len(view), new=new, aligned=False, replaces=replaces) as writer:
            for start in range(0, len(view), USUAL_STRIPE_BYTES):
                writer.append(view[start : start + USUAL_STRIPE_BYTES])
            return writer.publish()

    def truncate(self, path: str, expected: FileRecord) -> FileRecord:
        """Make a file empty, and return its record. Raises Changed if the path does not have the `expected` file."""
        now = time.time()
        empty = FileRecord(RecordHead("file", 0, now, now, new_version()), inline_data=b"")
        return self.publish(Publication(path, empty, Condition(base=expected)))

    def create(
        self, path: str, redundancy: Redundancy | None = None, size_hint: int = 0, *, new: bool = False,
        aligned: bool = True, base: FileRecord | None = None, replaces: str | None = None,
    ) -> FileWriter:  # fmt: skip
        """Return a writer of a file, which exists after its `commit`.

        redundancy: the default is that of the namespace. size_hint: the expected bytes. aligned: each append starts at a
        multiple of 4 KiB. new: the commit raises AlreadyExists if a file exists. base: append to this file. replaces: the
        commit raises Changed if the file at the path does not have this version.
        """
        redundancy = redundancy or self.config.redundancy
        if base is not None and base.layout is not None:
            redundancy = base.layout.redundancy
        check_path(path)
        self._prepare_write(redundancy)
        condition = Condition(new, base, replaces)
        return FileWriter(self.member_io, self._publisher, path, redundancy, condition, size_hint=size_hint, aligned=aligned)

    def open(self, path: str) -> FileReader:
        """Return a reader of a file. Raises NotFound if no file exists, and Unavailable if its record can't be read."""
        file = self.stat(path)
        if self.host_domain:  # the reader prefers copies near this host
            self.update_domains(0)
        if file is None or file.head.kind != "file":
            raise NotFound(f"{path} in {self.url}: {'no such file' if file is None else 'a folder, not a file'}")
        return FileReader(self.member_io, path, file, partial(self.stat, path))

    def get(self, path: str) -> bytes:
        """Return the content of a file, as `get_versioned` does without a limit."""
        return self.get_versioned(path)[0]

    def get_versioned(self, path: str, limit: int | None = None) -> tuple[bytes, str]:
        """Return the content of a file and its version, for `put(replaces=…)`; the new content if it is replaced meanwhile.

        Raises NotFound if no file exists, Unavailable if its record or too many fragments can't be read, and
        IntegrityError if the file is longer than `limit` bytes, or damaged on too many members.
        """
        while True:
            with self.open(path) as reader:
                require_length(f"{self.url}/{path}", reader.file.head.nbytes, limit)
                data = bytearray(reader.file.head.nbytes)
                try:
                    reader.read_into(0, memoryview(data))
                    return bytes(data), reader.file.head.version
                except StoreError:
                    if self.stat(path) == reader.file:
                        raise

    def close(self) -> None:
        """Close the connections to all members. Only for a namespace that its caller made: `open_namespace` shares its own."""
        self.fan_out.close()
        self.member_io.close()
        for open_member in self.open_members.values():
            open_member.close()


_open_namespaces: dict[NamespaceConfig, Namespace] = {}
_open_lock = fork_safe_lock()
"""Guards `_open_namespaces`."""


def open_namespace(url: str) -> tuple[Namespace, str]:
    """Return the namespace of a URL and the path in it. All callers in this process share one object per configuration."""
    config, path = parse_namespace_url(url)
    with _open_lock:
        found = _open_namespaces.get(config)
        if found is None:
            found = _open_namespaces[config] = Namespace(config)
        return found, path


def _clear_after_fork() -> None:
    """In a forked child: forget the namespaces of the parent, whose threads do not exist there."""
    _open_namespaces.clear()


call_in_forked_child(_clear_after_fork)
