"""The publication of a file's record: on a condition, at most once, and only with objects that exist."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from ckpt.aggregator.file_io.layout_replacement import Replacement, current_record, replace_layout
from ckpt.aggregator.file_io.lost_fragments import LostFragments
from ckpt.aggregator.file_io.member_io import MemberIO
from ckpt.aggregator.file_io.rebuild import rebuild_fragments
from ckpt.aggregator.records import file_record
from ckpt.aggregator.records.collected_tombstones import is_collected_since
from ckpt.aggregator.records.file_record import FileRecord
from ckpt.aggregator.records.namespace_records import NamespaceRecords
from ckpt.storage.base.errors import AlreadyExists, Changed, CkptError, StoreError, Unavailable
from ckpt.storage.registers.base import RegisterValue

Relink = Callable[[FileRecord], FileRecord | None]
"""Called where members have another fence number now. Returns the file with objects that exist (`relink.py`); None if a
repair has deleted too many of them. Raises where the file may not be published any more for another reason."""


@dataclass(frozen=True, slots=True)
class Condition:
    """What must be at a path when a record is published there. Without any field set, nothing or a file or folder of the
    published kind may be there."""

    new: bool = False
    """No file or folder may exist there."""
    base: FileRecord | None = None
    """This file must be there, to which the new one was appended. Only a repair may have moved its fragments."""
    replaces: str | None = None
    """A file of this version must be there."""


@dataclass(frozen=True, slots=True)
class Publication:
    """A record to publish at a path."""

    path: str
    file: FileRecord
    condition: Condition = Condition()
    fence_number: int | None = None
    """The number that the client read before it wrote the objects of the file, or read their names; None: the current one."""
    unsettled_number: int | None = None
    """The fence number with which a member may have accepted this version in an earlier try."""
    replaced: Mapping[str, FileRecord] = field(default_factory=dict)
    """The records that proposals of an earlier try would have replaced, by version."""


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

    def publish(self, publication: Publication, relink: Relink = lambda file: file) -> FileRecord | MembersRemoved:
        """Publish a record, and return it as it is at the path then, or as it was proposed where others have changed the path.

        Returns MembersRemoved where it was not published, because members with fragments of the file were removed.

        Raises AlreadyExists or Changed if the condition does not hold: then nothing was published. After any other error it may
        have been published: Unavailable, IntegrityError if the current record can't be read, and StoreError if a repair has
        deleted its objects, or where its fragments can't be moved off removed members.
        """
        state = _PublicationState(self._records, publication, relink)
        try:
            value = state.run()
        except _StopUpdate:
            assert state.removed is not None
            return state.removed
        current = None if value is None else file_record.decode_record(publication.path, value)
        state.require_published(current)
        # A half-done change from before the removal of a member may have been settled.
        if current is not None and (removed := _removed_members_of(self._records, current)):
            self._move_off_members(publication.path, current, removed)
        old, file = state.replaced_record(current), state.file
        if old is not None and old.layout is not None and not old.rename_token:
            named = {o.name for each in (file, current) if each and each.layout for o in each.layout.objects}
            self._member_io.discard_layouts([old.layout], named)
        return current if current is not None and current.head.version == file.head.version else file

    def _move_off_members(self, path: str, file: FileRecord, members: Collection[str]) -> None:
        """Move the fragments on these members to others, unless another client does so or the path has changed."""
        version = file.head.version
        while members:
            assert file.layout is not None
            number = self.fence_number
            lost = LostFragments(frozenset(o.name for o in file.layout.objects if o.member in members))
            try:
                self._member_io.update_domains()
                moved = rebuild_fragments(self._member_io, path, version, file.layout, lost)
                outcome = replace_layout(self._records, self._member_io, path, file, moved, number)
                if outcome is not Replacement.CHANGED:
                    return
                current = current_record(self._records, path, file)
            except CkptError:
                current = current_record(self._records, path, file)
                if current is file:
                    raise
            if current is None or current.head.version != version:
                return
            file, members = current, _removed_members_of(self._records, current)


class _PublicationState:
    """State of one publication, used by the thread that publishes."""

    def __init__(self, records: NamespaceRecords, publication: Publication, relink: Relink) -> None:
        self._records = records
        self._path = publication.path
        self._condition = publication.condition
        self._relink = relink
        self._proposed = publication.file
        self._fence_number = records.ring.fence_number if publication.fence_number is None else publication.fence_number
        self._unsettled_number = publication.unsettled_number
        self._checked_number: int | None = None  # under this fence number, no tombstone of the path was collected
        self._may_be_accepted = publication.unsettled_number is not None or bool(publication.replaced)
        self._is_proposed = self._may_be_accepted
        self._is_hidden = False
        """Whether the record of the last call of `_decide` may hide that an earlier try was published, then deleted."""
        self._is_stale = False
        """Whether the record of the last call of `_decide` may lack the version that a quorum has."""
        self._is_compared = False
        """Whether a record with a full history was compared with that of a quorum, which is done once."""
        self._replaced = dict(publication.replaced)
        self.file = publication.file
        """The record as it was proposed last."""
        self.removed: MembersRemoved | None = None

    def run(self) -> RegisterValue | None:
        """Change the record, and return its value after that. Raises _StopUpdate where `removed` is set."""
        value = self._update()
        while self._is_stale or self._is_hidden:
            if self._is_hidden:
                self._require_not_collected()
            value = self._update()
        return value

    def _require_not_collected(self) -> None:
        """Raise Unavailable if an earlier try may have been published, and its tombstone collected."""
        number = self._unsettled_number
        if number is not None and is_collected_since(self._records, self._path, number):
            raise Unavailable(
                f"{self._path} in {self._records.url}: it can't be known whether it was published and then deleted; write "
                "it again"
            )
        self._checked_number = self._fence_number

    def _update(self) -> RegisterValue | None:
        self._is_stale = self._is_hidden = False
        return self._records.update_record_fenced(
            self._fence_number, self._path, self._decide, self._on_outdated, self._condition.new, self._on_refused
        )

    def _on_refused(self, _: Collection[str]) -> None:
        """Forget what was proposed, as no member has accepted it, unless a member may have accepted an earlier try."""
        if not self._may_be_accepted:
            self._is_proposed = False
            self._replaced.clear()

    def _on_outdated(self, may_be_accepted: bool, fence_number: int) -> None:
        """Continue with another fence number, after the objects of the file got second names."""
        self._may_be_accepted = self._may_be_accepted or may_be_accepted
        self._on_refused(())
        if may_be_accepted and self._unsettled_number is None:
            self._unsettled_number = self._fence_number
        self._fence_number = fence_number
        relinked = self._relink(self._proposed)
        if relinked is not None:
            self._proposed = relinked
        elif not self._is_published_already():  # this raises Unavailable if it can't be known
            raise StoreError(
                f"{self._path}: it was not published, because a repair has deleted its objects while the writer was stopped; "
                "write it again"
            )

    def _is_published_already(self) -> bool:
        """Return whether an earlier try, whose outcome was unknown, has published it. Raises Unavailable."""
        if self._unsettled_number is None:
            return False
        value = self._records.read_records([f"/{self._path}"])[f"/{self._path}"]
        current = None if value is None else file_record.decode_record(self._path, value)
        if self._is_unknown(current):
            raise self._unknown_error()
        if self._may_be_collected(current):
            self._require_not_collected()
        return file_record.has_version(current, self._proposed.head.version)

    def _decide(self, _: str, value: RegisterValue | None) -> RegisterValue | None:
        """Return the new value of the record, or None to keep it: the `Decide` of this publication."""
        condition, base, proposed = self._condition, self._condition.base, self._proposed
        current = None if value is None else file_record.decode_record(self._path, value)
        self._is_hidden = self._checked_number != self._fence_number and self._may_be_collected(current)
        self._is_stale = self._may_be_stale(current)
        is_done = file_record.has_version(current, proposed.head.version)  # an earlier try, which seemed to fail, did it
        if is_done or self._is_hidden or self._is_stale or self._is_unknown(current):
            return None
        old = current if current is not None and current.exists else None
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
            layout = file_record.rebase_layout(proposed.layout, old.layout, proposed.head.nbytes)
            file = replace(proposed, layout=layout)
        self.file = file
        if removed_members := _removed_members_of(self._records, file):
            current_condition = replace(condition, base=base if base is None else old)
            rest = Publication(self._path, file, current_condition, None, self._unsettled_number, self._replaced)
            self.removed = MembersRemoved(removed_members, rest)
            raise _StopUpdate
        # A file that is appended to keeps its token: its objects may be shared.
        token = file.rename_token if base is None or current is None else current.rename_token
        self._is_proposed = True
        if current is not None:
            file_record.note_replaced(self._replaced, current)
        return file_record.encode_record(replace(file, head=file_record.next_head(file.head, current), rename_token=token))

    def replaced_record(self, current: FileRecord | None) -> FileRecord | None:
        """Return the record that the publication replaced; None if the current record does not show which one."""
        return file_record.replaced_record(self._replaced, current, self.file.head.version)

    def _may_be_stale(self, current: FileRecord | None) -> bool:
        """Return whether a full history, over which the first proposal would be made, lacks the version that a quorum has.

        A proposal over such a record, from a member that was down, is easily mistaken for one that others have replaced often.
        """
        if self._is_compared or self._is_proposed or self._condition != Condition():
            return False
        if current is None or not file_record.is_history_truncated(current):
            return False
        self._is_compared = True
        value = self._records.read_records([f"/{self._path}"])[f"/{self._path}"]
        newest = None if value is None else file_record.decode_record(self._path, value)
        return newest is not None and not file_record.has_version(current, newest.head.version)

    def _may_be_collected(self, current: FileRecord | None) -> bool:
        """Return whether an earlier try may have been published and deleted, and the tombstone with its history collected."""
        versions = {self._proposed.head.version, *self._replaced}
        return self._unsettled_number is not None and not any(file_record.has_version(current, v) for v in versions)

    def _is_unknown(self, current: FileRecord | None) -> bool:
        """Return whether an earlier proposal may have been published and then replaced so often that its version is not listed.

        Its objects may be deleted then, so it must not be proposed again.
        """
        return self._is_proposed and file_record.is_history_truncated(current, {self._proposed.head.version, *self._replaced})

    def _unknown_error(self) -> Unavailable:
        done = "it was published" if self._condition.base is None else "this was added"
        return Unavailable(
            f"{self._path} in {self._records.url}: it can't be known whether {done}, as others have changed the file too "
            "often; check its content"
        )

    def require_published(self, current: FileRecord | None) -> None:
        """Raise Unavailable, Changed or AlreadyExists if the current record is not what was proposed."""
        base, url = self._condition.base, self._records.url
        if file_record.has_version(current, self.file.head.version) or (
            self._is_proposed and file_record.has_added_objects(current, self.file, base)
        ):
            return
        if self._is_unknown(current):
            raise self._unknown_error()
        if base is not None:
            raise Changed(f"{self._path} in {url} was changed during the append; nothing was added, try again")
        if self._condition.replaces is not None:
            raise Changed(f"{self._path} in {url} was changed since it was read; it was not replaced, read it again")
        kind = current.head.kind if current is not None else "file"
        raise AlreadyExists(f"{self._path} in {url}: a {kind} of this name exists already")


def _removed_members_of(records: NamespaceRecords, file: FileRecord) -> frozenset[str]:
    """Return the members with fragments of a file that were removed from the namespace."""
    removed_members = records.ring.removed_members
    if file.layout is None:
        return frozenset()
    return frozenset(o.member for o in file.layout.objects if o.member in removed_members)
