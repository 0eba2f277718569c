"""Measured step times of ranks that are slower than the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckpt.recovery.policy.stragglers import DEFAULT_FACTOR, PaceMeter, RankPace, find_stragglers
from ckpt.training.heartbeat_records import RankHeartbeat
from helpers.agent_worlds import World
from helpers.host_runs import job as job


def pace(rank: int, seconds: float = 0.1) -> RankPace:
    """Return the pace of a rank whose steps take this long."""
    return RankPace(rank, seconds, seconds, seconds, False)


def measured_pace(steps: Sequence[float], computes: Sequence[float] | None = None, rank: int = 0) -> RankPace | None:
    """Return the pace, over ten seconds, of a rank whose steps took these times."""
    meter, at, computed = PaceMeter(rank, 10.0), 0.0, 0.0
    before = RankHeartbeat(1, 0, "step", 0.0, -1, 0.0, 1)
    meter.learn(replace(before, step=-1, phase="compile"), before)
    for number, seconds in enumerate(steps, 1):
        at += seconds
        computed += 0.0 if computes is None else computes[number - 1]
        beat = replace(before, beats=number + 1, step=number, since=at, compute_seconds=computed)
        meter.learn(before, beat)
        before = beat
    return meter.pace


def straggler_ranks(
    *ranks: Sequence[float] | tuple[Sequence[float], Sequence[float]], factor: float = DEFAULT_FACTOR
) -> list[int]:
    """Return the ranks that are stragglers, given the step times of each rank and, optionally, its marked times."""
    paces = [
        measured_pace(each[0], each[1], rank) if isinstance(each, tuple) else measured_pace(each, None, rank)
        for rank, each in enumerate(ranks)
    ]
    return [found_pace.rank for found_pace in find_stragglers([pace for pace in paces if pace is not None], factor)]


def slow_down(run: World, name: str, seconds: float = 0.3) -> None:
    """Slow down the second rank of a host from now on; the others have the usual pace."""
    for member in run.run_state.attempt_hosts:
        paces = (pace(member.first), pace(member.first + 1, seconds if member.name == name else 0.1))
        run.agents[member.name] = replace(run.agents[member.name], paces=paces)
