"""Eras: nothing is deleted on which a client may still count that stood still.

A client makes objects, stands still for hours, and then publishes a record that names them. Meanwhile no record names these
objects, so that a repair deletes them. Age does not tell a client that stands still from one that is dead. So a repair

1. lists what nobody refers to;
2. fences every member that keeps records by a new era (`storage/fence_numbers.py`);
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

from ckpt.aggregator.files import Holder, Layout
from ckpt.aggregator.namespace import Namespace
from ckpt.storage.errors import NotFound, StoreError
from ckpt.storage.failpoints import failpoint
from ckpt.storage.fence_numbers import next_era

log = logging.getLogger("ckpt")

_TRIES = 5


def begin_era(namespace: Namespace, above: int = 0) -> int | None:
    """Fence every member that keeps records by a number that none has had, and that is above `above`; that number.

    None where a member does not answer, where the ring is just changing, or where others begin eras all the time.
    """
    for _ in range(_TRIES):
        namespace.renew()
        ring = namespace.ring
        number = next_era(ring.number, above)
        if ring.before is not None or number is None:
            return None
        registers = {name: namespace.places[name].registers for name in ring.everyone}
        calls = {name: partial(each.fence, number) for name, each in registers.items()}
        answers, errors = namespace.fan_out.ask(calls, namespace.commit_seconds)
        namespace.renew()
        if errors:
            log.info("nothing is collected in %s: %s", namespace.url, "; ".join(map(str, errors.values())))
            return None
        if all(answers.values()):  # else another client begins one, too: its listing is not this one's
            failpoint("era.begun")
            return number
    return None


def relinked(namespace: Namespace, layout: Layout, mine: Collection[str]) -> tuple[Layout, frozenset[str]]:
    """The layout with a second name for each of its objects that are `mine`, and the names of those that have none, because
    they are gone or their member does not answer."""
    names: dict[str, dict[str, str]] = defaultdict(dict)
    for holder in layout.holders:
        if holder.name in mine:
            names[holder.member][holder.name] = f"{holder.name.rpartition('-')[0]}-{secrets.token_hex(4)}"
    calls = {member: _link_all(namespace, member, each) for member, each in names.items() if member in namespace.places}
    answers, errors = namespace.fan_out.ask(calls, namespace.commit_seconds)
    for member, error in errors.items():
        log.warning("objects of this client on %s are given up: %s", member, error)
    linked = {(member, name): to for member, done in answers.items() for name, to in done.items()}
    holders = tuple(Holder(h.member, linked.get((h.member, h.name), h.name)) for h in layout.holders)
    gone = {h.name for h in layout.holders if h.name in mine and (h.member, h.name) not in linked}
    return replace(layout, holders=holders), frozenset(gone)


def _link_all(namespace: Namespace, member: str, names: Mapping[str, str]) -> Callable[[], dict[str, str]]:
    place = namespace.places[member]

    def link() -> dict[str, str]:
        done = {}
        for name, to in names.items():
            try:
                place.link(name, to)
                done[name] = to
            except NotFound:
                continue
            except StoreError as error:
                log.warning("%s on %s is given up: %s", name, member, error)
        return done

    return link
