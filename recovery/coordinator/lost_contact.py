"""Whether this host is cut off from the others, so that they may go on without it. Pure.

The others take an agent for lost when its reports have been missing for a lease of LOST_SECONDS. A state that does not answer
must not end anybody's ranks. So this host is cut off only where, besides, no machine of the state can be reached, and as many
other hosts can't be reached as are enough to go on (--min), or all of them. Where fewer are out of reach it is the state that
is away, for all alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckpt.recovery.run_log.agent_reports import LOST_SECONDS

PROBE_SECONDS = 0.75
"""How long a look takes at most. Three of them end within a lease, and two of these ask the other hosts."""
_FRESH_SECONDS = 2.0
"""Who was away for longer knows nothing of the time between."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One attempt to reach the state and the other hosts. Times are of CLOCK_MONOTONIC."""

    began: float
    ended: float
    is_state_reached: bool
    """Whether a machine of the state is in reach."""
    tried: frozenset[str] = frozenset()
    """Those that were tried."""
    unreachable: frozenset[str] = frozenset()
    """Those of them that are out of reach."""


@dataclass(frozen=True, slots=True)
class Contact:
    """What one agent knows of its contact with the others. Times are of CLOCK_MONOTONIC."""

    acknowledged_at: float
    """When the newest report was sent that the state has acknowledged: the others may count from then on."""
    min_hosts: int = 1
    """So many hosts can go on (--min)."""
    probes: tuple[Probe, ...] = ()
    """The last two since then."""

    def after_acknowledgement(self, at: float) -> Contact:
        """After a report that was sent at this time has been acknowledged."""
        return replace(self, acknowledged_at=max(at, self.acknowledged_at), probes=())

    def after_probe(self, probe: Probe) -> Contact:
        """After one look more. One that began before the last acknowledged report proves nothing."""
        return replace(self, probes=(*self.probes, probe)[-2:]) if probe.began >= self.acknowledged_at else self

    def silent_seconds(self, now: float) -> float:
        """How long the others may have had no report."""
        return now - self.acknowledged_at

    def is_state_unreachable(self, now: float) -> bool:
        """Whether the last look was just now, and has not found the state."""
        return bool(self.probes) and _is_fresh(self.probes[-1], now) and not self.probes[-1].is_state_reached

    def is_lost(self, now: float) -> bool:
        """Whether the others may go on without this host by now, and it can't know."""
        if self.silent_seconds(now) < LOST_SECONDS or len(self.probes) < 2:
            return False
        first, second = self.probes
        if (
            first.is_state_reached
            or second.is_state_reached
            or not _is_fresh(first, second.began)
            or not _is_fresh(second, now)
        ):
            return False
        tried, absent = len(second.tried), len(first.unreachable & second.unreachable)
        return tried > 0 and absent >= min(self.min_hosts, tried)


def _is_fresh(probe: Probe, now: float) -> bool:
    """Whether it says how it is now. Not where this process stood still meanwhile: it must look again first."""
    return probe.ended - probe.began < _FRESH_SECONDS and now - probe.ended < _FRESH_SECONDS
