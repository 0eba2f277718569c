"""Moving a file: its record names other objects from now on, if it still is the file that was read."""

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
    """What a path is now: `expected` itself where it still is that, or where nobody can tell."""
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
    """Say where a file is now, if it still is the same file at the same place. Else the new objects go again. Whether nobody
    needs the old objects any more.

    fence_number: the one that was known before the new objects were made. kept_objects: old objects that are not deleted.
    """
    assert old.layout is not None
    before = {h.name for h in old.layout.objects}
    proposed_layouts = [drop_unused_objects(layout)]  # the last is proposed; the others have the same objects by other names
    same = file_record.encode_record(old).body

    def decide(_: str, value: RegisterValue | None) -> RegisterValue | None:
        return (
            file_record.encode_record(replace(old, layout=proposed_layouts[-1]))
            if value is not None and value.body == same
            else None
        )

    def outdated(_: bool, __: int) -> None:
        now, unlinked = relink_objects(member_io, proposed_layouts[-1], {h.name for h in proposed_layouts[-1].objects} - before)
        if unlinked:
            raise StoreError(f"{path}: a repair that stood still has lost what it made; the file stays where it is")
        proposed_layouts.append(now)

    failpoint("repair.record")
    after = records.update_record_fenced(fence_number, path, decide, outdated)
    current = None if after is None else file_record.decode_record(path, after)
    named = {h.name for h in current.layout.objects} if current is not None and current.layout is not None else set()
    new = {h.name for each in proposed_layouts for h in each.objects}
    done = bool(named & (new - before)) and not old.rename_token
    if current is not None and current.head.version == old.head.version and not (old.rename_token or current.rename_token):
        member_io.discard_layout(old.layout, {*named, *kept_objects, *new})
    if not named & (new - before):
        log.info("%s was changed while it was repaired; it is left to the next repair", path)
    for each in proposed_layouts:
        member_io.discard_layout(each, named | before)  # what this repair has made, and nobody names
    return done and current is not None and not current.rename_token and not named & set(kept_objects)
