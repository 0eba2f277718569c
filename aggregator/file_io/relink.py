"""Second names for the objects of a client that was fenced by a new era (see `aggregator/records/eras.py`)."""

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
    """Give each of the objects in `own_objects` a second name on its member.

    Return the layout with the second names, and the old names of objects that got none, because they are deleted or their
    member does not answer.
    """
    names: dict[str, dict[str, str]] = defaultdict(dict)
    for member_object in layout.objects:
        if member_object.name in own_objects:
            new_name = f"{member_object.name.rpartition('-')[0]}-{secrets.token_hex(4)}"
            names[member_object.member][member_object.name] = new_name
    calls = {member: _link_call(member_io, member, each) for member, each in names.items() if member in member_io.open_members}
    answers, errors = member_io.fan_out.ask(calls, member_io.commit_timeout_seconds)
    for member, error in errors.items():
        log.warning("the objects of this client on %s can't be used any more: %s", member, error)
    linked = {(member, name): new_name for member, done in answers.items() for name, new_name in done.items()}
    objects = tuple(MemberObject(o.member, linked.get((o.member, o.name), o.name)) for o in layout.objects)
    unlinked = {o.name for o in layout.objects if o.name in own_objects and (o.member, o.name) not in linked}
    return replace(layout, objects=objects), frozenset(unlinked)


def _link_call(member_io: MemberIO, member: str, names: Mapping[str, str]) -> Callable[[], dict[str, str]]:
    open_member = member_io.open_members[member]

    def link() -> dict[str, str]:
        done = {}
        for name, new_name in names.items():
            try:
                open_member.link(name, new_name)
                done[name] = new_name
            except NotFound:
                continue
            except StoreError as error:
                log.warning("the object %s on %s can't be used any more: %s", name, member, error)
        return done

    return link
