"""The replacement of a file's layout after its fragments were moved, if the file has not changed meanwhile."""

from __future__ import annotations

import enum
import logging
from collections.abc import Collection
from dataclasses import replace

from ckpt.aggregator.file_io.member_io import MemberIO
from ckpt.aggregator.file_io.relink import relink_objects
from ckpt.aggregator.records import file_record
from ckpt.aggregator.records.file_record import FileLayout, FileRecord, drop_unused_objects
from ckpt.aggregator.records.namespace_records import NamespaceRecords
from ckpt.storage.base.errors import CkptError, StoreError
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.registers.base import RegisterValue

log = logging.getLogger("ckpt")


class Replacement(enum.Enum):
    """The outcome of the replacement of a layout. Only REPLACED is true."""

    REPLACED = enum.auto()
    """The record has the new layout, and no record needs the old objects."""
    OLD_NEEDED = enum.auto()
    """The record has the new layout, but a rename or the record itself may still need old objects."""
    CHANGED = enum.auto()
    """The record was changed meanwhile, and names no new object."""

    def __bool__(self) -> bool:
        return self is Replacement.REPLACED


def current_record(records: NamespaceRecords, path: str, expected: FileRecord) -> FileRecord | None:
    """Return the current record of a path; `expected` itself where it is unchanged or can't be read now."""
    try:
        now = records.stat_all([path])[path]
    except CkptError:
        return expected
    return expected if now is not None and file_record.encode_record(now) == file_record.encode_record(expected) else now


def replace_layout(
    records: NamespaceRecords, member_io: MemberIO, path: str, old: FileRecord, layout: FileLayout, fence_number: int,
    kept_objects: Collection[str] = (),
) -> Replacement:  # fmt: skip
    """Give the record of a file another layout if the record still is `old`, and return the outcome.

    Old objects that the record does not name are deleted, except `kept_objects`; all stay if a rename may need them, or if
    the file was replaced or appended to meanwhile. New objects that the record does not name are deleted, unless the record
    may have named them and the file been renamed since. fence_number: the number that was read before the new objects were
    written.

    Raises StoreError if some of the new objects can't be used any more, and Unavailable if the record can't be changed now.
    In both cases the new objects may stay, as the record may name them.
    """
    assert old.layout is not None
    old_names = {o.name for o in old.layout.objects}
    proposed_layouts = [drop_unused_objects(layout)]  # the last is proposed; the others have the same objects by other names
    possibly_accepted: set[int] = set()  # the indices of those that a member may have accepted
    # The head too: a file may get another length or version without any change of its stripes.
    expected_value = file_record.encode_record(old)

    def decide(_: str, value: RegisterValue | None) -> RegisterValue | None:
        if value != expected_value:
            return None
        possibly_accepted.add(len(proposed_layouts) - 1)
        return file_record.encode_record(replace(old, layout=proposed_layouts[-1]))

    def on_refused(_: Collection[str]) -> None:
        possibly_accepted.discard(len(proposed_layouts) - 1)

    def on_outdated(may_be_accepted: bool, _: int) -> None:
        if not may_be_accepted:
            on_refused(())
        own_names = {o.name for o in proposed_layouts[-1].objects} - old_names
        relinked, unlinked = relink_objects(member_io, proposed_layouts[-1], own_names)
        if unlinked:
            raise StoreError(
                f"{path}: another repair has deleted the new fragments while this client was stopped, or their member does not "
                "answer; try again"
            )
        proposed_layouts.append(relinked)

    failpoint("repair.record")
    after = records.update_record_fenced(fence_number, path, decide, on_outdated, on_refused=on_refused)
    current = None if after is None else file_record.decode_record(path, after)
    current_names = {o.name for o in current.layout.objects} if current is not None and current.layout is not None else set()
    new_names = {o.name for each in proposed_layouts for o in each.objects}
    is_replaced = bool(current_names & (new_names - old_names))
    if current is not None and current.layout in proposed_layouts:  # it may have fewer fragments, and no new objects
        is_replaced = True
    has_rename_token = bool(old.rename_token or (current is not None and current.rename_token))
    is_not_renamed = current is not None and current.head.version == old.head.version and not has_rename_token
    if is_not_renamed:
        member_io.discard_layouts([old.layout], {*current_names, *kept_objects, *new_names})
    # Where the answer to an accepted proposal was lost, a rename may have given the new objects to another path.
    unneeded = [each for i, each in enumerate(proposed_layouts) if is_not_renamed or i not in possibly_accepted]
    member_io.discard_layouts(unneeded, current_names | old_names)
    if not is_replaced:
        log.info("%s was changed while its fragments were moved; the new fragments are not used", path)
        return Replacement.CHANGED
    return Replacement.OLD_NEEDED if has_rename_token or current_names & set(kept_objects) else Replacement.REPLACED
