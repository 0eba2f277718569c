"""The transitions of a run, without processes or clocks: agents fail at random, and the run is driven to its end."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from helpers.agent_worlds import CAUSES, agent, failure, world
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.recovery.coordinator.dry_run import predict_entries
from ckpt.recovery.coordinator.transitions import draft_next_entries
from ckpt.recovery.run_log import entry_drafts
from ckpt.recovery.run_log.agent_reports import (
    LOST_SECONDS,
    REPORT_SECONDS,
    AgentLiveness,
    HostFailure,
    SlowestRank,
    decode_report,
)
from ckpt.recovery.run_log.base import Draft


def test_missing_hosts_are_reported_once() -> None:
    run = world(3, 2, 1)
    run.advance()
    assert [e.kind for e in run.log] == ["run", "lead"], "hosts that start at the same time need a moment"
    run.clock += 5
    run.advance()
    assert (run.log[-1].kind, run.log[-1].text.split(";")[0]) == ("note", "1 of 3 hosts have joined")
    assert "on 2 more" in run.log[-1].text
    assert "gives up 600 s" in run.log[-1].text
    run.clock += 5
    run.advance()
    assert len(run.log) == 3, "once"
    run.agents["b"] = agent("b", 1)
    run.clock += 5
    run.advance()
    assert run.log[-1].text.startswith("2 of 3 hosts have joined")
    assert "the run continues with these 600 s" in run.log[-1].text
    run.agents["c"] = agent("c", 2)
    run.advance()
    assert run.log[-1].kind == "start"
    del run.agents["c"]
    run.advance()
    assert [e.kind for e in run.log[-2:]] == ["failure", "decision"]
    for name in ("a", "b"):
        run.agents[name] = replace(run.agents[name], doing="idle")
    for _ in range(5):
        run.clock += 1
        run.advance()
    assert [e.kind for e in run.log[-2:]] == ["decision", "note"]
    assert "the run continues with these 30 s" in run.log[-1].text


def test_a_host_is_not_blamed_while_another_may_be_lost() -> None:
    """Ranks that have lost a peer end with an error at once; only a loss that is not finite has no such cause."""
    run = world()
    run.advance()
    wrong = {cause: replace(run.agents["a"], wrong=HostFailure(cause, (0,), "failed")) for cause in ("exit", "diverged")}
    view = replace(run.view(), silent_since_failure=frozenset("b"))
    exits = replace(view, maybe_living={**view.maybe_living, "a": wrong["exit"]})
    assert draft_next_entries(exits) == []
    assert [d.kind for d in draft_next_entries(replace(exits, silent_since_failure=frozenset("d")))] == [
        "failure",
        "decision",
    ], "d is not a host of the job"
    for living, silent, cause in (
        (exits.maybe_living, "", "exit"),
        ({**view.maybe_living, "a": wrong["diverged"]}, "b", "diverged"),
        ({name: exits.maybe_living[name] for name in "ac"}, "", "lost"),
    ):
        failure, decision = draft_next_entries(replace(view, maybe_living=living, silent_since_failure=frozenset(silent)))
        assert (failure.facts["cause"], decision.kind) == (cause, "decision")


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(0, 2), st.integers(0, 2))
def test_a_run_with_any_failures_ends(seed: int, hosts: int, fewer: int, spares: int) -> None:
    """Attempts have numbers of their own and enough living hosts, and the run ends once nothing fails any more."""
    rng = random.Random(seed)
    least = max(1, hosts - fewer)
    run = world(hosts, least, hosts + spares, give_up_seconds=100.0)
    for _ in range(60):
        run.clock += rng.choice([0.1, 1.0, 40.0])
        run.step += rng.randrange(8)
        chance, name = rng.random(), rng.choice(sorted(run.agents) or ["a"])
        if name in run.agents and chance < 0.2 and run.agents[name].doing == "running":
            wrong = HostFailure(rng.choice(CAUSES), (0,), "failed")  # type: ignore[arg-type]
            run.agents[name] = replace(run.agents[name], wrong=wrong)
        elif name in run.agents and chance < 0.3:
            del run.agents[name]
        elif chance < 0.4:
            run.agents[name] = replace(agent(name, run.clock), incarnation=f"{name}-{run.clock}")
        before = len(run.log)
        run.advance()
        for entry in run.log[before:]:
            if entry.kind == "start":
                names = [m["name"] for m in entry.facts["members"]]
                assert least <= len(set(names)) == len(names) <= hosts
                assert set(names) <= set(run.agents)
                assert [m["first"] for m in entry.facts["members"]] == [2 * i for i in range(len(names))]
    for _ in range(400):
        run.clock += 5.0
        run.step += 5
        run.advance()
        if run.run_state.has_ended:
            break
        if run.run_state.last is not None and run.run_state.last.kind == "start" and rng.random() < 0.3:
            for name, report in run.agents.items():
                if report.doing == "running" and report.wrong is None:
                    run.agents[name] = replace(report, doing="over")
    assert run.run_state.has_ended
    assert run.log[-1].kind == "end"
    attempts = [e.attempt for e in run.starts()]
    assert attempts == list(range(len(attempts)))
    failures = [e for e in run.log if e.kind == "failure"]
    assert [e.attempt for e in failures] == [e.attempt for e in run.log if e.kind == "decision"]
    assert all(e.text for e in run.log if e.kind in ("decision", "failure", "end"))


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_two_leaders_write_one_log(seed: int) -> None:
    """One of them decides from an old state; its entries are too late, and are refused."""
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
        assert not (took and drafts and stale.run_state.number != run.run_state.number - len(drafts))
        run.advance()
    attempts = [e.attempt for e in run.starts()]
    assert attempts == list(range(len(attempts)))


def test_the_next_leader_decides_a_failure_without_a_decision() -> None:
    """The leader that wrote the failure died. The next one makes the same decision."""
    one, other = world(), world()
    for run in (one, other):
        run.advance()
        run.agents["b"] = replace(run.agents["b"], wrong=HostFailure("signal", (3,), "was killed by SIGKILL"))
    one.advance()
    drafts = draft_next_entries(other.view())
    other.append(len(other.log), drafts[:1])
    assert other.log[-1].kind == "failure"
    other.follow()
    other.advance()
    assert [(e.kind, e.text) for e in other.log] == [(e.kind, e.text) for e in one.log]


def test_of_simultaneous_failures_a_signal_is_the_cause() -> None:
    run = world()
    run.advance()
    run.agents["a"] = replace(run.agents["a"], wrong=HostFailure("exit", (0,), "exited: connection reset by peer"))
    run.agents["c"] = replace(run.agents["c"], wrong=HostFailure("signal", (5,), "was killed by SIGSEGV"))
    failure = draft_next_entries(run.view())[0]
    assert (failure.facts["cause"], failure.facts["host"], failure.text) == ("signal", "c", "was killed by SIGSEGV")


def test_the_step_of_a_failure_is_that_of_the_failed_host() -> None:
    """The other hosts reported their steps earlier. A committed step is complete on all hosts."""
    run = world()
    run.advance()
    run.agents["a"] = replace(run.agents["a"], step=41, committed=49)
    run.agents["b"] = replace(run.agents["b"], step=55, wrong=HostFailure("signal", (3,), "was killed by SIGKILL"))
    drafts = draft_next_entries(run.view())
    assert (drafts[0].facts["step"], drafts[0].facts["committed"]) == (55, 49)
    assert drafts[1].text.startswith(
        "rank 3 was killed by SIGKILL after step 55; all ranks start again from the newest saved step (49"
    )
    del run.agents["b"]
    assert draft_next_entries(run.view())[0].facts["step"] == 49


def test_a_restore_of_an_older_step_than_the_saved_one_is_noted() -> None:
    """It is noted once, and not where it was decided."""
    run = world()
    run.advance()
    run.step = 29
    run.agents["b"] = replace(run.agents["b"], wrong=HostFailure("signal", (3,), "was killed by SIGKILL"))
    run.follow()
    for _ in range(3):
        run.advance()
    assert [len(run.starts()), run.run_state.failures[-1].committed] == [2, 25]
    assert draft_next_entries(run.view()) == []
    run.agents["a"] = replace(run.agents["a"], restored=25)
    assert draft_next_entries(run.view()) == []
    run.agents["a"] = replace(run.agents["a"], restored=20)
    drafts = draft_next_entries(run.view())
    assert [(draft.kind, draft.facts) for draft in drafts] == [("note", {"restored": 20})]
    assert drafts[0].text.startswith("the ranks continue from step 20, although step 25 was saved")
    before = replace(run.view(), run_state=replace(run.run_state, restore_step_limit=25))
    assert draft_next_entries(before) == []
    run.append(len(run.log), drafts)
    assert draft_next_entries(run.view()) == []


@pytest.mark.parametrize("command", ["train", "another"])
def test_the_next_run_of_the_same_job_notes_an_older_restored_step(command: str) -> None:
    """Saved steps may have been damaged in between; the steps of another job do not count."""
    run = world()
    run.advance()
    ended = [entry_drafts.draft_failure(0, failure("a", 25, "asked")), Draft(0, "end", "ended on drain", {"status": 0})]
    again = [entry_drafts.draft_run(1, "s", replace(run.spec, command=(command,))), Draft(1, "lead", "", {"name": "a"})]
    run.append(len(run.log), [*ended, *again])
    run.follow()
    for _ in range(2):
        run.advance()
    assert (run.run_state.attempt, run.run_state.last and run.run_state.last.kind) == (1, "start")
    run.agents["a"] = replace(run.agents["a"], restored=20)
    texts = [draft.text for draft in draft_next_entries(run.view())]
    assert [text[:34] for text in texts] == (["the ranks continue from step 20, a"] if command == "train" else [])


def test_a_hang_is_blamed_on_the_rank_that_is_behind() -> None:
    """This is decided over all hosts, not by the host that noticed the hang first."""
    run = world()
    run.advance()
    run.agents["a"] = replace(run.agents["a"], wrong=HostFailure("hang", (1,), "…"), slowest=SlowestRank(1, 8, 31.0, "step"))
    run.agents["b"] = replace(run.agents["b"], slowest=SlowestRank(2, 7, 30.5, "step"))
    run.agents["c"] = replace(run.agents["c"], slowest=SlowestRank(5, 8, 30.0, "step"))
    failure = draft_next_entries(run.view())[0]
    assert (tuple(failure.facts["ranks"]), failure.facts["host"]) == ((2,), "b")
    assert "30.5 s in phase 'step'" in failure.text


def test_a_job_waits_for_hosts_up_to_its_limits() -> None:
    run = world(least=2, patience_seconds=30.0, give_up_seconds=100.0)
    run.advance()
    del run.agents["c"]
    run.advance()
    assert run.log[-1].kind == "decision"
    run.clock += 29.0
    run.advance()
    assert len(run.starts()) == 1
    run.clock += 2.0
    run.advance()
    assert [m["name"] for m in run.starts()[-1].facts["members"]] == ["a", "b"]
    del run.agents["b"]
    run.advance()
    run.clock += 99.0
    run.advance()
    assert len(run.starts()) == 2
    run.clock += 2.0
    run.advance()
    assert run.log[-1].text == "1 of 2 hosts joined within 100 s; start ckpt-run on more, or lower --min"
    assert run.log[-1].facts["status"] == 1


def test_hosts_live_by_the_clock_of_the_observer() -> None:
    """A report from before the first observation is not a sign of life, and a pause of the observer makes no host lost."""
    liveness = AgentLiveness()
    liveness.observe({"a": agent("a", beat=1), "b": agent("b", beat=7)}, 100.0)
    assert set(liveness.maybe_living()) == {"a", "b"}
    assert liveness.living() == {}
    for i in range(1, 8):
        liveness.observe({"a": agent("a", beat=1 + i), "b": agent("b", beat=7)}, 100.0 + i * REPORT_SECONDS)
    assert set(liveness.living()) == {"a"}
    assert set(liveness.maybe_living()) == {"a"}, f"b is silent for more than {LOST_SECONDS} s"
    liveness.observe({"a": agent("a", beat=8), "b": agent("b", beat=8)}, 160.0)
    assert set(liveness.living()) == {"a", "b"}, "it was the observer that received nothing for a minute"


def test_no_host_is_lost_while_the_run_log_accepts_no_reports() -> None:
    """An agent whose own report is not replaced can't judge others. Its silence counts again once its own report is new."""
    liveness = AgentLiveness()
    for i in range(60):
        beat = min(i, 10)
        liveness.observe({"b": agent("b", beat=beat)}, 100.0 + i * REPORT_SECONDS, agent("a", beat=beat))
    assert set(liveness.living()) == {"b"}
    for i in range(60, 70):
        liveness.observe({"b": agent("b", beat=10)}, 100.0 + i * REPORT_SECONDS, agent("a", beat=i))
    assert liveness.maybe_living() == {}


def test_a_report_is_decoded_as_it_was_encoded() -> None:
    report = agent("a", wrong=HostFailure("hang", (1, 2), "x", 3.0), slowest=SlowestRank(1, 2, 3.0, "save"), leaving=15)
    assert decode_report(report.to_facts() | {"of a later version": 1}) == report


@pytest.mark.parametrize(("lost", "killed", "kinds"), [
    ((), 0, ["failure", "decision", "start"]), (("b",), None, ["failure", "decision", "start"]),
    (("b", "c"), None, ["failure", "decision", "end"]),
])  # fmt: skip
def test_a_dry_run_predicts_the_entries_and_writes_none(lost: tuple[str, ...], killed: int | None, kinds: list[str]) -> None:
    run = world(least=2)
    run.advance()
    before = list(run.log)
    drafts = predict_entries(run.log, run.agents, lost, killed)
    assert [draft.kind for draft in drafts] == kinds
    assert run.log == before
