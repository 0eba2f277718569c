"""The categories of time in the goodput ledger, and the category of a rank by its heartbeat. Pure.

While ranks run, the heartbeat of the first rank decides. `agent/time_accounting.py` accounts for times in which no rank runs.
"""

from __future__ import annotations

from typing import Literal, get_args

from ckpt.training.heartbeat_records import RankHeartbeat

TimeCategory = Literal["useful", "redo", "stall", "restore", "spawn", "detect", "stop", "decide", "wait"]
TIME_CATEGORIES: tuple[TimeCategory, ...] = get_args(TimeCategory)


def rank_time_category(beat: RankHeartbeat, best_step: int) -> TimeCategory:
    """Return what a rank spends its time on.

    best_step: the newest step that any attempt has done; steps up to it count as repeated.
    """
    if beat.phase == "load":
        return "restore"
    if beat.phase == "save":
        return "stall"
    if beat.phase == "start" and beat.step < 0:
        return "spawn"
    return "redo" if beat.step + 1 <= best_step else "useful"
