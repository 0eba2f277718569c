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
import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.records.file_record import FileLayout, MemberObject
from ckpt.storage.base.errors import NotFound, StoreError
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.registers.fence_numbers import next_era

log = logging.getLogger("ckpt")

_TRIES = 5


def begin_era(namespace: Namespace, min_number: int = 0) -> int | None:
    """Fence every member that keeps records by a number that none has had, and that is above `above`; that number.

    None where a member does not answer, where the ring is just changing, or where others begin eras all the time.
    """
    for _ in range(_TRIES):
        namespace.invalidate_ring()
        ring = namespace.ring
        fence_number = next_era(ring.fence_number, min_number)
        if ring.previous is not None or fence_number is None:
            return None
        registers = {name: namespace.open_members[name].registers for name in ring.all_members}
        calls = {name: partial(each.fence, fence_number) for name, each in registers.items()}
        answers, errors = namespace.fan_out.ask(calls, namespace.commit_timeout_seconds)
        namespace.invalidate_ring()
        if errors:
            log.info("nothing is collected in %s: %s", namespace.url, "; ".join(map(str, errors.values())))
            return None
        if all(answers.values()):  # else another client begins one, too: its listing is not this one's
            failpoint("era.begun")
            return fence_number
    return None


def relink_objects(namespace: Namespace, layout: FileLayout, own_objects: Collection[str]) -> tuple[FileLayout, frozenset[str]]:
    """The layout with a second name for each of its objects that are `mine`, and the names of those that have none, because
    they are gone or their member does not answer."""
    names: dict[str, dict[str, str]] = defaultdict(dict)
    for holder in layout.objects:
        if holder.name in own_objects:
            names[holder.member][holder.name] = f"{holder.name.rpartition('-')[0]}-{secrets.token_hex(4)}"
    calls = {member: _link_call(namespace, member, each) for member, each in names.items() if member in namespace.open_members}
    answers, errors = namespace.fan_out.ask(calls, namespace.commit_timeout_seconds)
    for member, error in errors.items():
        log.warning("objects of this client on %s are given up: %s", member, error)
    linked = {(member, name): to for member, done in answers.items() for name, to in done.items()}
    holders = tuple(MemberObject(h.member, linked.get((h.member, h.name), h.name)) for h in layout.objects)
    unlinked = {h.name for h in layout.objects if h.name in own_objects and (h.member, h.name) not in linked}
    return replace(layout, objects=holders), frozenset(unlinked)


def _link_call(namespace: Namespace, member: str, names: Mapping[str, str]) -> Callable[[], dict[str, str]]:
    open_member = namespace.open_members[member]

    def link() -> dict[str, str]:
        done = {}
        for name, to in names.items():
            try:
                open_member.link(name, to)
                done[name] = to
            except NotFound:
                continue
            except StoreError as error:
                log.warning("%s on %s is given up: %s", name, member, error)
        return done

    return link
