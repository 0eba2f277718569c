"""The start of a new era, which fences clients that were stopped before unreferenced objects are deleted.

A client may write objects, be stopped for hours, and then publish a record that names them. Meanwhile no record names these
objects, so a repair would delete them. Their age does not show whether the client is stopped or dead. Therefore a repair

1. lists the objects that no record names;
2. fences every member that keeps records by a new era (`storage/registers/fence_numbers.py`);
3. reads all records of all members again, and deletes only the objects of step 1 that no record names now.

A client publishes with the fence number that it read before it wrote its objects. After step 2 members refuse that number. The
client then reads the new number, gives each of its objects a second name, and publishes those names, which were not listed in
step 1. An object that is already deleted can't get a second name, so the client notices. Whether a member deletes or links an
object first, no record names an object that does not exist. No clocks are compared, and a client that meets no repair has no
additional calls.
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
    """Fence every member that keeps records by a new fence number above `min_number`, and return that number.

    Returns None if a member does not answer, if the ring is changing, or if other clients begin eras at the same time.
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
            reasons = "; ".join(map(str, errors.values()))
            log.info("%s: nothing is collected, as members could not be fenced: %s", records.url, reasons)
            return None
        if all(answers.values()):  # else another client began this era, after a listing of its own
            failpoint("era.begun")
            return fence_number
    return None
