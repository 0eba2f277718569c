"""The steps to which a job goes back after a bad loss."""

from __future__ import annotations

import math
from typing import Any

from helpers.loop_runs import rollback_variables
from hypothesis import given
from hypothesis import strategies as st

from ckpt.recovery.policy.loss_rollback import MAX_SKIPS, roll_back
from ckpt.training import loss_spikes
from ckpt.training.batch_order import SKIP_VARIABLE, is_in_ranges, parse_ranges
from ckpt.training.heartbeat_records import BadLoss
from ckpt.training.restore_step_limit import RESTORE_STEP_LIMIT_VARIABLE


def bad(batch: int, step: int | None = None, kind: Any = "not finite") -> BadLoss:
    """Return a bad loss at this batch."""
    return BadLoss(batch if step is None else step, kind, math.nan if kind == "not finite" else 9.0, 3.0, batch)


def test_a_bad_batch_is_retried_once_then_more_batches_are_skipped() -> None:
    history, skip, actions = [], (), []
    for attempt in range(10):
        history.append(bad(120 + attempt))
        decision = roll_back(history, skip)
        actions.append(decision.action)
        if decision.action == "skip":
            assert all(is_in_ranges(decision.skip, n) for n in (119 + attempt, 120 + attempt))
            assert decision.restore_step_limit is not None
            assert decision.restore_step_limit < 120 + attempt
            assert parse_ranges(rollback_variables(decision)[SKIP_VARIABLE]) == decision.skip
            assert rollback_variables(decision)[RESTORE_STEP_LIMIT_VARIABLE] == str(decision.restore_step_limit)
            width = [last - first for first, last in (*skip, *decision.skip)]
            assert width == sorted(width), "each time at least as many batches"
        skip = decision.skip
        if decision.action == "halt":
            break
    assert actions == ["retry", *["skip"] * MAX_SKIPS, "halt"]
    assert decision.reason.startswith("the loss of step 124 (batch 124) was nan; the 5th time there, and batches ")


def test_the_reason_and_the_variables_of_a_roll_back() -> None:
    assert rollback_variables(roll_back([bad(5)])) == {}
    found = roll_back([bad(-1, 50, "spike"), bad(-1, 51, "spike")])
    assert found.reason == "the loss of step 51 jumped to 9, above 3; the 2nd time there: batches 50 to 51 are skipped"
    assert rollback_variables(found) == {
        SKIP_VARIABLE: "50-51",
        RESTORE_STEP_LIMIT_VARIABLE: "50",
        loss_spikes.LIMIT_VARIABLE: "3.0",
    }


@given(st.lists(st.tuples(st.integers(0, 400), st.sampled_from(["not finite", "spike"])), min_size=1, max_size=12))
def test_any_history_of_bad_losses_ends(bad_batches: list[tuple[int, Any]]) -> None:
    """Skipped ranges only grow, batches far from any bad one are never skipped, and no batch is tried endlessly."""
    history, skip = [], ()
    for batch, kind in bad_batches:
        history.append(bad(batch, kind=kind))
        found = roll_back(history, skip)
        near = sum(abs(p.batch - batch) <= 32 for p in history)
        assert found.action == ("retry" if near == 1 else "halt" if near > MAX_SKIPS + 1 else "skip")
        before = {n for n in range(500) if is_in_ranges(skip, n)}
        after = {n for n in range(500) if is_in_ranges(found.skip, n)}
        assert before <= after
        assert all(any(abs(n - p.batch) <= 16 for p in history) for n in after)
        assert str(batch) in found.reason
        skip = found.skip
