"""Progress fills the budget of restarts; without progress a job is given up."""

from __future__ import annotations

from ckpt.recovery.policy.failure import Failure
from ckpt.recovery.policy.restart_decision import MAX_REPEATED_FAILURES, Budget, decide


def failure(step: int = 5, committed: int = 4, cause: str = "signal") -> Failure:
    return Failure(cause, (1,), "was killed by SIGKILL", step, committed, 10.0, restored=committed)  # type: ignore[arg-type]


def test_progress_fills_the_budget() -> None:
    budget, failures = Budget(3, 3), []
    for step in range(20):
        failures.append(failure(10 * step + 5, 10 * step))
        decision = decide(failures, budget)
        assert decision.action == "restart"
        assert decision.wait_seconds == 0
        budget = decision.budget


def test_a_job_without_progress_is_given_up_after_its_restarts() -> None:
    budget, failures = Budget(5, 5), []
    for attempt in range(6):
        failures.append(failure(step=attempt, committed=-1))  # each at another step
        decision = decide(failures, budget)
        budget = decision.budget
        if decision.action == "halt":
            break
    assert attempt == 5
    assert "5 restarts without a newer step" in decision.reason
    waits = [decide(failures[: i + 1], Budget(5, 5 - i, i)).wait_seconds for i in range(4)]
    assert waits == sorted(waits)


def test_the_wait_is_limited_after_any_number_of_failures() -> None:
    """Storage may be away for a night."""
    lost = failure(committed=-1, cause="lost")
    waits = [decide([lost], Budget(10**6, 10**6, failed)).wait_seconds for failed in (0, 1, 2, 6, 7, 1024, 1025, 10**5)]
    assert waits == [0.0, 0.5, 1.0, 16.0, 30.0, 30.0, 30.0, 30.0]


def test_repeated_failures_at_one_step_give_the_job_up() -> None:
    budget, failures = Budget(10, 10, best_step=4), []
    for attempt in range(MAX_REPEATED_FAILURES):
        failures.append(failure())
        decision = decide(failures, budget)
        budget = decision.budget
        assert (decision.action == "halt") == (attempt == MAX_REPEATED_FAILURES - 1)
