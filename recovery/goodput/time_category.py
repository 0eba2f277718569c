"""The categories of time in the goodput ledger, and the category of a rank by its heartbeat. Pure.

While ranks run, the heartbeat of the first rank decides. `agent/time_accounting.py` accounts for times in which no rank runs.
"""

from __future__ import annotations

from typing import Literal, get_args

from ckpt.training.heartbeat_records import RankHeartbeat

TimeCategory = Literal["useful", "redo", "stall", "restore", "spawn", "detect", "stop", "decide", "wait"]
"""What a second of a run was spent on:

- useful: steps done for the first time;
- redo: steps that repeat lost ones;
- stall: the training loop waits for a save;
- restore: a step is loaded;
- spawn: the ranks start, with their imports;
- detect: the silence before a failure was noticed;
- stop: the ranks are ended;
- decide: the coordinator decides, or an agent follows the decision;
- wait: the run waits for hosts, or before another attempt.
"""
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
