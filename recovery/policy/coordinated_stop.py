"""The step after which all ranks of a job stop. Pure; ckpt/training/heartbeat_page.py is the ranks' side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopRequest:
    """The step that the ranks are requested to stop after."""

    step: int
    """Ranks save after this step and end."""
    agreed: bool = False
    """Whether all ranks have acknowledged the step. None of them will pass it, and the request no longer changes."""
    ahead: int = 1
    """How many steps beyond the fastest rank the step was chosen."""


def next_stop(current: StopRequest | None, ranks: Iterable[tuple[int, int | None]]) -> StopRequest:
    """Return the stop request that follows from the current one and the state of the ranks.

    The first request names the step that the fastest rank is executing. If a rank passed the step before it acknowledged it,
    the next request lies twice as far ahead, until all ranks acknowledge in time. Call this each time the heartbeat pages are
    read. When `step` changes, write it into all pages (`HeartbeatPage.request_stop`). When `agreed` becomes true, confirm it
    there (`HeartbeatPage.confirm_stop`).

    current: the request before this one; None if there is none.
    ranks: of each running rank its step, and the stop step that it has acknowledged (None: none).
    """
    rank_stops = list(ranks)
    newest = max((step for step, _ in rank_stops), default=-1)
    if current is None:
        return StopRequest(newest + 1)
    if current.agreed:
        return current
    if rank_stops and all(acknowledged == current.step for _, acknowledged in rank_stops):
        return StopRequest(current.step, True, current.ahead)
    if any(step >= current.step and acknowledged != current.step for step, acknowledged in rank_stops):
        return StopRequest(newest + 2 * current.ahead, False, 2 * current.ahead)
    return current
