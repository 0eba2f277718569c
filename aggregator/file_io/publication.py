"""Making a record what a path is: on a condition, at most once, and never one that names objects which do not exist."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from ckpt.aggregator.file_io.layout_replacement import current_record, replace_layout
from ckpt.aggregator.file_io.lost_fragments import LostFragments
from ckpt.aggregator.file_io.member_io import MemberIO
from ckpt.aggregator.file_io.rebuild import rebuild_fragments
from ckpt.aggregator.records import file_record
from ckpt.aggregator.records.file_record import PathRecord
from ckpt.aggregator.records.namespace_records import NamespaceRecords
from ckpt.aggregator.records.recently_collected import is_collected_since
from ckpt.storage.base.errors import AlreadyExists, Changed, CkptError, StoreError, Unavailable
from ckpt.storage.registers.base import RegisterValue

Relink = Callable[[PathRecord], PathRecord | None]
"""Called where another fence number counts by now. Returns the file with objects that exist (`relink.py`); None where too many
were deleted by a repair. It raises where nothing may be published any more for another reason."""


@dataclass(frozen=True, slots=True)
class Condition:
    """What must be at a path so that something is published there."""

    new: bool = False
    """Nothing."""
    base: PathRecord | None = None
    """This file, on which the new one was written. One that a repair has moved since is the same."""
    replaces: str | None = None
    """A file of this version."""


@dataclass(frozen=True, slots=True)
class Publication:
    """A record that is to become what its path is."""

    path: str
    file: PathRecord
    condition: Condition = Condition()
    fence_number: int | None = None
    """The one that the client knew before it made, or read of, the objects of the file; None: the current one."""
    unsettled_number: int | None = None
    """The fence number by which a member may have taken this version in an earlier try."""


@dataclass(frozen=True, slots=True)
class MembersRemoved:
    """Nothing was published, because members that hold a part of the file were taken out of the namespace meanwhile."""

    members: frozenset[str]
    publication: Publication
    """What was to be published, and on what, as that is now."""

    def error(self) -> StoreError:
        return StoreError(f"{', '.join(sorted(self.members))} were taken out of the namespace meanwhile; write it anew")


class _StopUpdate(Exception):
    """Ends a change of a record from within; the reason is in the state of the publication."""


class Publisher:
    """Publishes the files of one namespace. Safe to use from many threads."""

    def __init__(self, records: NamespaceRecords, member_io: MemberIO) -> None:
        self._records = records
        self._member_io = member_io

    @property
    def fence_number(self) -> int:
        """The fence number by which a publication goes that begins now."""
        return self._records.ring.fence_number

    def publish(self, publication: Publication, relink: Relink = lambda file: file) -> PathRecord | MembersRemoved:
        """Make a record what a path is; what it says then, or that members were removed.

        Raises AlreadyExists or Changed where the condition does not hold: then it is certain that nothing was published. Else
        Unavailable: it may have been.
        """
        work = _Work(self._records, publication, relink)
        try:
            value = work.run()
        except _StopUpdate:
            assert work.removed is not None
            return work.removed
        current = None if value is None else file_record.decode_record(publication.path, value)
        work.require_published(current)
        # A half-done try, from before, may have come through.
        if current is not None and (removed := _removed_members_of(self._records, current)):
            self._move_off_members(publication.path, current, removed)
        old, file = work.old, work.file
        if old is not None and old.layout is not None and not old.rename_token:
            named = {h.name for each in (file, current) if each and each.layout for h in each.layout.objects}
            self._member_io.discard_layout(old.layout, named)
        return current if current is not None and current.head.version == file.head.version else file

    def _move_off_members(self, path: str, file: PathRecord, members: Collection[str]) -> None:
        """Move what lies on these members to others, unless somebody else does so, or the path is something else by now."""
        version = file.head.version
        while members:
            assert file.layout is not None
            number = self.fence_number
            lost = LostFragments(frozenset(h.name for h in file.layout.objects if h.member in members))
            try:
                self._member_io.update_domains()
                moved = rebuild_fragments(self._member_io, path, version, file.layout, lost)
                replace_layout(self._records, self._member_io, path, file, moved, number)
            except CkptError:
                now = current_record(self._records, path, file)
                if now is file:
                    raise
            else:
                return
            if now is None or now.head.version != version:
                return
            file, members = now, _removed_members_of(self._records, now)


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
        self._checked_number: int | None = None  # by this number it is known that the path had not this version before
        self._is_proposed = self._is_absent = False
        self.file = publication.file
        """As last proposed."""
        self.old: PathRecord | None = None
        """What it replaces."""
        self.removed: MembersRemoved | None = None

    def run(self) -> RegisterValue | None:
        """Change the record; what it is after that."""
        value = self._update()
        while self._is_absent and value is None and self._unsettled_number is not None:
            if is_collected_since(self._records, self._path, self._unsettled_number):
                raise Unavailable(
                    f"{self._path} in {self._records.url}: whether it was there, and was deleted since, can't be known; "
                    "write it anew"
                )
            self._checked_number = self._fence_number
            value = self._update()
        return value

    def _update(self) -> RegisterValue | None:
        return self._records.update_record_fenced(
            self._fence_number, self._path, self._decide, self._on_outdated, expect_absent=self._condition.new
        )

    def _on_outdated(self, may_be_there: bool, fence_number: int) -> None:
        if may_be_there and self._unsettled_number is None:
            self._unsettled_number = self._fence_number
        self._fence_number = fence_number
        relinked = self._relink(self._proposed)
        if relinked is not None:
            self._proposed = relinked
        elif not self._is_published_already():
            raise StoreError(
                f"{self._path}: a repair has deleted what was written of it, because no record named it and its writer stood "
                "still; it was not published now, write it anew"
            )

    def _is_published_already(self) -> bool:
        """Whether an earlier try, whose outcome was unknown, has published it."""
        if self._unsettled_number is None:
            return False
        value = self._records.read_records([f"/{self._path}"])[f"/{self._path}"]
        current = None if value is None else file_record.decode_record(self._path, value)
        return file_record.has_version(current, self._proposed.head.version)

    def _decide(self, _: str, value: RegisterValue | None) -> RegisterValue | None:
        condition, base, proposed = self._condition, self._condition.base, self._proposed
        current = None if value is None else file_record.decode_record(self._path, value)
        self._is_absent = self._unsettled_number is not None and current is None and self._checked_number != self._fence_number
        if self._is_absent or file_record.has_version(current, proposed.head.version):
            return None  # a quorum is to say what is there; or it is done already, in a try that seemed to fail
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
            now = replace(condition, base=base if base is None else old)
            rest = Publication(self._path, file, now, unsettled_number=self._unsettled_number)
            self.removed = MembersRemoved(removed_members, rest)
            raise _StopUpdate
        shared = file.rename_token if base is None or current is None else current.rename_token  # what it is written on
        self._is_proposed = True
        return file_record.encode_record(replace(file, head=file_record.next_head(file.head, current), rename_token=shared))

    def require_published(self, current: PathRecord | None) -> None:
        """Raises where the record is not what was proposed."""
        base, url = self._condition.base, self._records.url
        if file_record.has_version(current, self.file.head.version) or (
            self._is_proposed and file_record.has_added_objects(current, self.file, base)
        ):
            return
        if self._is_proposed and base is not None and file_record.is_history_truncated(current, base):
            raise Unavailable(
                f"{self._path} in {url} was changed by others again and again: whether this was added in between can't be "
                "known; look at what is there"
            )
        if base is not None:
            raise Changed(f"{self._path} in {url} was changed while it was written on; nothing was added, do it again")
        if self._condition.replaces is not None:
            raise Changed(f"{self._path} in {url} was changed since it was read; it was not replaced")
        what = current.head.kind if current is not None else "file"
        raise AlreadyExists(f"{self._path} in {url}: a {what} of this name is there already")


def _removed_members_of(records: NamespaceRecords, file: PathRecord) -> frozenset[str]:
    """Members that hold a part of a file, and were taken out of the namespace."""
    removed_members = records.ring.removed_members
    if file.layout is None:
        return frozenset()
    return frozenset(h.member for h in file.layout.objects if h.member in removed_members)
