"""Every second of a run on several hosts is in its goodput ledger."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from helpers.host_runs import ENGINES, Job, leader_of, starts
from helpers.host_runs import job as job

from ckpt.recovery.goodput.ledger import read_ledgers, total_seconds_by_category


def is_accounted(job: Job) -> dict[str, float]:
    """The time by its names: from the start of the run to its end, without a gap, and no second twice."""
    found, log = read_ledgers(job.folder / "run"), job.log()
    for one, other in pairwise(found):
        assert abs(other.began - one.at) < 1e-3, (one, other)
    assert found[0].began < log[0].at < log[-1].at < found[-1].at
    return dict(total_seconds_by_category(job.folder / "run"))


def test_every_second_is_accounted_where_the_leader_stands_still(job: Callable[..., Job]) -> None:
    """It comes back while another leads, and does not know it yet."""
    run = job("--spares", "1", hosts=2, steps=100_000)
    for name in "abc":
        run.start(name)
    run.until_step(5)
    leader = leader_of(run.log())
    os.kill(run.agents[leader].pid, signal.SIGSTOP)
    run.until(lambda log: leader_of(log) != leader, "led by another")
    time.sleep(1)  # the other one writes lines, too
    os.kill(run.agents[leader].pid, signal.SIGCONT)
    assert run.ask("drain").returncode == 0
    assert set(run.ends(*"abc").values()) == {0}
    leaders = {e.facts["name"] for e in run.log() if e.kind == "lead"}
    assert len(list((run.folder / "run").glob("ledger-*.jsonl"))) == len(leaders) > 1
    assert is_accounted(run).get("detect", 0.0) >= (2.0 if leader in starts(run.log())[0] else 0.0)


@ENGINES
def test_who_leads_is_not_passed_over_before_it_has_said_anything(job: Callable[..., Job]) -> None:
    run = job()
    run.start("a", failpoints="agent.begun=sleep:2")
    run.until(lambda log: any(e.kind == "lead" for e in log), "led")
    for name in "bc":
        run.start(name)
    assert set(run.ends(*"abc").values()) == {0}
    assert [e.facts["name"] for e in run.log() if e.kind == "lead"] == ["a"]


def test_one_that_took_the_lead_and_was_killed_leaves_no_gap(job: Callable[..., Job]) -> None:
    run = job("--min", "2", hosts=4, steps=100_000)
    run.start("a")
    run.until(lambda log: any(e.kind == "lead" for e in log), "led")
    run.start("b", failpoints="coordinator.lead.written=kill")
    run.until(lambda log: (run.folder / "run" / "b.lock").exists(), "b is there")
    for name in "cd":
        run.start(name)
    run.until_step(5)
    run.agents["a"].kill()
    run.until(lambda log: leader_of(log) == "b", "led by b")
    run.until(lambda log: leader_of(log) in "cd" and len(starts(log)) > 1, "gone on without b")
    assert run.ask("drain").returncode == 0
    assert set(run.ends(*"cd").values()) == {0}
    is_accounted(run)


def test_a_lost_host_is_in_the_ledger(job: Callable[..., Job]) -> None:
    run = job("--spares", "1", hosts=2, steps=100_000)
    for name in "abc":
        run.start(name)
    run.until_step(5)
    log = run.log()
    leader = leader_of(log)
    lost = next(name for name in starts(log)[0] if name != leader)
    run.agents[lost].kill()
    run.until(lambda log: len(starts(log)) == 2, "gone on")
    assert run.ask("drain").returncode == 0
    assert set(run.ends(*(set("abc") - {lost})).values()) == {0}
    took, log = is_accounted(run), run.log()
    cause = next(e.facts["cause"] for e in log if e.kind == "failure")
    assert cause == "lost", "though a rank may miss those of the other host in a save before the agent does"
    handed_over = sum(e.kind == "lead" for e in log) > 1  # a slow machine: who leads now found the failure written
    least = 0.0 if handed_over else 2.5
    assert took.get("detect", 0.0) >= least, (took, [(e.kind, e.text) for e in log])


def test_what_a_spare_does_again_is_no_useful_time(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has rank 0 now, whose time is that of the run, and has not seen the steps that were done before."""
    monkeypatch.setenv("CKPT_TEST_EVERY", "1000000")  # nothing is saved by then: all is done again
    run = job("--spares", "1", hosts=2, steps=100_000)
    run.start("a")
    run.until(lambda log: any(e.kind == "lead" for e in log), "led")
    run.start("b")
    run.until_step(5)
    run.start("c")
    run.until(lambda log: (run.folder / "run" / "c.lock").exists(), "c is there")
    first = starts(run.log())[0][0]
    run.agents[first].kill()
    run.until(lambda log: len(starts(log)) == 2, "gone on")
    run.until_step(max(e.facts["step"] for e in run.log() if e.kind == "failure") + 10, 1)
    assert run.ask("drain").returncode == 0
    assert set(run.ends(*(set("abc") - {first})).values()) == {0}
    assert starts(run.log())[1][0] == "c"
    assert is_accounted(run).get("redo", 0.0) > 0.0
