"""The publication of a file's record: on a condition, at most once, and only with objects that exist."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from ckpt.aggregator.file_io.layout_replacement import current_record, replace_layout
from ckpt.aggregator.file_io.lost_fragments import LostFragments
from ckpt.aggregator.file_io.member_io import MemberIO
from ckpt.aggregator.file_io.rebuild import rebuild_fragments
from ckpt.aggregator.records import file_record
from ckpt.aggregator.records.collected_tombstones import is_collected_since
from ckpt.aggregator.records.file_record import PathRecord
from ckpt.aggregator.records.namespace_records import NamespaceRecords
from ckpt.storage.base.errors import AlreadyExists, Changed, CkptError, StoreError, Unavailable
from ckpt.storage.registers.base import RegisterValue

Relink = Callable[[PathRecord], PathRecord | None]
"""Called where members have another fence number now. Returns the file with objects that exist (`relink.py`); None where a
repair has deleted too many of them. Raises where the file may not be published any more for another reason."""


@dataclass(frozen=True, slots=True)
class Condition:
    """What must be at a path when a record is published there. Without any field set, anything may be."""

    new: bool = False
    """No file or folder may exist there."""
    base: PathRecord | None = None
    """This file must be there, to which the new one was appended. Only a repair may have moved its fragments."""
    replaces: str | None = None
    """A file of this version must be there."""


@dataclass(frozen=True, slots=True)
class Publication:
    """A record to publish at a path."""

    path: str
    file: PathRecord
    condition: Condition = Condition()
    fence_number: int | None = None
    """The number that the client read before it wrote the objects of the file, or read their names; None: the current one."""
    unsettled_number: int | None = None
    """The fence number with which a member may have accepted this version in an earlier try."""


@dataclass(frozen=True, slots=True)
class MembersRemoved:
    """The result where nothing was published, as members with fragments of the file were removed from the namespace."""

    members: frozenset[str]
    publication: Publication
    """The publication to try again, with the current base in its condition."""

    def error(self) -> StoreError:
        """Return the error for a caller that does not try again."""
        return StoreError(
            f"{self.publication.path}: {', '.join(sorted(self.members))} were removed from the namespace meanwhile; "
            "write it again"
        )


class _StopUpdate(Exception):
    """Ends a change of a record from within `_decide`. The reason is in the state of the publication."""


class Publisher:
    """Publishes the files of one namespace. Safe to use from many threads."""

    def __init__(self, records: NamespaceRecords, member_io: MemberIO) -> None:
        self._records = records
        self._member_io = member_io

    @property
    def fence_number(self) -> int:
        """The fence number for a publication that begins now."""
        return self._records.ring.fence_number

    def publish(self, publication: Publication, relink: Relink = lambda file: file) -> PathRecord | MembersRemoved:
        """Publish a record. Return the record of the path after that, or the removed members for which it was not published.

        Raises AlreadyExists or Changed where the condition does not hold: then nothing was published. After Unavailable it may
        have been published.
        """
        work = _Work(self._records, publication, relink)
        try:
            value = work.run()
        except _StopUpdate:
            assert work.removed is not None
            return work.removed
        current = None if value is None else file_record.decode_record(publication.path, value)
        work.require_published(current)
        # A half-done change from before the removal of a member may have been settled.
        if current is not None and (removed := _removed_members_of(self._records, current)):
            self._move_off_members(publication.path, current, removed)
        old, file = work.old, work.file
        if old is not None and old.layout is not None and not old.rename_token:
            named = {o.name for each in (file, current) if each and each.layout for o in each.layout.objects}
            self._member_io.discard_layouts([old.layout], named)
        return current if current is not None and current.head.version == file.head.version else file

    def _move_off_members(self, path: str, file: PathRecord, members: Collection[str]) -> None:
        """Move the fragments on these members to others, unless another client does so or the path has changed."""
        version = file.head.version
        while members:
            assert file.layout is not None
            number = self.fence_number
            lost = LostFragments(frozenset(o.name for o in file.layout.objects if o.member in members))
            try:
                self._member_io.update_domains()
                moved = rebuild_fragments(self._member_io, path, version, file.layout, lost)
                replace_layout(self._records, self._member_io, path, file, moved, number)
            except CkptError:
                current = current_record(self._records, path, file)
                if current is file:
                    raise
            else:
                return
            if current is None or current.head.version != version:
                return
            file, members = current, _removed_members_of(self._records, current)


class _Work:
    """State of one publication, used by the thread that publishes."""

    def __init__(self, records: NamespaceRecords, publication: Publication, relink: Relink) -> None:
        self._records = records
        self._path = publication.path
        self._condition = publication.condition
        self._relink = relink
        self._proposed = publication.file
        self._fence_number = records.ring.fence_number if publication.fence_number is None else publication.fence_number
        self._unsettled_number = publication.unsettled_number
        self._checked_number: int | None = None  # under this fence number, an absent record is known to mean "never published"
        self._is_proposed = self._is_absent = False
        self.file = publication.file
        """The record as it was proposed last."""
        self.old: PathRecord | None = None
        """The record that it replaces."""
        self.removed: MembersRemoved | None = None

    def run(self) -> RegisterValue | None:
        """Change the record, and return its value after that. Raises _StopUpdate where `removed` is set."""
        value = self._update()
        while self._is_absent and value is None and self._unsettled_number is not None:
            if is_collected_since(self._records, self._path, self._unsettled_number):
                raise Unavailable(
                    f"{self._path} in {self._records.url}: it can't be known whether it was published and then deleted; write "
                    "it again"
                )
            self._checked_number = self._fence_number
            value = self._update()
        return value

    def _update(self) -> RegisterValue | None:
        return self._records.update_record_fenced(
            self._fence_number, self._path, self._decide, self._on_outdated, expect_absent=self._condition.new
        )

    def _on_outdated(self, may_be_taken: bool, fence_number: int) -> None:
        """Continue with another fence number, after the objects of the file got second names."""
        if may_be_taken and self._unsettled_number is None:
            self._unsettled_number = self._fence_number
        self._fence_number = fence_number
        relinked = self._relink(self._proposed)
        if relinked is not None:
            self._proposed = relinked
        elif not self._is_published_already():
            raise StoreError(
                f"{self._path}: it was not published, because a repair has deleted its objects while the writer was stopped; "
                "write it again"
            )

    def _is_published_already(self) -> bool:
        """Return whether an earlier try, whose outcome was unknown, has published it."""
        if self._unsettled_number is None:
            return False
        value = self._records.read_records([f"/{self._path}"])[f"/{self._path}"]
        current = None if value is None else file_record.decode_record(self._path, value)
        return file_record.has_version(current, self._proposed.head.version)

    def _decide(self, _: str, value: RegisterValue | None) -> RegisterValue | None:
        """Return the new value of the record, or None to keep it: the `Decide` of this publication."""
        condition, base, proposed = self._condition, self._condition.base, self._proposed
        current = None if value is None else file_record.decode_record(self._path, value)
        self._is_absent = self._unsettled_number is not None and current is None and self._checked_number != self._fence_number
        if self._is_absent or file_record.has_version(current, proposed.head.version):
            return None  # a quorum must confirm that no record exists; or an earlier try, which seemed to fail, did publish it
        self.old = old = current if current is not None and current.exists else None
        if old is not None and (condition.new or old.head.kind != proposed.head.kind):
            return None
        if condition.replaces is not None and (old is None or old.head.version != condition.replaces):
            return None
        if base is not None and (
            old is None or old.head.version != base.head.version or not file_record.has_same_content(old, base)
        ):
            return None
        file = proposed
        if base is not None and base.layout and old and old.layout and old.layout != base.layout and proposed.layout:
            file = replace(proposed, layout=file_record.written_on(proposed.layout, base.layout, old.layout))
        self.file = file
        if removed_members := _removed_members_of(self._records, file):
            current_condition = replace(condition, base=base if base is None else old)
            rest = Publication(self._path, file, current_condition, unsettled_number=self._unsettled_number)
            self.removed = MembersRemoved(removed_members, rest)
            raise _StopUpdate
        # A file that is appended to keeps its token: its objects may be shared.
        token = file.rename_token if base is None or current is None else current.rename_token
        self._is_proposed = True
        return file_record.encode_record(replace(file, head=file_record.next_head(file.head, current), rename_token=token))

    def require_published(self, current: PathRecord | None) -> None:
        """Raise Unavailable, Changed or AlreadyExists where the current record is not what was proposed."""
        base, url = self._condition.base, self._records.url
        if file_record.has_version(current, self.file.head.version) or (
            self._is_proposed and file_record.has_added_objects(current, self.file, base)
        ):
            return
        if self._is_proposed and base is not None and file_record.is_history_truncated(current, base):
            raise Unavailable(
                f"{self._path} in {url}: it can't be known whether this was added, as others have changed the file too often; "
                "check its content"
            )
        if base is not None:
            raise Changed(f"{self._path} in {url} was changed during the append; nothing was added, try again")
        if self._condition.replaces is not None:
            raise Changed(f"{self._path} in {url} was changed since it was read; it was not replaced, read it again")
        kind = current.head.kind if current is not None else "file"
        raise AlreadyExists(f"{self._path} in {url}: a {kind} of this name exists already")


def _removed_members_of(records: NamespaceRecords, file: PathRecord) -> frozenset[str]:
    """Return the members with fragments of a file that were removed from the namespace."""
    removed_members = records.ring.removed_members
    if file.layout is None:
        return frozenset()
    return frozenset(o.member for o in file.layout.objects if o.member in removed_members)
