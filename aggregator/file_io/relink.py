"""Second names for the objects of a client that an era began under (`aggregator/records/eras.py` says why)."""

from __future__ import annotations

import logging
import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from ckpt.aggregator.file_io.member_io import MemberIO
from ckpt.aggregator.records.file_record import FileLayout, MemberObject
from ckpt.storage.base.errors import NotFound, StoreError

log = logging.getLogger("ckpt")


def relink_objects(member_io: MemberIO, layout: FileLayout, own_objects: Collection[str]) -> tuple[FileLayout, frozenset[str]]:
    """The layout with a second name for each of its objects that are `mine`, and the names of those that have none, because
    they are gone or their member does not answer."""
    names: dict[str, dict[str, str]] = defaultdict(dict)
    for holder in layout.objects:
        if holder.name in own_objects:
            names[holder.member][holder.name] = f"{holder.name.rpartition('-')[0]}-{secrets.token_hex(4)}"
    calls = {member: _link_call(member_io, member, each) for member, each in names.items() if member in member_io.open_members}
    answers, errors = member_io.fan_out.ask(calls, member_io.commit_timeout_seconds)
    for member, error in errors.items():
        log.warning("objects of this client on %s are given up: %s", member, error)
    linked = {(member, name): to for member, done in answers.items() for name, to in done.items()}
    holders = tuple(MemberObject(h.member, linked.get((h.member, h.name), h.name)) for h in layout.objects)
    unlinked = {h.name for h in layout.objects if h.name in own_objects and (h.member, h.name) not in linked}
    return replace(layout, objects=holders), frozenset(unlinked)


def _link_call(member_io: MemberIO, member: str, names: Mapping[str, str]) -> Callable[[], dict[str, str]]:
    open_member = member_io.open_members[member]

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
