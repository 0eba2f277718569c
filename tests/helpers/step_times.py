"""Measured step times of ranks that are slower than the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckpt.recovery.policy.stragglers import DEFAULT_FACTOR, PaceMeter, RankPace, find_stragglers
from ckpt.training.rank_heartbeat import RankHeartbeat
from helpers.agent_worlds import World
from helpers.host_runs import job as job


def pace(rank: int, seconds: float = 0.1) -> RankPace:
    return RankPace(rank, seconds, seconds, seconds, False)


def measured(steps: Sequence[float], computes: Sequence[float] | None = None, rank: int = 0) -> RankPace | None:
    """The pace of a rank whose steps took so long, over ten seconds."""
    measure, at, computed = PaceMeter(rank, 10.0), 0.0, 0.0
    before = RankHeartbeat(1, 0, "step", 0.0, -1, 0.0, 1)
    measure.learn(replace(before, step=-1, phase="compile"), before)
    for number, seconds in enumerate(steps, 1):
        at += seconds
        computed += 0.0 if computes is None else computes[number - 1]
        beat = replace(before, beats=number + 1, step=number, since=at, compute_seconds=computed)
        measure.learn(before, beat)
        before = beat
    return measure.pace


def found(*ranks: Sequence[float] | tuple[Sequence[float], Sequence[float]], factor: float = DEFAULT_FACTOR) -> list[int]:
    """Those that are stragglers, of ranks with such steps (and, of them, such parts that are marked)."""
    paces = [
        measured(each[0], each[1], rank) if isinstance(each, tuple) else measured(each, None, rank)
        for rank, each in enumerate(ranks)
    ]
    return [one.rank for one in find_stragglers([pace for pace in paces if pace is not None], factor)]


def slow(run: World, name: str, seconds: float = 0.3) -> None:
    """Its second rank, from now on; the others as usual."""
    for member in run.course.members:
        paces = (pace(member.first), pace(member.first + 1, seconds if member.name == name else 0.1))
        run.agents[member.name] = replace(run.agents[member.name], paces=paces)
