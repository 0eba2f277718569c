"""Decides which ranks of a rendezvous are dead, by the hellos of their processes."""

from __future__ import annotations

import calendar
import time
from collections.abc import Iterable, Mapping

from ckpt.errors import GroupError
from ckpt.groups.base import Group
from ckpt.groups.hello import Hello
from ckpt.groups.process_identity import is_alive

_STALE_SECONDS = 86400.0
"""The age at which a rendezvous that another host opened counts as stale."""

_SECOND_RANK_SECONDS = 2.0
"""Seconds that rank 0 waits for a second process with the same rank, if the job has no name and another launcher started that
rank; five times as long if that launcher has ended."""


def dead_rank_error(group: Group, ranks: Iterable[int], peers: Mapping[int, Hello], me: Hello) -> GroupError | None:
    """Return an error if one of these missing ranks is dead. The caller raises it after it has polled once more.

    peers: the hellos of other ranks, by rank. me: the hello of this process.
    """
    for rank in ranks:
        other = peers.get(rank)
        if other is not None and not other.can_be_alive(me):
            return GroupError(
                f"{group!r}: rank {rank} (process {other.owner.pid} on {other.owner.host}) is dead; read its log, "
                "and restart the job"
            )
    return None


def live_processes(hellos: Mapping[str, Hello], me: Hello, is_named: bool) -> tuple[dict[str, Hello], float]:
    """Return those of the processes with one rank that may be alive, and the seconds to wait for another one.

    Without a name of the job, a process with a live launcher is preferred to one whose launcher has ended, and the only one
    with the launcher of this process is preferred to all others.

    hellos: by token. is_named: whether the job has a name; without one, a hello may belong to another job.
    """
    live = {token: hello for token, hello in hellos.items() if hello.can_be_alive(me)}
    if is_named:
        return live, 0.0
    live = {token: hello for token, hello in live.items() if not hello.is_orphaned(me)} or live
    same_launcher = {token: hello for token, hello in live.items() if hello.has_same_launcher(me)}
    live = same_launcher if len(same_launcher) == 1 else live
    factors = [5 if hello.is_orphaned(me) else hello.has_same_launcher(me) is False for hello in live.values()]
    return live, _SECOND_RANK_SECONDS * max(factors, default=0)


def is_stale(opener: Hello, me: Hello, same_job: bool) -> bool:
    """Return whether the rendezvous of this rank 0 is not needed any more. A live job of another name may be in a gather."""
    lives = is_alive(opener.owner, me.owner)
    if lives is None:  # on another host
        return same_job or _age_seconds(opener.owner.since) > _STALE_SECONDS
    return not lives


def _age_seconds(since: str) -> float:
    return time.time() - calendar.timegm(time.strptime(since, "%Y-%m-%dT%H:%M:%SZ"))
