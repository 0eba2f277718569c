"""Eras: nothing is deleted on which a client may still count that stood still.

A client makes objects, stands still for hours, and then publishes a record that names them. Meanwhile no record names these
objects, so that a repair deletes them. Age does not tell a client that stands still from one that is dead. So a repair

1. lists what nobody refers to;
2. fences every member that keeps records by a new era (`storage/registers/fence_numbers.py`);
3. reads all records of all members once more, and deletes only what it listed in step 1 and no record names now.

A client publishes by the fence number that it knew before it made its objects. After step 2 members refuse that number. The
client then learns the new one, gives each of its objects a second name, and publishes those names: they were not listed in
step 1. An object that is deleted already can't get a name, so that the client knows. Whichever of both comes first at a member,
deleting or linking, no record names an object that does not exist. No clock is compared, and a client that no repair met
publishes as before.
"""

from __future__ import annotations

import logging
from functools import partial

from ckpt.aggregator.records.namespace_records import NamespaceRecords
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.registers.fence_numbers import next_era

log = logging.getLogger("ckpt")

_TRIES = 5


def begin_era(records: NamespaceRecords, min_number: int = 0) -> int | None:
    """Fence every member that keeps records by a number that none has had, and that is above `above`; that number.

    None where a member does not answer, where the ring is just changing, or where others begin eras all the time.
    """
    for _ in range(_TRIES):
        records.invalidate_ring()
        ring = records.ring
        fence_number = next_era(ring.fence_number, min_number)
        if ring.previous is not None or fence_number is None:
            return None
        registers = {name: records.open_members[name].registers for name in ring.all_members}
        calls = {name: partial(each.fence, fence_number) for name, each in registers.items()}
        answers, errors = records.fan_out.ask(calls, records.commit_timeout_seconds)
        records.invalidate_ring()
        if errors:
            log.info("nothing is collected in %s: %s", records.url, "; ".join(map(str, errors.values())))
            return None
        if all(answers.values()):  # else another client begins one, too: its listing is not this one's
            failpoint("era.begun")
            return fence_number
    return None
