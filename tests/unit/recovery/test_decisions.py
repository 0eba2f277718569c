"""The decisions after the failures of a run: which step is skipped, when a job is given up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from helpers.agent_worlds import agent, failure, world

from ckpt.recovery.policy.failure import Failure
from ckpt.recovery.policy.restart_decision import Budget, decide, next_restore_step_limit
from ckpt.recovery.run_log import entry_drafts
from ckpt.recovery.run_log.agent_reports import (
    HostFailure,
)
from ckpt.recovery.run_log.base import Draft, LogEntry
from ckpt.recovery.run_log.memory_placement import MemoryNamespace, is_newer
from ckpt.recovery.run_log.run_state import RunState


def test_a_host_with_two_failures_is_replaced_by_a_spare() -> None:
    """Without a spare it is used again."""
    for spares, expected in ((1, ["a", "d", "c"]), (0, ["a", "b", "c"])):
        run = world(agents=3 + spares, patience_seconds=0.0)
        run.advance()
        for _ in range(2):
            run.agents["b"] = replace(run.agents["b"], wrong=HostFailure("exit", (2,), "exited with status 1"))
            for _ in range(3):
                run.clock += 31.0
                run.advance()
        assert [m["name"] for m in run.starts()[-1].facts["members"]] == expected
        if spares:
            assert "without b (suspected) with d instead" in run.starts()[-1].text


def test_a_step_that_fails_twice_is_passed_over() -> None:
    """Then an older step is restored, once, before the job is given up."""
    failures: list[Failure] = []
    budget = RunState().budget
    decisions = []
    for _ in range(4):
        failures.append(failure("a", committed=9, step=9))
        decision = decide(failures, budget)
        budget = decision.budget
        decisions.append((decision.action, decision.restore_step_limit))
    assert decisions == [("restart", None), ("restart", None), ("restart", 9), ("halt", None)]


def test_steps_that_fail_soon_after_a_restore_are_passed_over() -> None:
    """One after the other, each after two failures at any step; a step that is computed again counts from then on."""
    failures: list[Failure] = []
    budget = RunState().budget
    decisions = []
    for committed, step in [(9, 9), (9, 12), (9, 10), (4, 7), (4, 8), (2, 5), (9, 11)]:
        failures.append(failure("a", committed, step=step))
        decision = decide(failures, budget)
        budget = decision.budget
        decisions.append((decision.action, decision.restore_step_limit))
    assert [before for _, before in decisions] == [None, None, 9, None, 4, None, None]
    assert {action for action, _ in decisions} == {"restart"}


def written(run_state: RunState, *drafts: Draft) -> RunState:
    """Return the state of the run after these drafts are appended to its log."""
    entries = [LogEntry(run_state.number + 1 + i, 0.0, d.attempt, d.kind, d.text, dict(d.facts)) for i, d in enumerate(drafts)]
    return run_state.apply_entries(entries)


def test_the_next_run_of_a_job_keeps_the_decision_of_the_last_one() -> None:
    """Steps from before the roll-back stay untrusted until a newer one than all of them is committed."""
    run = world(hosts=1, least=1, agents=1)
    decision = Draft(0, "decision", "", {"action": "restart", "before": 16, "skip": [[16, 17]], "limit": 2.5})
    killed = written(run.run_state, entry_drafts.draft_failure(0, failure("a", 20)), decision)
    again = written(killed, entry_drafts.draft_run(1, "s", run.spec))
    assert (again.restore_step_limit, again.skip, again.loss_limit) == (16, ((16, 17),), 2.5)
    drafts = [entry_drafts.draft_failure(1, failure("a", committed, "lost")) for committed in (15, 18, 21)]
    assert [written(again, draft).restore_step_limit for draft in drafts] == [16, 19, None]
    given_up = written(killed, entry_drafts.draft_end(0, "", 1, final=True), entry_drafts.draft_run(1, "s", run.spec))
    other = written(killed, entry_drafts.draft_run(1, "s", replace(run.spec, command=("other",))))
    assert all((state.restore_step_limit, state.skip, state.loss_limit) == (None, (), None) for state in (given_up, other))


def restore_points(failing_steps: Iterable[int], every: int, spoiled: int, oldest: int = 0, broken: bool = False) -> list[int]:
    """Return the steps from which a job continues, and last the one with which it succeeds, or -2 where it is given up.

    The job saves every `every` steps. In its first attempt step `spoiled` is spoiled, and from then on the job fails at the
    steps `places`. No step before `oldest` is kept. With `broken`, the job fails whichever step it restores.
    """
    run_state, restored, continued_from = RunState(), -1, []
    saved: set[int] = set()
    for failing_step in failing_steps:
        if restored >= spoiled or not continued_from or broken:
            saved |= {n for n in range(restored + 1, failing_step) if (n + 1) % every == 0}
            last = max((n for n in saved if restored <= n < failing_step), default=-1)
            continued_from.append(restored)
            fail = failure("a", last, step=failing_step, restored=restored)
            decision = decide([*run_state.failures, fail], run_state.budget, (), run_state.restore_step_limit)
            facts = {"action": decision.action, "before": decision.restore_step_limit}
            run_state = written(run_state, entry_drafts.draft_failure(0, fail), Draft(0, "decision", decision.reason, facts))
            if decision.action == "halt":
                return [*continued_from, -2]
            kept = [n for n in saved if n >= oldest]
            older = [n for n in kept if run_state.restore_step_limit is None or n < run_state.restore_step_limit]
            restored = max(older or kept, default=-1)
    return [*continued_from, restored]


@pytest.mark.parametrize("failing_steps", [(33,) * 12, (33, 31, 32, 33, 32, 31, 33, 32, 31, 33)])
def test_all_spoiled_steps_are_passed_over(failing_steps: tuple[int, ...]) -> None:
    """Steps computed from a spoiled step are not better, though they were saved after the roll-back."""
    same = len(set(failing_steps)) == 1
    assert restore_points(failing_steps, 5, 22) == ([-1, 29, 29, 24, 19] if same else [-1, 29, 29, 24, 24, 19])


def test_kills_are_not_blamed_on_a_step() -> None:
    """This holds also if they occur at one step, for example while a job restores."""
    run_state = replace(RunState(), budget=Budget(best_step=9))
    kill = replace(failure("a", 9, "signal", step=9), detail="was killed by SIGKILL")
    for _ in range(2):
        decision = decide([*run_state.failures, kill], run_state.budget, (), run_state.restore_step_limit)
        assert (decision.action, decision.restore_step_limit) == ("restart", None)
        facts = {"action": decision.action, "before": decision.restore_step_limit}
        run_state = written(run_state, entry_drafts.draft_failure(0, kill), Draft(0, "decision", decision.reason, facts))


def test_lost_hosts_use_up_the_restarts_and_pass_over_no_step() -> None:
    """This holds though all of them are lost while the job restores."""
    budget, failures = RunState().budget, []
    for attempt in range(11):
        failures.append(replace(failure("a", 9, "lost", step=9), ranks=()))
        decision = decide(failures, budget)
        budget = decision.budget
        assert decision.action == ("restart" if attempt < 10 else "halt")
    assert "10 restarts without a newer step" in decision.reason


def test_a_step_from_before_a_roll_back_is_not_restored_after_a_kill() -> None:
    """A roll-back went to 19, and 24 was computed again: 24 is restored, and not the 29 from before the roll-back."""
    run_state = replace(RunState(), restore_step_limit=24, budget=Budget(best_step=29))
    kill = replace(failure("a", 24, "signal", step=26, restored=19), detail="was killed by SIGKILL")
    assert next_restore_step_limit(24, kill, run_state.budget) == 25
    assert "from a step before 25" in decide([kill], run_state.budget, (), 24).reason
    after = written(run_state, entry_drafts.draft_failure(0, kill))
    assert after.restore_step_limit == 25
    again = next_restore_step_limit(after.restore_step_limit, kill, run_state.budget)
    assert again == 25, "another coordinator decides the same"


def test_memory_that_a_roll_back_may_need_is_kept() -> None:
    """Steps computed again, up to the newest one before the roll-back, do not replace it."""
    memory = (MemoryNamespace((("a", "x:1"),)), MemoryNamespace((("b", "x:2"),)))
    reports = [agent("a", saved=29)]
    assert is_newer(memory, reports)
    assert not is_newer(memory, reports, 29)
    assert is_newer(memory, [agent("a", saved=30)], 29)


def test_one_copy_of_a_newer_step_does_not_replace_two_of_an_older_one() -> None:
    """An attempt on one host has one copy. If this host is lost, the older step is the newest one."""
    one, two = MemoryNamespace((("a", "x:1"),)), MemoryNamespace((("a", "x:2"), ("b", "y:1")))
    reports = [agent("a", saved=30)]
    assert not is_newer((one, two), reports, 29)
    assert not is_newer((one, one, two), reports, 29)
    assert is_newer((two, two), reports, 29)
    assert is_newer((one, one), reports, 29)


def test_a_program_that_fails_at_one_step_is_given_up() -> None:
    """It is given up after three restored steps, each older than the one before, or as soon as no older one exists."""
    assert restore_points((33,) * 12, 5, 22, broken=True) == [-1, 29, 29, 24, 19, 14, -2]
    assert restore_points((33,) * 12, 5, 22, oldest=24, broken=True) == [-1, 29, 29, 24, 29, -2]


def test_steps_computed_again_are_trusted_unless_the_job_failed_again() -> None:
    """They are, where the job was ended from outside. Steps from before count again once the job got further than ever."""
    run_state = replace(RunState(), restore_step_limit=24, budget=Budget(best_step=29))
    for committed, cause, before in [
        (34, "exit", None), (29, "exit", 24), (24, "lost", 25), (19, "lost", 24), (29, "diverged", 30)
    ]:  # fmt: skip
        failed = failure("a", committed, cause, 33, restored=19)
        assert next_restore_step_limit(24, failed, run_state.budget) == before
        assert written(run_state, entry_drafts.draft_failure(0, failed)).restore_step_limit == before


@pytest.mark.parametrize(("cause", "steps"), [("lost", 1), ("stopped", 1), ("out of memory", 1), ("exit", 100), ("hang", 100)])
def test_a_step_is_not_blamed_for_late_failures_or_those_from_outside(cause: str, steps: int) -> None:
    failures: list[Failure] = []
    budget = RunState().budget
    for attempt in range(5):
        failures.append(failure("a", committed=9, cause=cause, step=9 + steps + attempt))
        decision = decide(failures, budget)
        budget = decision.budget
        assert (decision.action, decision.restore_step_limit) == ("restart", None)


@pytest.mark.parametrize(("name", "before"), [("SIGKILL", None), ("SIGSEGV", 9), ("SIGABRT", 9)])
def test_a_step_may_be_blamed_for_a_crash(name: str, before: int | None) -> None:
    crashes = [replace(failure("a", 9, "signal", step), detail=f"was killed by {name}") for step in (10, 12, 11)]
    budget = RunState().budget
    for attempt in range(3):
        decision = decide(crashes[: attempt + 1], budget)
        budget = decision.budget
    assert decision.restore_step_limit == before
