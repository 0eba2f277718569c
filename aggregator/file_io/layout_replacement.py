"""The replacement of a file's layout after its fragments were moved, if the file has not changed meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace

from ckpt.aggregator.file_io.member_io import MemberIO
from ckpt.aggregator.file_io.relink import relink_objects
from ckpt.aggregator.records import file_record
from ckpt.aggregator.records.file_record import FileLayout, PathRecord, drop_unused_objects
from ckpt.aggregator.records.namespace_records import NamespaceRecords
from ckpt.storage.base.errors import CkptError, StoreError
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.registers.base import RegisterValue

log = logging.getLogger("ckpt")


def current_record(records: NamespaceRecords, path: str, expected: PathRecord) -> PathRecord | None:
    """Return the current record of a path; `expected` itself where it is unchanged or can't be read now."""
    try:
        now = records.stat_all([path])[path]
    except CkptError:
        return expected
    return (
        expected if now is not None and file_record.encode_record(now).body == file_record.encode_record(expected).body else now
    )


def replace_layout(
    records: NamespaceRecords, member_io: MemberIO, path: str, old: PathRecord, layout: FileLayout, fence_number: int,
    kept_objects: Collection[str] = (),
) -> bool:  # fmt: skip
    """Make the record of a file name the objects of `layout`, if it still is `old`; else delete the new objects.

    Return whether no record needs the old objects any more; they are deleted then. fence_number: the number that was read
    before the new objects were written. kept_objects: old objects that are not deleted.

    Raises StoreError if another repair has deleted the new objects.
    """
    assert old.layout is not None
    before = {o.name for o in old.layout.objects}
    proposed_layouts = [drop_unused_objects(layout)]  # the last is proposed; the others have the same objects by other names
    expected_body = file_record.encode_record(old).body

    def decide(_: str, value: RegisterValue | None) -> RegisterValue | None:
        if value is None or value.body != expected_body:
            return None
        return file_record.encode_record(replace(old, layout=proposed_layouts[-1]))

    def on_outdated(_: bool, __: int) -> None:
        new_names = {o.name for o in proposed_layouts[-1].objects} - before
        relinked, unlinked = relink_objects(member_io, proposed_layouts[-1], new_names)
        if unlinked:
            raise StoreError(
                f"{path}: another repair has deleted the new fragments while this one was stopped, and the file is unchanged; "
                "repair it again"
            )
        proposed_layouts.append(relinked)

    failpoint("repair.record")
    after = records.update_record_fenced(fence_number, path, decide, on_outdated)
    current = None if after is None else file_record.decode_record(path, after)
    named = {o.name for o in current.layout.objects} if current is not None and current.layout is not None else set()
    new = {o.name for each in proposed_layouts for o in each.objects}
    done = bool(named & (new - before)) and not old.rename_token
    if current is not None and current.head.version == old.head.version and not (old.rename_token or current.rename_token):
        member_io.discard_layouts([old.layout], {*named, *kept_objects, *new})
    if not named & (new - before):
        log.info("%s was changed while it was repaired; it is left to the next repair", path)
    member_io.discard_layouts(proposed_layouts, named | before)  # new objects that the record does not name
    return done and current is not None and not current.rename_token and not named & set(kept_objects)
