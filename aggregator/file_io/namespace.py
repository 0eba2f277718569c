"""Many members as one place: files by path, written in pieces to several members and read back from whichever answer."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ckpt.aggregator.cluster.config import NamespaceConfig, parse_namespace_url
from ckpt.aggregator.cluster.fanout import FanOut
from ckpt.aggregator.file_io.layout_replacement import current_record, replace_layout
from ckpt.aggregator.file_io.reader import FileReader
from ckpt.aggregator.file_io.rebuild import rebuild_fragments
from ckpt.aggregator.file_io.writer import FileWriter, LostFragments, MembersRemoved, ObjectsCollected, new_version
from ckpt.aggregator.placement.redundancy import Redundancy
from ckpt.aggregator.records import file_record
from ckpt.aggregator.records.file_record import INLINE_BYTES, FileLayout, PathRecord, RecordHead
from ckpt.aggregator.records.namespace_records import NamespaceRecords
from ckpt.aggregator.records.recently_collected import is_collected_since
from ckpt.aggregator.records.record_collection import TombstoneCollector
from ckpt.aggregator.records.ring_change import ensure_record_redundancy
from ckpt.storage.base.errors import (
    AlreadyExists,
    Changed,
    CkptError,
    InvalidName,
    NotFound,
    StoreError,
    Unavailable,
)
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.huge_pages import map_huge_pages
from ckpt.storage.base.store import Buffer, require_length
from ckpt.storage.member.device import MemberInfo
from ckpt.storage.registers.base import (
    NO_BALLOT,
    Ballot,
    DamagedRecord,
    RegisterValue,
)

log = logging.getLogger("ckpt")

PATH_BYTES = 1024
MAX_TOMBSTONES = 500
"""So many records of deleted files a listing may meet, or as many as there are files, before they are collected."""
_APPEND_BYTES = 8 << 20
_DISCARD_SECONDS = 3.0
_WARNING_INTERVAL_SECONDS = 60.0
_MAX_SCRATCH_BYTES = 128 << 20
_MIN_SCRATCH_BYTES = 256 << 10  # less than this is not worth keeping


def check_path(path: str) -> str:
    """Return `path` if it can name a file: segments joined by '/', none of them empty, '.' or '..'. Raises InvalidName."""
    segments = path.split("/")
    if (
        len(path.encode("utf-8", "replace")) > PATH_BYTES
        or any(s in ("", ".", "..") or len(s.encode("utf-8", "replace")) > 255 for s in segments)
        or any(ord(c) < 32 or c == "\x7f" or 0xD800 <= ord(c) < 0xE000 for c in path)
    ):
        raise InvalidName(
            f"{path[:200]!r} can't name a file: use segments of at most 255 bytes without control characters, joined by '/', "
            f"{PATH_BYTES} bytes in all, and no '.' or '..'"
        )
    return path


class Namespace(NamespaceRecords):
    """A namespace, opened. Safe to use from many threads."""

    def __init__(self, config: NamespaceConfig) -> None:
        super().__init__(config)
        seconds = config.credentials.deadline_seconds
        self.append_timeout_seconds = seconds
        """A member that takes longer for an append is passed over."""
        self.read_timeout_seconds = 2 * seconds
        self.hedge_after_seconds = 0.5
        """A read that takes longer is asked of another member too."""
        self.read_fan_out = FanOut(self.fan_out.health)
        self._scratch: list[np.ndarray] = []
        self._scratch_lock = threading.Lock()
        self._is_few_members_warned = False
        self._collector: TombstoneCollector | None = None
        self._under_replication_warned_at = -math.inf
        self._checked_infos: Mapping[str, MemberInfo] | None = None

    def take_scratch(self, nbytes: int) -> np.ndarray:
        """Memory for fragments, used again and again: as O_DIRECT wants it."""
        if nbytes < _MIN_SCRATCH_BYTES:
            return np.empty(nbytes, np.uint8)
        with self._scratch_lock:
            for i, found in enumerate(self._scratch):
                if len(found) == nbytes:
                    return self._scratch.pop(i)
        return np.frombuffer(map_huge_pages(nbytes), np.uint8)

    def return_scratch(self, found: np.ndarray) -> None:
        """Let memory be used again, which nobody uses any more."""
        if len(found) < _MIN_SCRATCH_BYTES:
            return
        with self._scratch_lock:
            self._scratch.append(found)
            while sum(map(len, self._scratch)) > _MAX_SCRATCH_BYTES:
                del self._scratch[0]

    # --- records -----------------------------------------------------------------------------------------------

    def stat(self, path: str) -> PathRecord | None:
        """What is known of a path; None where there is nothing."""
        return self.stat_all([path])[path]

    def stat_all(self, paths: Sequence[str]) -> dict[str, PathRecord | None]:
        """The same of many at once."""
        for path in paths:
            check_path(path)
        if not self.exists():
            return dict.fromkeys(paths)
        found: dict[str, PathRecord | None] = {}
        for name, value in self._replicated_registers.read([f"/{path}" for path in paths]).items():
            file = None if value is None else file_record.decode_record(name[1:], value)
            found[name[1:]] = file if file is not None and file.exists else None
        return found

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

    def warn_under_replicated(self, path: str, member_count: int, redundancy: Redundancy) -> None:
        """Say that a file is on fewer members than it should be: now and then, not of each."""
        now = time.monotonic()
        level = logging.WARNING if now >= self._under_replication_warned_at + _WARNING_INTERVAL_SECONDS else logging.INFO
        if level == logging.WARNING:
            self._under_replication_warned_at = now
        log.log(
            level,
            "%s of %s is on %d members where %s asks for %d, as the others take nothing now: `ckpt-node admin repair` "
            "makes it whole when they do, or when there are more",
            path,
            self.url,
            member_count,
            redundancy,
            redundancy.total_fragments,
        )

    def publish(
        self,
        path: str,
        file: PathRecord,
        new: bool = False,
        base: PathRecord | None = None,
        fence_number: int | None = None,
        relink: Callable[[PathRecord], PathRecord] = lambda file: file,
        replaces: str | None = None,
        unsettled_number: int | None = None,
    ) -> PathRecord:
        """Make a record what a path is; what it says then. Raises AlreadyExists if `new` and something is there, Changed if it
        was written on `base`, or is to come in place of version `replaces`, and that is not there any more: for certain. Else
        Unavailable: it may be there, or have been. What a repair has moved meanwhile is the same as before.

        number: the fence number that this client knew before it made, or read of, the objects of the file. renewed: called
        where another number counts by now; it returns the file with objects that exist (`aggregator/file_io/relink.py`), or
        raises. unsettled: the fence number by which a member may have taken this version in an earlier try.
        """
        check_path(path)
        old: PathRecord | None = None
        proposed, is_proposed, is_absent = file, False, False
        fence_number = self.ring.fence_number if fence_number is None else fence_number
        checked_number: int | None = None  # by this number it is known that the path had not this version before

        def outdated(may_be_there: bool, now: int) -> None:
            nonlocal proposed, fence_number, unsettled_number
            if may_be_there and unsettled_number is None:
                unsettled_number = fence_number
            fence_number = now
            try:
                proposed = relink(proposed)
            except ObjectsCollected:
                value = self.read_records([f"/{path}"])[f"/{path}"] if unsettled_number is not None else None
                if not file_record.has_version(
                    None if value is None else file_record.decode_record(path, value), proposed.head.version
                ):
                    raise

        def decide(name: str, value: RegisterValue | None) -> RegisterValue | None:
            nonlocal old, file, is_proposed, is_absent
            current = None if value is None else file_record.decode_record(path, value)
            is_absent = unsettled_number is not None and current is None and checked_number != fence_number
            if is_absent or file_record.has_version(current, proposed.head.version):
                return None  # a quorum is to say what is there; or it is done already, in a try that seemed to fail
            old = current if current is not None and current.exists else None
            if old is not None and (new or old.head.kind != proposed.head.kind):
                return None
            if replaces is not None and (old is None or old.head.version != replaces):
                return None
            if base is not None and (
                old is None or old.head.version != base.head.version or not file_record.has_same_content(old, base)
            ):
                return None
            file = proposed
            if base is not None and base.layout and old and old.layout and old.layout != base.layout and proposed.layout:
                file = replace(proposed, layout=file_record.written_on(proposed.layout, base.layout, old.layout))
            if removed_members := self._removed_members_of(file):
                raise MembersRemoved(removed_members, file, base if base is None else old, unsettled_number)
            shared = file.rename_token if base is None or current is None else current.rename_token  # what it is written on
            is_proposed = True
            return file_record.encode_record(replace(file, head=file_record.next_head(file.head, current), rename_token=shared))

        value = self.update_record_fenced(fence_number, path, decide, outdated, expect_absent=new)
        while is_absent and value is None and unsettled_number is not None:
            if is_collected_since(self, path, unsettled_number):
                raise Unavailable(
                    f"{path} in {self.url}: whether it was there, and was deleted since, can't be known; write it anew"
                )
            checked_number = fence_number
            value = self.update_record_fenced(fence_number, path, decide, outdated, expect_absent=new)
        current_record = None if value is None else file_record.decode_record(path, value)
        done = file_record.has_version(current_record, file.head.version) or (
            is_proposed and file_record.has_added_objects(current_record, file, base)
        )
        if not done and is_proposed and base is not None and file_record.is_history_truncated(current_record, base):
            raise Unavailable(
                f"{path} in {self.url} was changed by others again and again: whether this was added in between can't be "
                "known; look at what is there"
            )
        if not done and base is not None:
            raise Changed(f"{path} in {self.url} was changed while it was written on; nothing was added, do it again")
        if not done and replaces is not None:
            raise Changed(f"{path} in {self.url} was changed since it was read; it was not replaced")
        if not done:
            what = current_record.head.kind if current_record is not None else "file"
            raise AlreadyExists(f"{path} in {self.url}: a {what} of this name is there already")
        if current_record is not None and (
            left := self._removed_members_of(current_record)
        ):  # a half-done try, from before, has come through
            self._move_off_members(path, current_record, left)
        if old is not None and old.layout is not None and not old.rename_token:
            named = {h.name for each in (file, current_record) if each and each.layout for h in each.layout.objects}
            self.discard_layout(old.layout, named)
        return current_record if current_record is not None and current_record.head.version == file.head.version else file

    def _removed_members_of(self, file: PathRecord) -> set[str]:
        """Members that hold a part of a file, and were taken out of the namespace."""
        removed_members = self.ring.removed_members
        return {h.member for h in file.layout.objects if h.member in removed_members} if file.layout is not None else set()

    def _move_off_members(self, path: str, file: PathRecord, members: Collection[str]) -> None:
        """Move what lies on these members to others, unless somebody else does so, or the path is something else by now."""
        version = file.head.version
        while members:
            assert file.layout is not None
            number = self.ring.fence_number
            lost = LostFragments(frozenset(h.name for h in file.layout.objects if h.member in members))
            try:
                replace_layout(self, path, file, self.rebuild_fragments(path, version, file.layout, lost), number)
            except CkptError:
                now = current_record(self, path, file)
                if now is file:
                    raise
            else:
                return
            if now is None or now.head.version != version:
                return
            file, members = now, self._removed_members_of(now)

    def delete(self, paths: Iterable[str]) -> Sequence[str]:
        """Remove files and folder marks; the paths that were there. What is not there is no error."""
        every = [check_path(path) for path in paths]
        if not every:
            return []
        old: dict[str, PathRecord] = {}
        proposed: set[str] = set()
        unsettled = False
        now, version = time.time(), new_version()

        def outdated(may_be_there: bool, _: int) -> None:
            nonlocal unsettled
            unsettled = unsettled or may_be_there

        def decide(name: str, value: RegisterValue | None) -> RegisterValue | None:
            current = None if value is None else file_record.decode_record(name[1:], value)
            if file_record.has_version(current, version):
                return None  # done already, in a try that seemed to fail
            old.pop(name[1:], None)  # of a member that did not know the newest
            if current is None or not current.exists:
                return None
            old[name[1:]] = current
            proposed.add(name[1:])
            return file_record.encode_record(
                PathRecord(file_record.next_head(RecordHead("deleted", 0, now, now, version), current))
            )

        after = self._update_fenced(self.ring.fence_number, [f"/{path}" for path in every], decide, outdated)
        # Its tombstone may have been collected by now. Its objects are left to a repair: another client may have deleted it.
        possibly_deleted = {path for path in proposed if unsettled and path not in old and after[f"/{path}"] is None}
        for path in list(old):
            value = after[f"/{path}"]
            if not file_record.has_version(None if value is None else file_record.decode_record(path, value), version):
                del old[path]  # not by us
        objects_by_member: dict[str, list[str]] = defaultdict(list)
        for file in old.values():
            if file.layout is not None and not file.rename_token:
                for holder in file.layout.objects:
                    objects_by_member[holder.member].append(holder.name)
        self.discard(objects_by_member)
        return [path for path in every if path in old or path in possibly_deleted]

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
        self.publish(new, moved, fence_number=number, relink=still)
        failpoint("namespace.renamed")
        is_unchanged, version = False, new_version()

        def decide(_: str, value: RegisterValue | None) -> RegisterValue | None:
            nonlocal is_unchanged
            there = None if value is None else file_record.decode_record(old, value)
            if file_record.has_version(there, version):
                return None
            is_unchanged = (
                there is not None and there.head.version == file.head.version and there.rename_token == file.rename_token
            )
            if not is_unchanged or there is None:
                return None  # changed meanwhile: that stays
            now = time.time()
            return file_record.encode_record(
                PathRecord(file_record.next_head(RecordHead("deleted", 0, now, now, version), there))
            )

        after = self.update_record(old, decide)
        ours = after is not None and file_record.has_version(file_record.decode_record(old, after), version)
        if file.layout is not None and is_own_token and is_unchanged and ours:
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
        self.publish(path, PathRecord(RecordHead("folder", 0, now, now, new_version())), new=True)

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
            return self.publish(path, file, new, replaces=replaces)
        with self.create(path, redundancy, len(view), new=new, aligned=False, replaces=replaces) as writer:
            for start in range(0, len(view), _APPEND_BYTES):
                writer.append(view[start : start + _APPEND_BYTES])
            return writer.publish()

    def truncate(self, path: str, expected: PathRecord) -> PathRecord:
        """Let a file be empty, at once; what it is then. Raises Changed if it is another one by now."""
        now = time.time()
        return self.publish(path, PathRecord(RecordHead("file", 0, now, now, new_version()), inline_data=b""), base=expected)

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
        return FileWriter(self, path, redundancy, size_hint, new=new, aligned=aligned, base=base, replaces=replaces)

    def open(self, path: str) -> FileReader:
        """Open a file for reading; raises NotFound."""
        file = self.stat(path)
        if self.host_domain:  # for copies that are near
            self.update_domains(0)
        if file is None or file.head.kind != "file":
            raise NotFound(f"{path} in {self.url}: {'no such file' if file is None else 'a folder, no file'}")
        return FileReader(self, path, file)

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

    # --- objects that nobody needs -----------------------------------------------------------------------------

    def discard(self, names: Mapping[str, Sequence[str]], wait_for_slow_nodes: bool = False) -> None:
        """Delete objects by member. What can't be deleted now, a scrub finds. patient: wait for nodes that take long, too, and
        that else go on by themselves; for members without a node nobody else does."""
        calls = {
            m: (lambda m=m, n=n: self.open_members[m].store.delete(n)) for m, n in names.items() if m in self.open_members and n
        }  # type: ignore[misc]
        nodes = {
            m: call for m, call in calls.items() if self.open_members[m].member.address is not None and not wait_for_slow_nodes
        }
        others = {m: call for m, call in calls.items() if m not in nodes}
        errors: dict[str, StoreError] = {}
        for asked, seconds in (
            (nodes, min(_DISCARD_SECONDS, self.commit_timeout_seconds)),
            (others, self.commit_timeout_seconds),
        ):
            errors |= self.fan_out.ask(asked, seconds, skip_failed=True, mark_late=False)[1] if asked else {}
        for member, error in errors.items():
            log.info("%d objects on %s stay until a scrub: %s", len(names[member]), member, error)

    def discard_layout(self, layout: FileLayout, kept_objects: Collection[str] = ()) -> None:
        """Delete the objects of a layout but those to keep."""
        objects_by_member: dict[str, list[str]] = defaultdict(list)
        for holder in layout.objects:
            if holder.name not in kept_objects:
                objects_by_member[holder.member].append(holder.name)
        self.discard(objects_by_member)

    def rebuild_fragments(
        self, path: str, version: str, layout: FileLayout, lost: LostFragments, allow_partial: bool = False
    ) -> FileLayout:
        """The layout with what is gone made anew on other members; see `rebuild`."""
        self.update_domains()
        return rebuild_fragments(self, path, version, layout, lost, allow_partial=allow_partial)

    def close(self) -> None:
        self.fan_out.close()
        self.read_fan_out.close()
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
