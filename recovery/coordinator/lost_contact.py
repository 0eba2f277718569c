"""Decides whether this host has lost contact with the others, so that they may continue without it. Pure.

The other agents take an agent for lost when it has published no report for a lease of LOST_SECONDS. But ranks must not be
ended because etcd is down. So this host counts as cut off only if it reaches no etcd server, and if the hosts that it can't
reach are enough to continue (--min), or are all others. If fewer are unreachable, etcd is down for all hosts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckpt.recovery.run_log.agent_reports import LOST_SECONDS

PROBE_SECONDS = 0.75
"""The longest time of one probe. Three probes begin within a lease, and the last two of them try the other hosts. So a host
notices a loss of contact about 0.3 s after the end of its lease."""
_FRESH_SECONDS = 2.0
"""A probe that is older, or took longer, proves nothing: this process may have been stopped in between."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One attempt to reach the servers of the run log and the other hosts. Times are of CLOCK_MONOTONIC."""

    began: float
    ended: float
    is_state_reached: bool
    """Whether a server of the run log is reachable."""
    tried: frozenset[str] = frozenset()
    """The other hosts that were tried."""
    unreachable: frozenset[str] = frozenset()
    """Those of them that are unreachable."""


@dataclass(frozen=True, slots=True)
class Contact:
    """What one agent knows of its contact with the others. Times are of CLOCK_MONOTONIC."""

    acknowledged_at: float
    """When the newest acknowledged report was sent. The other agents may count the lease from then on."""
    min_hosts: int = 1
    """How many hosts are enough to continue (--min)."""
    probes: tuple[Probe, ...] = ()
    """The last two probes since that report."""

    def after_acknowledgement(self, at: float) -> Contact:
        """Return the contact after the run log has acknowledged a report that was sent at this time."""
        return replace(self, acknowledged_at=max(at, self.acknowledged_at), probes=())

    def after_probe(self, probe: Probe) -> Contact:
        """Return the contact after one more probe. A probe that began before the last acknowledged report proves nothing."""
        return replace(self, probes=(*self.probes, probe)[-2:]) if probe.began >= self.acknowledged_at else self

    def silent_seconds(self, now: float) -> float:
        """Return how long the other agents may have had no report."""
        return now - self.acknowledged_at

    def is_state_unreachable(self, now: float) -> bool:
        """Return whether the last probe is recent and has reached no server of the run log."""
        return bool(self.probes) and _is_fresh(self.probes[-1], now) and not self.probes[-1].is_state_reached

    def is_lost(self, now: float) -> bool:
        """Return whether the other hosts may have continued without this one, and it has no way to know."""
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
    """Return whether a probe is recent. If this process was stopped since it began, a new probe is necessary."""
    return probe.ended - probe.began < _FRESH_SECONDS and now - probe.ended < _FRESH_SECONDS
