"""The decisions of ckpt-run, without processes or clocks: worlds of agents that fail at random, driven to their end."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.recovery.coordinator.dry_run import predict_entries
from ckpt.recovery.coordinator.transitions import DecisionInput, draft_next_entries
from ckpt.recovery.policy.decide import Budget, Failure, choose_hosts, decide, next_restore_limit, suspected_hosts
from ckpt.recovery.run_log import entry_drafts
from ckpt.recovery.run_log.agent_reports import (
    LOST_SECONDS,
    REPORT_SECONDS,
    AgentLiveness,
    AgentReport,
    HostFailure,
    SlowestRank,
    decode_report,
)
from ckpt.recovery.run_log.base import Draft, LogEntry
from ckpt.recovery.run_log.memory_placement import MemoryNamespace, is_newer
from ckpt.recovery.run_log.run_spec import RunSpec
from ckpt.recovery.run_log.run_state import RunState

CAUSES = ["exit", "signal", "hang", "stopped"]


def agent(name: str, joined: float = 0.0, **more: object) -> AgentReport:
    return AgentReport(name, f"{name}-1", joined, 1, "/p", "/l", name, 1, **more)  # type: ignore[arg-type]


@dataclass
class World:
    """Agents that do what the log says, and a log that takes an entry only behind the last one."""

    spec: RunSpec
    agents: dict[str, AgentReport]
    log: list[LogEntry] = field(default_factory=list)
    clock: float = 0.0
    at: float = 0.0
    step: int = 0
    course: RunState = field(default_factory=RunState)

    def __post_init__(self) -> None:
        self.append(0, [entry_drafts.draft_run(0, "r", self.spec), Draft(0, "lead", "", {"name": min(self.agents)})])

    def append(self, after: int, drafts: Sequence[Draft]) -> bool:
        if after != len(self.log) or not drafts:
            return False
        self.log += [LogEntry(after + 1 + i, 0.0, d.attempt, d.kind, d.text, dict(d.facts)) for i, d in enumerate(drafts)]
        before = self.course.last
        self.course = self.course.apply_entries(self.log[after:])
        if self.course.last is not before:
            self.at = self.clock
        return True

    def view(self) -> DecisionInput:
        return DecisionInput(self.course, self.agents, self.agents, self.clock - self.at, self.clock - self.at)

    def follow(self) -> None:
        """Every agent does what the newest entries say."""
        course, last = self.course, self.course.last
        assert last is not None
        for name, said in self.agents.items():
            mine = any((m.name, m.incarnation) == (name, said.incarnation) for m in course.members)
            if last.kind in ("start", "stop") and mine:
                if said.attempt != course.attempt:
                    assert said.doing == "idle", "what was before has ended"
                    said = replace(said, attempt=course.attempt, doing="running", wrong=None, heard=True)
                if last.kind == "stop" and said.wrong is None:
                    said = replace(said, doing="over")
            elif said.doing != "idle":
                said = replace(said, doing="idle", wrong=None)
            self.agents[name] = replace(said, step=self.step, newest=self.step, committed=self.step // 5 * 5)

    def turn(self) -> None:
        self.append(len(self.log), draft_next_entries(self.view()))
        self.follow()

    def starts(self) -> list[LogEntry]:
        return [e for e in self.log if e.kind == "start"]


def world(hosts: int = 3, least: int = 3, agents: int = 3, **more: float) -> World:
    spec = RunSpec(("train",), 2, hosts, least, **more)  # type: ignore[arg-type]
    return World(spec, {name: agent(name, i) for i, name in enumerate("abcdefgh"[:agents])})


def test_who_is_waited_for_is_said_once() -> None:
    run = world(3, 2, 1)
    run.turn()
    assert [e.kind for e in run.log] == ["run", "lead"], "hosts that are started together need a moment"
    run.clock += 5
    run.turn()
    assert (run.log[-1].kind, run.log[-1].text.split(";")[0]) == ("note", "1 of 3 hosts are here")
    assert "on 2 more" in run.log[-1].text
    assert "gives up 600 s" in run.log[-1].text
    run.clock += 5
    run.turn()
    assert len(run.log) == 3, "once"
    run.agents["b"] = agent("b", 1)
    run.clock += 5
    run.turn()
    assert run.log[-1].text.startswith("2 of 3 hosts are here")
    assert "with these it goes on 600 s" in run.log[-1].text
    run.agents["c"] = agent("c", 2)
    run.turn()
    assert run.log[-1].kind == "start"
    del run.agents["c"]
    run.turn()
    assert [e.kind for e in run.log[-2:]] == ["failure", "decision"]
    for name in ("a", "b"):
        run.agents[name] = replace(run.agents[name], doing="idle")
    for _ in range(5):
        run.clock += 1
        run.turn()
    assert [e.kind for e in run.log[-2:]] == ["decision", "note"]
    assert "with these it goes on 30 s" in run.log[-1].text


def test_a_failure_is_not_put_down_to_a_host_while_another_may_be_lost() -> None:
    """Ranks that have lost their peers end with an error, at once; only a loss that is not finite has come by itself."""
    run = world()
    run.turn()
    wrong = {cause: replace(run.agents["a"], wrong=HostFailure(cause, (0,), "failed")) for cause in ("exit", "diverged")}
    view = replace(run.view(), silent_since_failure=frozenset("b"))
    exits = replace(view, maybe_living={**view.maybe_living, "a": wrong["exit"]})
    assert draft_next_entries(exits) == []
    assert [d.kind for d in draft_next_entries(replace(exits, silent_since_failure=frozenset("d")))] == [
        "failure",
        "decision",
    ], "no host of it"
    for perhaps, unheard, cause in (
        (exits.maybe_living, "", "exit"),
        ({**view.maybe_living, "a": wrong["diverged"]}, "b", "diverged"),
        ({name: exits.maybe_living[name] for name in "ac"}, "", "lost"),
    ):
        failure, decision = draft_next_entries(replace(view, maybe_living=perhaps, silent_since_failure=frozenset(unheard)))
        assert (failure.facts["cause"], decision.kind) == (cause, "decision")


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(0, 2), st.integers(0, 2))
def test_any_failures_come_to_an_end(seed: int, hosts: int, fewer: int, spares: int) -> None:
    """Attempts have numbers of their own and enough hosts that live, and once nothing fails any more it ends."""
    rng = random.Random(seed)
    least = max(1, hosts - fewer)
    run = world(hosts, least, hosts + spares, give_up_seconds=100.0)
    for _ in range(60):
        run.clock += rng.choice([0.1, 1.0, 40.0])
        run.step += rng.randrange(8)
        what, name = rng.random(), rng.choice(sorted(run.agents) or ["a"])
        if name in run.agents and what < 0.2 and run.agents[name].doing == "running":
            wrong = HostFailure(rng.choice(CAUSES), (0,), "failed")  # type: ignore[arg-type]
            run.agents[name] = replace(run.agents[name], wrong=wrong)
        elif name in run.agents and what < 0.3:
            del run.agents[name]
        elif what < 0.4:
            run.agents[name] = replace(agent(name, run.clock), incarnation=f"{name}-{run.clock}")
        before = len(run.log)
        run.turn()
        for entry in run.log[before:]:
            if entry.kind == "start":
                names = [m["name"] for m in entry.facts["members"]]
                assert least <= len(set(names)) == len(names) <= hosts
                assert set(names) <= set(run.agents)
                assert [m["first"] for m in entry.facts["members"]] == [2 * i for i in range(len(names))]
    for _ in range(400):
        run.clock += 5.0
        run.step += 5
        run.turn()
        if run.course.has_ended:
            break
        if run.course.last is not None and run.course.last.kind == "start" and rng.random() < 0.3:
            for name, said in run.agents.items():
                if said.doing == "running" and said.wrong is None:
                    run.agents[name] = replace(said, doing="over")
    assert run.course.has_ended
    assert run.log[-1].kind == "end"
    attempts = [e.attempt for e in run.starts()]
    assert attempts == list(range(len(attempts)))
    failures = [e for e in run.log if e.kind == "failure"]
    assert [e.attempt for e in failures] == [e.attempt for e in run.log if e.kind == "decision"]
    assert all(e.text for e in run.log if e.kind in ("decision", "failure", "end"))


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_two_that_lead_write_one_log(seed: int) -> None:
    """One of them decides by what was; its entries come too late, and are not taken."""
    rng = random.Random(seed)
    run = world()
    stale = run.view()
    for _ in range(40):
        run.clock += 1.0
        run.step += 3
        if rng.random() < 0.3:
            stale = run.view()
        if rng.random() < 0.2 and run.agents["b"].doing == "running":
            run.agents["b"] = replace(run.agents["b"], wrong=HostFailure("exit", (2,), "failed"))
        drafts = draft_next_entries(stale) if stale.run_state.last is not None else []
        took = run.append(stale.run_state.number, drafts)
        assert not (took and drafts and stale.run_state.number != run.course.number - len(drafts))
        run.turn()
    attempts = [e.attempt for e in run.starts()]
    assert attempts == list(range(len(attempts)))


def test_a_failure_without_a_decision() -> None:
    """Who wrote it died. The next one decides, by the same."""
    one, other = world(), world()
    for run in (one, other):
        run.turn()
        run.agents["b"] = replace(run.agents["b"], wrong=HostFailure("signal", (3,), "was killed by SIGKILL"))
    one.turn()
    drafts = draft_next_entries(other.view())
    other.append(len(other.log), drafts[:1])
    assert other.log[-1].kind == "failure"
    other.follow()
    other.turn()
    assert [(e.kind, e.text) for e in other.log] == [(e.kind, e.text) for e in one.log]


def test_the_cause_of_what_fails_together() -> None:
    run = world()
    run.turn()
    run.agents["a"] = replace(run.agents["a"], wrong=HostFailure("exit", (0,), "exited: connection reset by peer"))
    run.agents["c"] = replace(run.agents["c"], wrong=HostFailure("signal", (5,), "was killed by SIGSEGV"))
    failure = draft_next_entries(run.view())[0]
    assert (failure.facts["cause"], failure.facts["host"], failure.text) == ("signal", "c", "was killed by SIGSEGV")


def test_where_it_failed_is_what_that_host_says() -> None:
    """The others said where they are a moment before. A step that is committed is done on all of them."""
    run = world()
    run.turn()
    run.agents["a"] = replace(run.agents["a"], step=41, committed=49)
    run.agents["b"] = replace(run.agents["b"], step=55, wrong=HostFailure("signal", (3,), "was killed by SIGKILL"))
    told = draft_next_entries(run.view())
    assert (told[0].facts["step"], told[0].facts["committed"]) == (55, 49)
    assert told[1].text.startswith("rank 3 was killed by SIGKILL after step 55; all ranks start again from step 49")
    del run.agents["b"]
    assert draft_next_entries(run.view())[0].facts["step"] == 49


def test_who_goes_on_from_an_older_step_than_was_saved_says_so() -> None:
    """Once, and not where it was decided."""
    run = world()
    run.turn()
    run.step = 29
    run.agents["b"] = replace(run.agents["b"], wrong=HostFailure("signal", (3,), "was killed by SIGKILL"))
    run.follow()
    for _ in range(3):
        run.turn()
    assert [len(run.starts()), run.course.failures[-1].committed] == [2, 25]
    assert draft_next_entries(run.view()) == []
    run.agents["a"] = replace(run.agents["a"], restored=25)
    assert draft_next_entries(run.view()) == []
    run.agents["a"] = replace(run.agents["a"], restored=20)
    told = draft_next_entries(run.view())
    assert [(draft.kind, draft.facts) for draft in told] == [("note", {"restored": 20})]
    assert told[0].text.startswith("the ranks go on from step 20, as no later one is whole: 25 was saved")
    before = replace(run.view(), run_state=replace(run.course, before=25))
    assert draft_next_entries(before) == []
    run.append(len(run.log), told)
    assert draft_next_entries(run.view()) == []


@pytest.mark.parametrize("command", ["train", "another"])
def test_so_does_the_next_run_of_the_same_job(command: str) -> None:
    """What was saved may have been spoiled in between; of another job nothing is known."""
    run = world()
    run.turn()
    ended = [entry_drafts.draft_failure(0, failure("a", 25, "asked")), Draft(0, "end", "as drain asked", {"status": 0})]
    again = [entry_drafts.draft_run(1, "s", replace(run.spec, command=(command,))), Draft(1, "lead", "", {"name": "a"})]
    run.append(len(run.log), [*ended, *again])
    run.follow()
    for _ in range(2):
        run.turn()
    assert (run.course.attempt, run.course.last and run.course.last.kind) == (1, "start")
    run.agents["a"] = replace(run.agents["a"], restored=20)
    told = [draft.text for draft in draft_next_entries(run.view())]
    assert [text[:34] for text in told] == (["the ranks go on from step 20, as n"] if command == "train" else [])


def test_who_hangs_is_who_is_behind() -> None:
    """Of all hosts, not of the one that noticed first."""
    run = world()
    run.turn()
    run.agents["a"] = replace(run.agents["a"], wrong=HostFailure("hang", (1,), "…"), slowest=SlowestRank(1, 8, 31.0, "step"))
    run.agents["b"] = replace(run.agents["b"], slowest=SlowestRank(2, 7, 30.5, "step"))
    run.agents["c"] = replace(run.agents["c"], slowest=SlowestRank(5, 8, 30.0, "step"))
    failure = draft_next_entries(run.view())[0]
    assert (tuple(failure.facts["ranks"]), failure.facts["host"]) == ((2,), "b")
    assert "30.5 s in phase 'step'" in failure.text


def test_waiting_for_a_host() -> None:
    run = world(least=2, patience_seconds=30.0, give_up_seconds=100.0)
    run.turn()
    del run.agents["c"]
    run.turn()
    assert run.log[-1].kind == "decision"
    run.clock += 29.0
    run.turn()
    assert len(run.starts()) == 1
    run.clock += 2.0
    run.turn()
    assert [m["name"] for m in run.starts()[-1].facts["members"]] == ["a", "b"]
    del run.agents["b"]
    run.turn()
    run.clock += 99.0
    run.turn()
    assert len(run.starts()) == 2
    run.clock += 2.0
    run.turn()
    assert run.log[-1].text == "1 of 2 hosts came within 100 s; start ckpt-run on more, or lower --min"
    assert run.log[-1].facts["status"] == 1


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


def failure(host: str, committed: int = 4, cause: str = "exit", step: int = 5, restored: int | None = None) -> Failure:
    """Soon after it went on from what is committed, where nothing else is said."""
    went_on = committed if restored is None else restored
    return Failure(cause, (1,), "exited", step, committed, 10.0, host, restored=went_on)  # type: ignore[arg-type]


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


def test_who_lives() -> None:
    """By the clock of who listens: what was said before is no sign of life, and its own absence is nobody's death."""
    roll = AgentLiveness()
    roll.observe({"a": agent("a", beat=1), "b": agent("b", beat=7)}, 100.0)
    assert set(roll.maybe_living()) == {"a", "b"}
    assert roll.living() == {}
    for i in range(1, 8):
        roll.observe({"a": agent("a", beat=1 + i), "b": agent("b", beat=7)}, 100.0 + i * REPORT_SECONDS)
    assert set(roll.living()) == {"a"}
    assert set(roll.maybe_living()) == {"a"}, f"b is silent for more than {LOST_SECONDS} s"
    roll.observe({"a": agent("a", beat=8), "b": agent("b", beat=8)}, 160.0)
    assert set(roll.living()) == {"a", "b"}, "for a minute it was this one that heard nothing"


def test_a_report_is_read_as_it_was_written() -> None:
    said = agent("a", wrong=HostFailure("hang", (1, 2), "x", 3.0), slowest=SlowestRank(1, 2, 3.0, "save"), leaving=15)
    assert decode_report(said.to_facts() | {"of a later version": 1}) == said


@pytest.mark.parametrize(("lost", "killed", "kinds"), [
    ((), 0, ["failure", "decision", "start"]), (("b",), None, ["failure", "decision", "start"]),
    (("b", "c"), None, ["failure", "decision", "end"]),
])  # fmt: skip
def test_suppose(lost: tuple[str, ...], killed: int | None, kinds: list[str]) -> None:
    run = world(least=2)
    run.turn()
    before = list(run.log)
    drafts = predict_entries(run.log, run.agents, lost, killed)
    assert [draft.kind for draft in drafts] == kinds
    assert run.log == before
