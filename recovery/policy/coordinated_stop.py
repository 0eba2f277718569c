"""After which step a job stops that was asked to end: the same on every rank. Pure; ckpt/training/heartbeat_page.py has the
ranks' side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopRequest:
    """What the ranks are asked."""

    step: int
    """To be saved after it, and to end."""
    agreed: bool = False
    """All ranks have heard of it, and none will go beyond. It does not change any more."""
    ahead: int = 1
    """So many steps beyond the fastest rank."""


def next_stop(current: StopRequest | None, ranks: Iterable[tuple[int, int | None]]) -> StopRequest:
    """What to ask now, from what was asked before and from each running rank's step and the stop it has heard of.

    Begins with the step that the fastest rank has under way. Where a rank was past it before it heard, twice as far ahead is
    tried, until all hear in time. Call it with every look at the pages: write `step` into all pages when it changes
    (Pulse.stop_at), and when it is agreed that, too (Pulse.stop_agreed).
    """
    rank_stops = list(ranks)
    newest = max((step for step, _ in rank_stops), default=-1)
    if current is None:
        return StopRequest(newest + 1)
    if current.agreed:
        return current
    if all(acknowledged == current.step for _, acknowledged in rank_stops):
        return StopRequest(current.step, True, current.ahead)
    if any(step >= current.step and heard != current.step for step, heard in rank_stops):
        return StopRequest(newest + 2 * current.ahead, False, 2 * current.ahead)
    return current
