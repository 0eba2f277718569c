"""The start of a session: how a process, or the ranks of a group together, come by the lease to write."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from ckpt import errors
from ckpt.groups.base import Group
from ckpt.groups.process_identity import ProcessIdentity, this_process
from ckpt.repository.group_lease import GroupLease, acquire_group_lease
from ckpt.repository.repository import Repository
from ckpt.repository.writer_lease import SerialCounter, WriterLease
from ckpt.storage.base.checked_decode import decode
from ckpt.storage.base.errors import CkptError
from ckpt.storage.base.store import Store

RequestedStep = tuple[int | None, ...]
"""The step that the first save of a session was given, None for the one after the newest; empty where that is not known."""


@dataclass(frozen=True, slots=True)
class SessionStart:
    """What a session begins with."""

    lease: GroupLease
    next_step: int | None = None
    """Agreed by a group, whose ranks see commits at different moments; None: the one after the newest step."""
    rank_0_requested_step: RequestedStep = ()
    """What rank 0 of a group is asked to save at once."""


def next_step_number(repo: Repository) -> int:
    """The number after the newest step."""
    return repo.newest()[1] + 1


def start_alone(repo: Repository, shared: GroupLease | None, serials: SerialCounter | None) -> SessionStart:
    """Begin without a group. shared: a lease of this process for a group, which is used here as well."""
    repo.ensure()
    return SessionStart(acquire_group_lease(repo, serials=serials) if shared is None else shared.for_process_alone())


def start_in_group(
    repo: Repository,
    group: Group,
    serials: SerialCounter | None,
    rendezvous_store: Store,
    shared: GroupLease | None,
    requested_step: RequestedStep,
) -> SessionStart:
    """Begin together; the one time that the ranks talk. All raise the same error where rank 0 can't begin.

    shared: the lease that rank 0 has for another group. A new one would end the saves of that group for good.
    """
    if group.rank:
        announcement, processes = _announce_and_gather(rendezvous_store, group, None)
        if "error" in announcement:
            kind = getattr(errors, announcement["error"], CkptError)
            raise kind(announcement["message"])
        writer = WriterLease(repo, announcement["generation"], announcement["token"], serials)
        own_lease = GroupLease(writer, group.rank, group.size, announcement["lane"], processes)
        return SessionStart(own_lease, announcement["next"], tuple(announcement["asked"]))
    lease: GroupLease | None = None
    try:
        repo.ensure()
        if shared is not None and shared.writer.lease_error() is None:
            lease = shared.for_other_group(group.size)
        else:
            lease = acquire_group_lease(repo, group.size, serials)
            lease.writer.sweep_temporaries_once()  # now, while nobody of this generation writes
        announcement = {"generation": lease.writer.generation, "lane": lease.number, "token": lease.writer.token}
        announcement |= {"next": next_step_number(repo), "asked": requested_step}
    except BaseException as error:
        if lease is not None:
            lease.release()
        kind = type(error).__name__ if isinstance(error, CkptError) else "GroupError"
        _announce_and_gather(rendezvous_store, group, {"error": kind, "message": f"rank 0 could not begin to save: {error}"})
        raise
    try:
        _, lease.rank_processes = _announce_and_gather(rendezvous_store, group, announcement)
    except BaseException:
        lease.release()
        raise
    return SessionStart(lease, announcement["next"], requested_step)


def _announce_and_gather(
    rendezvous_store: Store, group: Group, announcement: dict[str, Any] | None
) -> tuple[dict[str, Any], list[ProcessIdentity]]:
    """Meet; what rank 0 announces, and the processes of all ranks: nobody waits for one that is seen to be dead."""
    group.meet_at(rendezvous_store)
    if not group.can_gather:
        return json.loads(group.broadcast(None if announcement is None else json.dumps(announcement).encode())), []
    gathered = group.all_gather(json.dumps({"told": announcement, "process": asdict(this_process())}).encode())
    messages = [json.loads(data) for data in gathered]
    return messages[0]["told"], [decode(ProcessIdentity, one["process"]) for one in messages]
