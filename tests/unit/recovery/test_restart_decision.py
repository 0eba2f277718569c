"""Each outcome of a decision with its text, and what a failure leaves of the budget."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from helpers.agent_worlds import failure

from ckpt.recovery.policy.failure import SOON_STEPS, Failure, describe_failure
from ckpt.recovery.policy.restart_decision import (
    LONG_RUN_SECONDS,
    MAX_REPEATED_FAILURES,
    Budget,
    Decision,
    decide,
    next_restore_step_limit,
)
from ckpt.training.heartbeat_records import BadLoss

EXIT = Failure("exit", (1,), "exited with status 1", 5, 4, 10.0, "a", restored=4)
BEFORE_FIRST_STEP = replace(EXIT, step=-1, committed=-1, restored=-1)


def decisions(failures: Iterable[Failure]) -> list[Decision]:
    """Return the decision after each failure of a run."""
    done: list[Failure] = []
    made: list[Decision] = []
    for one in failures:
        done.append(one)
        made.append(decide(done, made[-1].budget if made else Budget()))
    return made


@pytest.mark.parametrize(
    ("cause", "action", "rest"),
    [
        ("asked", "halt", ""),
        ("preempted", "restart", "; the others start again from the newest saved step"),
        ("straggler", "restart", "; all but a start again from the newest saved step"),
    ],
)
def test_a_planned_end_uses_up_no_restart(cause: str, action: str, rest: str) -> None:
    planned = replace(EXIT, cause=cause, detail="was requested to end")  # type: ignore[arg-type]
    budget = Budget(restarts_left=3, failures_without_progress=2, best_step=1, restored=0)
    assert decide([EXIT, planned], budget) == Decision(action, f"rank 1 was requested to end after step 5{rest}", budget=budget)  # type: ignore[arg-type]


def test_a_program_that_cannot_start_is_given_up_at_once() -> None:
    unusable = replace(BEFORE_FIRST_STEP, cause="unusable", detail="was not found")
    text = "rank 1 was not found before the first step; another start would not change that"
    assert (decide([unusable], Budget()).action, decide([unusable], Budget()).reason) == ("halt", text)
    with_log = decide([replace(unusable, log="logs/1")], Budget())
    assert (with_log.action, with_log.reason) == ("halt", f"{text}; look at logs/1")
    assert decide([replace(EXIT, step=0), unusable], Budget()).action == "restart", "it has started before"


@pytest.mark.parametrize(("log", "advice"), [("", "look at the log"), ("logs/1", "look at logs/1")])
def test_a_repeated_failure_is_given_up_with_the_log(log: str, advice: str) -> None:
    *_, before, last = decisions([replace(BEFORE_FIRST_STEP, log=log)] * 3)
    assert before.action == "restart"
    what = "rank 1 exited with status 1 before the first step"
    place = "3 times in a row, at the same place, with no newer step saved"
    assert (last.action, last.reason) == ("halt", f"{what}; {place}: {advice}")


def test_damaged_steps_are_not_replaced_by_a_new_beginning() -> None:
    """Attempts that failed before their first step count, also where an earlier attempt made steps."""
    damaged = replace(EXIT, cause="damaged", detail="found no whole step", step=-1, restored=-1)
    made = decisions([EXIT, damaged, damaged, damaged])
    assert [one.action for one in made] == ["restart", "restart", "restart", "halt"]
    assert "3 times in a row, as all saved steps are damaged; restore the files of one, or remove all" in made[-1].reason


def test_the_program_is_not_blamed_where_it_could_start_before() -> None:
    """The restarts are used up first: storage may be unavailable for a while."""
    made = decisions([replace(EXIT, step=0), *[replace(BEFORE_FIRST_STEP, committed=4)] * 10])
    assert [one.action for one in made] == ["restart"] * 10 + ["halt"]
    assert made[-1].reason.endswith("before the first step; 10 restarts without a newer step: look at the log")


def test_the_wait_doubles_up_to_half_a_minute() -> None:
    lost = replace(EXIT, cause="lost", ranks=(), detail="is silent")
    made = decisions([lost] * 11)
    assert [one.wait_seconds for one in made] == [0, 0, 0.5, 1, 2, 4, 8, 16, 30, 30, 0]
    assert {one.action for one in made[:-1]} == {"restart"}
    assert made[-1].action == "halt"
    assert made[0].reason == "host a is silent after step 5; all ranks start again from the newest saved step (4 or later)"


def test_the_text_says_from_where_the_ranks_start_again() -> None:
    first = decide([BEFORE_FIRST_STEP], Budget()).reason
    assert first.endswith("; all ranks start again from the newest saved step, if there is one")
    assert decide([replace(EXIT, committed=0)], Budget()).reason.endswith(
        "; all ranks start again from the newest saved step (0 or later)"
    )
    assert decide([replace(EXIT, step=0)], Budget()).reason.startswith("rank 1 exited with status 1 after step 0; ")
    assert decide([EXIT], Budget(), restore_step_limit=9).reason.endswith("; all ranks start again from a step before 9")


@pytest.mark.parametrize(
    ("steps", "blame"),
    [
        ((5, 6, 7), "it failed twice soon after it"),
        ((5, 5, 5), "it failed 3 times at the same place"),
        ((100, 100, 100), "it failed 3 times at the same place"),  # not soon after step 4
    ],
)
def test_a_step_after_which_the_program_fails_again_is_passed_over(steps: tuple[int, ...], blame: str) -> None:
    *_, last = decisions([replace(EXIT, step=step) for step in steps])
    source = f"all ranks start again from a step before 4, which may be the reason: {blame}"
    assert last.reason == f"rank 1 exited with status 1 after step {steps[-1]}; {source}"
    assert (last.restore_step_limit, last.wait_seconds) == (4, 0.5)


def test_a_place_that_fails_again_after_an_older_step_is_reached_from_a_still_older_one() -> None:
    same = [replace(EXIT, step=100)] * 3
    made = decisions([*same, replace(EXIT, step=100, restored=2)])
    assert [one.restore_step_limit for one in made] == [None, None, 4, 2]
    assert made[-1].reason.endswith("from a step before 2, which may be the reason: it failed 4 times at the same place")


def test_no_step_before_the_first_one_is_asked_for() -> None:
    *_, last = decisions([replace(EXIT, step=1, committed=0, restored=0)] * 4)
    assert (last.action, last.restore_step_limit) == ("halt", None)


def test_bad_losses_at_one_place_skip_more_batches_and_then_end_the_run() -> None:
    spike = replace(EXIT, cause="diverged", bad=BadLoss(40, "spike", 9.0, 2.5, 41), step=40)
    made: list[Decision] = []
    for count in range(1, 6):
        skip = (made[-1].skip or ()) if made else ()
        made.append(decide([spike] * count, made[-1].budget if made else Budget(), skip))
    assert [one.action for one in made] == ["restart", "restart", "restart", "restart", "halt"]
    assert [one.skip for one in made] == [(), ((40, 41),), ((37, 44),), ((25, 56),), ((25, 56),)]
    assert [one.restore_step_limit for one in made] == [None, 39, 36, 24, None]
    assert [one.loss_limit for one in made] == [2.5, 2.5, 2.5, 2.5, None]
    assert made[0].reason == "the loss of step 40 (batch 41) jumped to 9, above 2.5; the same batches are tried again"


def test_a_bad_loss_is_no_reason_for_one_more_restart() -> None:
    bad = replace(EXIT, cause="diverged", bad=BadLoss(5, "not finite", float("nan"), float("inf"), 5), detail="saw a bad loss")
    allowed = decide([bad], Budget(best_step=4, restarts_left=1))
    assert (allowed.action, allowed.budget.restarts_left) == ("restart", 0)
    assert allowed.reason == "the loss of step 5 (batch 5) was nan; the same batches are tried again"
    last = decide([bad], Budget(best_step=4, restarts_left=0))
    assert last.action == "halt"
    assert "10 restarts without a newer step" in last.reason


# --- the budget ------------------------------------------------------------------------------------------------


def test_a_newer_step_resets_the_budget() -> None:
    worn = Budget(max_restarts=7, restarts_left=2, failures_without_progress=4, best_step=8, restored=3)
    assert worn.after(replace(EXIT, committed=9)) == Budget(7, 6, 0, 9, restored=4)
    assert worn.after(replace(EXIT, committed=8)) == Budget(7, 1, 5, 8, restored=4)


@pytest.mark.parametrize(
    ("seconds", "step", "is_progress"),
    [(LONG_RUN_SECONDS, -1, True), (LONG_RUN_SECONDS - 0.1, -1, False), (LONG_RUN_SECONDS, 0, False)],
)
def test_a_long_attempt_without_reports_is_progress(seconds: float, step: int, is_progress: bool) -> None:
    worn = Budget(restarts_left=2, failures_without_progress=4, best_step=8)
    after = worn.after(replace(EXIT, step=step, ran_seconds=seconds))
    assert (after.restarts_left, after.failures_without_progress) == ((9, 0) if is_progress else (1, 5))
    assert after.best_step == 8


@pytest.mark.parametrize("ended", [replace(EXIT, uses_ckpt=True), replace(EXIT, cause="damaged")])
def test_a_program_that_fails_late_before_its_first_step_is_given_up(ended: Failure) -> None:
    """A long preparation of data or a long verification of damaged steps is not progress."""
    late = replace(ended, step=-1, committed=-1, restored=-1, ran_seconds=2 * LONG_RUN_SECONDS)
    failures, budget = list[Failure](), Budget()
    for _ in range(MAX_REPEATED_FAILURES):
        failures.append(late)
        decision = decide(failures, budget)
        budget = decision.budget
    assert decision.action == "halt"
    assert f"{MAX_REPEATED_FAILURES} times in a row" in decision.reason


def test_a_program_that_went_back_by_itself_makes_progress_once_for_a_restored_step() -> None:
    worn = Budget(restarts_left=2, failures_without_progress=4, best_step=8, line=1, restored=3)
    again = replace(EXIT, committed=5, line=2)
    assert worn.after(again) == Budget(10, 9, 0, 5, 2, 4), "steps of the new line count from now on"
    assert worn.after(replace(again, restored=3)) == Budget(10, 1, 5, 8, 2, 3), "it returned to the same step"
    assert worn.after(again, was_rolled_back=True) == Budget(10, 1, 5, 8, 2, 4), "ckpt-run sent it back"
    assert worn.after(replace(again, line=1)) == Budget(10, 1, 5, 8, 1, 4)
    assert worn.after(replace(again, line=0)).line == 1
    assert decide([again], worn).budget == worn.after(again)
    assert decide([again], worn, restore_step_limit=9).budget == worn.after(again, was_rolled_back=True)


# --- the limit of the restored step ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("committed", "step", "expected"),
    [
        (23, 24, 24),  # nothing of the new line reached the limit
        (24, 24 + SOON_STEPS, 24),  # it failed soon after a step that was computed again
        (24, 25 + SOON_STEPS, 25),  # it failed late: the steps that were computed again are trusted
        (29, 30, 24),
        (30, 31, None),  # newer than all earlier ones
    ],
)
def test_the_limit_of_the_restored_step(committed: int, step: int, expected: int | None) -> None:
    failed = replace(EXIT, committed=committed, step=step, restored=19)
    assert next_restore_step_limit(24, failed, Budget(best_step=29)) == expected
    assert next_restore_step_limit(None, failed, Budget(best_step=29)) is None


# --- the failure -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cause", "detail", "is_of_program"),
    [
        ("exit", "exited with status 1", True), ("hang", "made no step", True), ("signal", "was killed by SIGSEGV", True),
        ("signal", "was killed by SIGKILL", False), ("signal", "was killed by SIGTERM", False), ("lost", "is silent", False),
        ("out of memory", "was killed by SIGKILL", False), ("diverged", "saw a bad loss", False),
        ("stopped", "stands still", False),
    ],
)  # fmt: skip
def test_which_failures_are_the_programs_own(cause: str, detail: str, is_of_program: bool) -> None:
    assert replace(failure("a", cause=cause), detail=detail).is_of_program is is_of_program


@pytest.mark.parametrize(
    ("step", "is_soon_after_restore"), [(3, False), (4, True), (4 + SOON_STEPS, True), (5 + SOON_STEPS, False)]
)
def test_which_failures_come_soon_after_a_restore(step: int, is_soon_after_restore: bool) -> None:
    assert replace(EXIT, step=step, restored=4).is_soon_after_restore is is_soon_after_restore


def test_a_failure_is_described_with_its_ranks() -> None:
    assert describe_failure((), "is silent", "a") == "host a is silent"
    assert describe_failure((3,), "was killed by SIGKILL", "a") == "rank 3 was killed by SIGKILL"
    assert describe_failure((3,), "failed") == "rank 3 failed"
    assert describe_failure((3,), "were stopped") == "rank 3 was stopped"
    assert describe_failure((3,), "have no step") == "rank 3 has no step"
    assert describe_failure((3, 5), "was killed by SIGKILL") == "ranks 3, 5 were killed by SIGKILL"
    assert describe_failure((3, 5), "has no step") == "ranks 3, 5 have no step"
    assert describe_failure(range(8), "exited with status 1") == "ranks 0, 1, 2, 3, 4, 5, 6, 7 exited with status 1"
    assert describe_failure(range(9), "exited with status 1") == "ranks 0, 1, 2, 3, 4, 5, 6, 7 … exited with status 1"
