"""The decision after a failure: which hosts go on, which step is passed over, when a job is given up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from helpers.agent_worlds import agent, failure, world
from hypothesis import given
from hypothesis import strategies as st

from ckpt.recovery.policy.decide import Budget, Failure, choose_hosts, decide, next_restore_limit, suspected_hosts
from ckpt.recovery.run_log import entry_drafts
from ckpt.recovery.run_log.agent_reports import (
    HostFailure,
)
from ckpt.recovery.run_log.base import Draft, LogEntry
from ckpt.recovery.run_log.memory_placement import MemoryNamespace, is_newer
from ckpt.recovery.run_log.run_state import RunState


def test_a_host_where_it_fails_twice() -> None:
    """It is replaced where there is another, and is still good enough where there is none."""
    for spares, expected in ((1, ["a", "d", "c"]), (0, ["a", "b", "c"])):
        run = world(agents=3 + spares, patience_seconds=0.0)
        run.turn()
        for _ in range(2):
            run.agents["b"] = replace(run.agents["b"], wrong=HostFailure("exit", (2,), "exited with status 1"))
            for _ in range(3):
                run.clock += 31.0
                run.turn()
        assert [m["name"] for m in run.starts()[-1].facts["members"]] == expected
        if spares:
            assert "without b (suspected) with d instead" in run.starts()[-1].text


def test_suspects() -> None:
    assert suspected_hosts([failure("a"), failure("a")]) == {"a"}
    assert suspected_hosts([failure("a"), failure("b"), failure("a")]) == set()
    assert suspected_hosts([failure("a", 4), failure("a", 9)]) == set(), "it got on in between"
    assert suspected_hosts([failure("a"), failure("a", cause="asked")]) == set()


@pytest.mark.parametrize(("first", "second", "expected"), [(3, 3, {"a"}), (32, 32, {"a"}), (33, 3, set()), (3, 33, set())])
def test_a_host_that_fails_soon_where_each_step_is_saved(first: int, second: int, expected: set[str]) -> None:
    """So that each attempt has saved a newer one."""
    one = failure("a", first, step=first, restored=0)
    other = failure("a", first + second, step=first + second, restored=first)
    assert suspected_hosts([one, other]) == expected
    assert suspected_hosts([one, replace(other, host="b")]) == set()
    assert suspected_hosts([replace(one, cause="asked"), other]) == set()


@given(st.lists(st.sampled_from("abcdef"), unique=True), st.sets(st.sampled_from("abcdef")), st.integers(1, 4), st.booleans())
def test_choosing(ready: list[str], suspected: set[str], wanted: int, waited: bool) -> None:
    least = max(1, wanted - 1)
    before = list("abcd"[:wanted])
    choice = choose_hosts(before, ready, suspected, wanted, least, waited)
    if choice is None:
        assert len(ready) < (least if waited else wanted)
        return
    assert least <= len(choice.hosts) <= wanted
    assert len(set(choice.hosts)) == len(choice.hosts)
    assert set(choice.hosts) <= set(ready)
    good = [name for name in ready if name not in suspected]
    if len(good) >= wanted:
        assert not set(choice.hosts) & suspected
        for i, name in enumerate(before):
            if name in good:
                assert choice.hosts[i] == name, "who stays keeps its ranks"


def test_a_step_that_fails_twice_is_passed_over() -> None:
    """Then an older one is restored, once, before the job is given up."""
    failures: list[Failure] = []
    budget = RunState().budget
    told = []
    for _ in range(4):
        failures.append(failure("a", committed=9, step=9))
        decision = decide(failures, budget)
        budget = decision.budget
        told.append((decision.action, decision.before))
    assert told == [("restart", None), ("restart", None), ("restart", 9), ("halt", None)]


def test_steps_that_fail_soon_after_restore_are_passed_over_wherever_that_is() -> None:
    """One after the other, each after two failures; a step that is made anew counts from then on."""
    failures: list[Failure] = []
    budget = RunState().budget
    told = []
    for committed, step in [(9, 9), (9, 12), (9, 10), (4, 7), (4, 8), (2, 5), (9, 11)]:
        failures.append(failure("a", committed, step=step))
        decision = decide(failures, budget)
        budget = decision.budget
        told.append((decision.action, decision.before))
    assert [before for _, before in told] == [None, None, 9, None, 4, None, None]
    assert {action for action, _ in told} == {"restart"}


def written(course: RunState, *drafts: Draft) -> RunState:
    entries = [LogEntry(course.number + 1 + i, 0.0, d.attempt, d.kind, d.text, dict(d.facts)) for i, d in enumerate(drafts)]
    return course.apply_entries(entries)


def play(places: Iterable[int], every: int, spoiled: int, oldest: int = 0, broken: bool = False) -> list[int]:
    """The steps that a job goes on from, and the one with which it gets on; -2 where it is given up. It saves every so many
    steps; in its first attempt a step is spoiled, and from then on it fails at these places. oldest: no step before that is
    kept. broken: it fails whatever it goes on from."""
    course, restored, gone_on = RunState(), -1, []
    saved: set[int] = set()
    for place in places:
        if restored >= spoiled or not gone_on or broken:
            saved |= {n for n in range(restored + 1, place) if (n + 1) % every == 0}
            last = max((n for n in saved if restored <= n < place), default=-1)
            gone_on.append(restored)
            fail = failure("a", last, step=place, restored=restored)
            decision = decide([*course.failures, fail], course.budget, (), course.before)
            facts = {"action": decision.action, "before": decision.before}
            course = written(course, entry_drafts.draft_failure(0, fail), Draft(0, "decision", decision.reason, facts))
            if decision.action == "halt":
                return [*gone_on, -2]
            kept = [n for n in saved if n >= oldest]
            older = [n for n in kept if course.before is None or n < course.before]
            restored = max(older or kept, default=-1)
    return [*gone_on, restored]


@pytest.mark.parametrize("places", [(33,) * 12, (33, 31, 32, 33, 32, 31, 33, 32, 31, 33)])
def test_all_that_is_spoiled_is_passed_over(places: tuple[int, ...]) -> None:
    """What was made anew from a spoiled step is no better, though it was saved after the roll-back."""
    same = len(set(places)) == 1
    assert play(places, 5, 22) == ([-1, 29, 29, 24, 19] if same else [-1, 29, 29, 24, 24, 19])


def test_kills_are_no_fault_of_a_step() -> None:
    """Nor where they come at one place, as while a job restores."""
    course = replace(RunState(), budget=Budget(best_step=9))
    kill = replace(failure("a", 9, "signal", step=9), detail="was killed by SIGKILL")
    for _ in range(2):
        decision = decide([*course.failures, kill], course.budget, (), course.before)
        assert (decision.action, decision.before) == ("restart", None)
        facts = {"action": decision.action, "before": decision.before}
        course = written(course, entry_drafts.draft_failure(0, kill), Draft(0, "decision", decision.reason, facts))


def test_lost_hosts_use_up_the_restarts_and_no_more() -> None:
    """Though all of them come while the job restores."""
    budget, failures = RunState().budget, []
    for turn in range(11):
        failures.append(replace(failure("a", 9, "lost", step=9), ranks=()))
        decision = decide(failures, budget)
        budget = decision.budget
        assert decision.action == ("restart" if turn < 10 else "halt")
    assert "10 restarts without a newer step" in decision.reason


def test_what_lies_behind_is_not_restored_after_a_kill() -> None:
    """A roll-back went to 19, 24 was made anew: 24 is taken, and not the 29 that was there before."""
    course = replace(RunState(), before=24, budget=Budget(best_step=29))
    kill = replace(failure("a", 24, "signal", step=26, restored=19), detail="was killed by SIGKILL")
    assert next_restore_limit(24, kill, course.budget) == 25
    assert "from a step before 25" in decide([kill], course.budget, (), 24).reason
    after = written(course, entry_drafts.draft_failure(0, kill))
    assert after.before == 25
    assert next_restore_limit(after.before, kill, course.budget) == 25, "a coordinator that comes between decides the same"


def test_memory_that_a_roll_back_may_need_is_kept() -> None:
    """What was made anew up to the newest step of before does not take its place."""
    memory = (MemoryNamespace((("a", "x:1"),)), MemoryNamespace((("b", "x:2"),)))
    said = [agent("a", saved=29)]
    assert is_newer(memory, said)
    assert not is_newer(memory, said, 29)
    assert is_newer(memory, [agent("a", saved=30)], 29)


def test_a_program_that_fails_at_one_place_is_given_up() -> None:
    """After three steps, each older than the one before, or as soon as there is none."""
    assert play((33,) * 12, 5, 22, broken=True) == [-1, 29, 29, 24, 19, 14, -2]
    assert play((33,) * 12, 5, 22, oldest=24, broken=True) == [-1, 29, 29, 24, 29, -2]


def test_what_was_made_anew_is_trusted() -> None:
    """Where the job was ended from outside, but not where it failed again; what lies behind, once it got further than ever."""
    course = replace(RunState(), before=24, budget=Budget(best_step=29))
    for committed, cause, before in [
        (34, "exit", None), (29, "exit", 24), (24, "lost", 25), (19, "lost", 24), (29, "diverged", 30)
    ]:  # fmt: skip
        failed = failure("a", committed, cause, 33, restored=19)
        assert next_restore_limit(24, failed, course.budget) == before
        assert written(course, entry_drafts.draft_failure(0, failed)).before == before


@pytest.mark.parametrize(("cause", "steps"), [("lost", 1), ("stopped", 1), ("out of memory", 1), ("exit", 100), ("hang", 100)])
def test_a_step_is_not_blamed_for_what_comes_from_outside_or_late(cause: str, steps: int) -> None:
    failures: list[Failure] = []
    budget = RunState().budget
    for turn in range(5):
        failures.append(failure("a", committed=9, cause=cause, step=9 + steps + turn))
        decision = decide(failures, budget)
        budget = decision.budget
        assert (decision.action, decision.before) == ("restart", None)


@pytest.mark.parametrize(("name", "before"), [("SIGKILL", None), ("SIGSEGV", 9), ("SIGABRT", 9)])
def test_a_step_may_be_the_reason_of_a_crash(name: str, before: int | None) -> None:
    crashes = [replace(failure("a", 9, "signal", step), detail=f"was killed by {name}") for step in (10, 12, 11)]
    budget = RunState().budget
    for turn in range(3):
        decision = decide(crashes[: turn + 1], budget)
        budget = decision.budget
    assert decision.before == before
