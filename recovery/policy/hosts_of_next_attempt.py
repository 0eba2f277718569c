"""The hosts of the next attempt, fewer than before if need be: which may be faulty, and which take part. Pure."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

from ckpt.recovery.policy.failure import PLANNED_CAUSES, Failure


@dataclass(frozen=True, slots=True)
class HostChoice:
    """The hosts of the next attempt, in the order of their ranks."""

    hosts: tuple[str, ...]
    reason: str
    """Text: what has changed since the attempt before; "" nothing."""


def suspected_hosts(failures: Sequence[Failure]) -> frozenset[str]:
    """Return the hosts that may be faulty: those of stragglers, and those where two consecutive failures began.

    Two failures count if no newer step was committed between them, or if both came soon after the restore: a job that saves
    every step always has a newer one. A requested end is not a failure.
    """
    found = {failure.host for failure in failures if failure.cause == "straggler"}
    for one, other in pairwise(failures):
        is_planned = one.cause in PLANNED_CAUSES or other.cause in PLANNED_CAUSES
        is_soon = one.is_soon_after_restore and other.is_soon_after_restore
        if one.host == other.host and not is_planned and (other.newest_committed <= one.newest_committed or is_soon):
            found.add(other.host)
    return frozenset(found)


def choose_hosts(
    before: Sequence[str], ready: Sequence[str], suspected: Set[str], target_hosts: int, min_hosts: int, has_waited: bool
) -> HostChoice | None:
    """Return the hosts of the next attempt; None: wait for more hosts.

    Hosts keep their positions. A spare takes the position of a missing host. After the wait, fewer hosts are enough. A
    suspected host is used only if there are not enough hosts without it, and no more of them than needed.

    before: the hosts of the attempt before, in the order of their ranks.
    ready: all hosts that could take part, in the order of arrival.
    suspected: hosts that may be faulty.
    target_hosts: how many hosts take part if there are enough.
    min_hosts: how many hosts are enough after the wait.
    has_waited: whether the wait is over.
    """
    good = [name for name in ready if name not in suspected]
    if len(good) < target_hosts and not has_waited and len(ready) < target_hosts:
        return None
    usable = good
    if len(good) < (min_hosts if has_waited else target_hosts):
        usable = good + [name for name in ready if name in suspected][: target_hosts - len(good)]
    if len(usable) < (min_hosts if has_waited else target_hosts):
        return None
    spares = [name for name in usable if name not in before]
    chosen: list[str] = []
    for name in before:
        if name in usable:
            chosen.append(name)
        elif spares:
            chosen.append(spares.pop(0))
    hosts = tuple((chosen + spares)[:target_hosts])
    return HostChoice(hosts, _describe_changes(before, hosts, ready, suspected) if before else "")


def _describe_changes(before: Sequence[str], hosts: Sequence[str], ready: Sequence[str], suspected: Set[str]) -> str:
    removed = [name for name in before if name not in hosts]
    added = [name for name in hosts if name not in before]
    parts = []
    if removed:
        why = ["suspected" if n in suspected and n in ready else "not needed" if n in ready else "gone" for n in removed]
        parts.append("without " + ", ".join(f"{name} ({w})" for name, w in zip(removed, why, strict=True)))
    if added:
        parts.append(f"with {', '.join(added)} instead" if removed else f"with {', '.join(added)}")
    return " ".join(parts)


_RETURN_SECONDS = 10.0
"""The shortest wait for a silent host: a restart costs about this much in any case."""


def worth_waiting_seconds(steps: int, step_seconds: float, most: float) -> float:
    """Return how long to wait for a silent host that may have the only copies of the newest steps.

    That is as long as it takes to repeat these steps. Whether the host returns is unknown. With this rule the total cost is
    at most about twice that of the better choice.

    steps: the number of steps that only the memory of hosts has.
    step_seconds: the duration of one step.
    most: the longest wait.
    """
    return min(most, max(_RETURN_SECONDS, steps * step_seconds)) if steps > 0 else 0.0
