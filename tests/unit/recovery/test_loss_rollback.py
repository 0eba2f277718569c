"""The steps that a job goes back to after a bad loss."""

from __future__ import annotations

import math
from typing import Any

from helpers.loop_runs import told
from hypothesis import given
from hypothesis import strategies as st

from ckpt.recovery.policy.loss_rollback import MAX_SKIPS, roll_back
from ckpt.training import loss_spikes
from ckpt.training.data_position import SKIP_VARIABLE, is_in_ranges, parse_ranges
from ckpt.training.rank_heartbeat import BadLoss
from ckpt.training.restore_limit import RESTORE_LIMIT_VARIABLE


def bad(batch: int, step: int | None = None, kind: Any = "not finite") -> BadLoss:
    return BadLoss(batch if step is None else step, kind, math.nan if kind == "not finite" else 9.0, 3.0, batch)


def test_first_the_same_again_then_others() -> None:
    history, skip, actions = [], (), []
    for turn in range(10):
        history.append(bad(120 + turn))
        decision = roll_back(history, skip)
        actions.append(decision.action)
        if decision.action == "skip":
            assert all(is_in_ranges(decision.skip, n) for n in (119 + turn, 120 + turn))
            assert decision.before is not None
            assert decision.before < 120 + turn
            assert parse_ranges(told(decision)[SKIP_VARIABLE]) == decision.skip
            assert told(decision)[RESTORE_LIMIT_VARIABLE] == str(decision.before)
            width = [last - first for first, last in (*skip, *decision.skip)]
            assert width == sorted(width), "more each time"
        skip = decision.skip
        if decision.action == "halt":
            break
    assert actions == ["retry", *["skip"] * MAX_SKIPS, "halt"]
    assert decision.reason.startswith("the loss of step 124 (batch 124) was nan; the 5th time there, and batches ")


def test_words_and_limits() -> None:
    assert told(roll_back([bad(5)])) == {}
    found = roll_back([bad(-1, 50, "spike"), bad(-1, 51, "spike")])
    assert found.reason == "the loss of step 51 jumped to 9, above 3; the 2nd time there: batches 50 to 51 are passed over"
    assert told(found) == {SKIP_VARIABLE: "50-51", RESTORE_LIMIT_VARIABLE: "50", loss_spikes.LIMIT_VARIABLE: "3.0"}


@given(st.lists(st.tuples(st.integers(0, 400), st.sampled_from(["not finite", "spike"])), min_size=1, max_size=12))
def test_any_history_ends(places: list[tuple[int, Any]]) -> None:
    """What is passed over only grows, batches far from any bad one never are, and no place is tried for ever."""
    history, skip = [], ()
    for place, kind in places:
        history.append(bad(place, kind=kind))
        found = roll_back(history, skip)
        near = sum(abs(p.batch - place) <= 32 for p in history)
        assert found.action == ("retry" if near == 1 else "halt" if near > MAX_SKIPS + 1 else "skip")
        before = {n for n in range(500) if is_in_ranges(skip, n)}
        after = {n for n in range(500) if is_in_ranges(found.skip, n)}
        assert before <= after
        assert all(any(abs(n - p.batch) <= 16 for p in history) for n in after)
        assert str(place) in found.reason
        skip = found.skip
