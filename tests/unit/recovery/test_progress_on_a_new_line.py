"""A program that restores an older step by name opens a new training line, on which lower numbers are newer."""

from __future__ import annotations

from ckpt.recovery.policy.failure import Failure
from ckpt.recovery.policy.hosts_of_next_attempt import suspected_hosts
from ckpt.recovery.policy.restart_decision import Budget, decide
from ckpt.recovery.run_log.memory_placement import MemoryNamespace, NewestStep

BEFORE, AFTER = MemoryNamespace((("a", "a:1"),)), MemoryNamespace((("a", "a:2"),))


def failure(step: int, committed: int, line: int = 0, restored: int = -1, durable: int = -1, host: str = "") -> Failure:
    return Failure("exit", (0,), "exited", step, committed, 10.0, host, restored=restored, durable=durable, line=line)


def test_a_step_on_a_new_line_fills_the_budget() -> None:
    budget = Budget(5, 2, failures_without_progress=2, best_step=130, restored=130)
    now = budget.after(failure(115, 114, line=1, restored=110))
    assert (now.restarts_left, now.failures_without_progress, now.best_step, now.line) == (4, 0, 114, 1)
    assert now.after(failure(121, 120, line=1, restored=114)).failures_without_progress == 0


def test_a_step_number_fills_the_budget_once() -> None:
    budget = Budget(5, 5, best_step=130)
    failures = []
    for attempt in range(4):
        failures.append(failure(115, 114, line=1 + attempt, restored=110))
        decision = decide(failures, budget)
        budget = decision.budget
        assert budget.failures_without_progress == attempt
    assert decision.action == "halt"


def test_a_job_that_ckpt_run_rolled_back_must_get_further_than_ever() -> None:
    budget = Budget(5, 4, failures_without_progress=2, best_step=130, restored=130)
    now = decide([failure(115, 114, line=1, restored=110)], budget, restore_step_limit=111).budget
    assert (now.restarts_left, now.failures_without_progress, now.best_step) == (3, 3, 130)


def test_the_memory_with_a_newer_line_is_awaited() -> None:
    found = NewestStep(130, 120, BEFORE, 10, 1.0).after(failure(115, 114, line=1, restored=110), AFTER, False)
    assert (found.step, found.durable, found.memory, found.at_stake) == (114, 110, AFTER, 4)


def test_an_older_step_on_the_same_line_is_not_newer() -> None:
    """The job continued from a readable step: the unreadable newer one may be readable again later."""
    found = NewestStep(14, 9, BEFORE, 5, 1.0).after(failure(12, 11, restored=9), AFTER, False)
    assert (found.step, found.memory, found.at_stake) == (14, BEFORE, 5)


def test_a_host_is_not_suspected_if_a_newer_step_lies_between() -> None:
    one, other = failure(180, 130, restored=50, host="a"), failure(180, 114, line=1, restored=110, host="a")
    assert suspected_hosts([one, other]) == frozenset()
