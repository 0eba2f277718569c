"""The limits after which a silent rank counts as hung are learned from the job."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.recovery.policy.hang_limits import (
    INITIAL_LIMIT_SECONDS,
    HangLimits,
    default_initial_limits,
    uniform_initial_limits,
)
from ckpt.training.heartbeat_page import PHASES


def test_limits_follow_the_longest_times() -> None:
    limits = HangLimits(factor=30, least_seconds=2)
    assert limits.limit_seconds("step") == 900
    for _ in range(20):
        limits.learn("step", 0.01)
    assert limits.limit_seconds("step") == 2
    limits.learn("step", 10.0)  # a step of this length is not a hang the next time
    assert limits.limit_seconds("step") == 30
    for _ in range(20):
        limits.learn("step", 400.0)
    assert limits.limit_seconds("step") == 900, "never more than the initial limit"
    assert limits.limit_seconds("end") == float("inf")


@pytest.mark.parametrize("steps", [10, 300, 10_000])
def test_the_longest_step_is_not_forgotten(steps: int) -> None:
    """An evaluation without a phase of its own may come after any number of fast steps."""
    limits = HangLimits(least_seconds=2)
    limits.learn("step", 100.0)
    for _ in range(steps):
        limits.learn("step", 0.01)
    assert limits.limit_seconds("step") == 300


@pytest.mark.parametrize("phase", ["step", "save", "load", "eval", "compile"])
def test_the_limit_of_each_phase_is_learned(phase: str) -> None:
    limits = HangLimits(least_seconds=1)
    for _ in range(7):
        limits.learn(phase, 0.02)
    assert limits.limit_seconds(phase) == INITIAL_LIMIT_SECONDS[phase]
    for _ in range(93):
        limits.learn(phase, 0.02)
    assert limits.limit_seconds(phase) == (1 if phase == "step" else 30)
    others = set(INITIAL_LIMIT_SECONDS) - {phase}
    assert all(limits.limit_seconds(each) == INITIAL_LIMIT_SECONDS[each] for each in others)


def test_a_load_that_was_ended_as_hung_gets_more_time() -> None:
    limits = HangLimits(least_seconds=1)
    for phase in ("load", "step"):
        for _ in range(20):
            limits.learn(phase, 0.02)
        limits.learn_hang(phase, 31)
    assert (limits.limit_seconds("load"), limits.limit_seconds("step")) == (93, 1)


def test_one_initial_limit_applies_to_all_phases_at_first() -> None:
    limits = HangLimits(least_seconds=1, initial_limit_seconds=uniform_initial_limits(3))
    assert {limits.limit_seconds(phase) for phase in PHASES if phase != "end"} == {3}
    assert limits.limit_seconds("end") == float("inf")


@pytest.mark.parametrize("hang", [10.0, 100.0, 2000.0, inf])
def test_no_limit_is_below_the_minimum_of_its_phase(hang: float) -> None:
    limits = HangLimits(least_seconds=hang, initial_limit_seconds=default_initial_limits(hang))
    for phase in ("step", "load", "save", "eval", "compile"):
        least = hang if phase == "step" else 30 * hang
        assert limits.limit_seconds(phase) >= max(least, INITIAL_LIMIT_SECONDS[phase])
        for _ in range(20):
            limits.learn(phase, 0.1)
        assert limits.limit_seconds(phase) == least
    assert limits.limit_seconds("start") >= INITIAL_LIMIT_SECONDS["start"]


@settings(max_examples=100)
@given(st.sampled_from(sorted(INITIAL_LIMIT_SECONDS)), st.floats(1e-4, 30), st.lists(st.floats(1, 10), min_size=1, max_size=60))
def test_no_limit_is_below_ten_times_the_usual_time(phase: str, usual: float, times: list[float]) -> None:
    limits = HangLimits(least_seconds=1)
    for each in times:
        assert limits.limit_seconds(phase) >= usual * each
        limits.learn(phase, usual * each)
