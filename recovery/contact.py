"""Whether this host is cut off from the others, so that they may go on without it. Pure.

The others take an agent for lost when its reports have been missing for a lease of LOST_SECONDS. A state that does not answer
must not end anybody's ranks. So this host is cut off only where, besides, no machine of the state can be reached, and as many
other hosts can't be reached as are enough to go on (--min), or all of them. Where fewer are out of reach it is the state that
is away, for all alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckpt.recovery.agents import LOST_SECONDS

LOOK_SECONDS = 0.75
"""How long a look takes at most. Three of them end within a lease, and two of these ask the other hosts."""
_FRESH_SECONDS = 2.0
"""Who was away for longer knows nothing of the time between."""


@dataclass(frozen=True, slots=True)
class Look:
    """One attempt to reach the state and the other hosts. Times are of CLOCK_MONOTONIC."""

    began: float
    ended: float
    state: bool
    """Whether a machine of the state is in reach."""
    hosts: frozenset[str] = frozenset()
    """Those that were tried."""
    absent: frozenset[str] = frozenset()
    """Those of them that are out of reach."""


@dataclass(frozen=True, slots=True)
class Contact:
    """What one agent knows of its contact with the others. Times are of CLOCK_MONOTONIC."""

    acknowledged_at: float
    """When the newest report was sent that the state has acknowledged: the others may count from then on."""
    least: int = 1
    """So many hosts can go on (--min)."""
    looks: tuple[Look, ...] = ()
    """The last two since then."""

    def acknowledged(self, at: float) -> Contact:
        """After a report that was sent at this time has been acknowledged."""
        return replace(self, acknowledged_at=max(at, self.acknowledged_at), looks=())

    def looked(self, look: Look) -> Contact:
        """After one look more. One that began before the last acknowledged report proves nothing."""
        return replace(self, looks=(*self.looks, look)[-2:]) if look.began >= self.acknowledged_at else self

    def silent_seconds(self, now: float) -> float:
        """How long the others may have had no report."""
        return now - self.acknowledged_at

    def is_state_away(self, now: float) -> bool:
        """Whether the last look was just now, and has not found the state."""
        return bool(self.looks) and _is_fresh(self.looks[-1], now) and not self.looks[-1].state

    def is_lost(self, now: float) -> bool:
        """Whether the others may go on without this host by now, and it can't know."""
        if self.silent_seconds(now) < LOST_SECONDS or len(self.looks) < 2:
            return False
        first, second = self.looks
        if first.state or second.state or not _is_fresh(first, second.began) or not _is_fresh(second, now):
            return False
        tried, absent = len(second.hosts), len(first.absent & second.absent)
        return tried > 0 and absent >= min(self.least, tried)


def _is_fresh(look: Look, now: float) -> bool:
    """Whether it says how it is now. Not where this process stood still meanwhile: it must look again first."""
    return look.ended - look.began < _FRESH_SECONDS and now - look.ended < _FRESH_SECONDS
