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
from helpers.processes import stop

from ckpt.recovery.goodput.ledger import read_ledgers, total_seconds_by_category


def assert_accounted(job: Job) -> dict[str, float]:
    """Check that the ledgers cover the run from its start to its end without a gap or an overlap; return the seconds by
    category."""
    rows, log = read_ledgers(job.folder / "run"), job.log()
    for one, other in pairwise(rows):
        assert abs(other.began - one.at) < 1e-3, (one, other)
    assert rows[0].began < log[0].at + 1e-3 < log[-1].at < rows[-1].at
    return dict(total_seconds_by_category(job.folder / "run"))


def test_every_second_is_accounted_when_the_leader_is_stopped(job: Callable[..., Job]) -> None:
    """The old leader continues while another agent leads, and does not know of it yet."""
    run = job("--spares", "1", hosts=2, steps=100_000)
    for name in "abc":
        run.start(name)
    run.until_step(5)
    leader = leader_of(run.log())
    stop(run.agents[leader].pid)
    run.until(lambda log: leader_of(log) != leader, "led by another")
    time.sleep(1)  # the new leader writes lines, too
    os.kill(run.agents[leader].pid, signal.SIGCONT)
    assert run.ask("drain").returncode == 0
    assert set(run.ends(*"abc").values()) == {0}
    leaders = {e.facts["name"] for e in run.log() if e.kind == "lead"}
    assert len(list((run.folder / "run").glob("ledger-*.jsonl"))) == len(leaders) > 1
    assert assert_accounted(run).get("detect", 0.0) >= (2.0 if leader in starts(run.log())[0] else 0.0)


@ENGINES
def test_a_leader_without_a_report_yet_keeps_the_lead(job: Callable[..., Job]) -> None:
    run = job()
    run.start("a", failpoints="agent.begun=sleep:2")
    run.until(lambda log: any(e.kind == "lead" for e in log), "led")
    for name in "bc":
        run.start(name)
    assert set(run.ends(*"abc").values()) == {0}
    assert [e.facts["name"] for e in run.log() if e.kind == "lead"] == ["a"]


def test_a_leader_that_loses_the_lead_before_its_first_report_leaves_no_gap_in_the_ledger(job: Callable[..., Job]) -> None:
    run = job("--min", "2", hosts=3, steps=60)
    run.start("a", failpoints="agent.begun=sleep:15")
    run.until(lambda log: any(e.kind == "lead" for e in log), "led")
    for name in "bc":
        run.start(name)
    assert set(run.ends(*"abc").values()) == {0}
    assert len({e.facts["name"] for e in run.log() if e.kind == "lead"}) > 1
    assert_accounted(run)


def test_a_leader_killed_at_its_takeover_leaves_no_gap_in_the_ledger(job: Callable[..., Job]) -> None:
    run = job("--min", "2", hosts=4, steps=100_000)
    run.start("a")
    run.until(lambda log: any(e.kind == "lead" for e in log), "led")
    run.start("b", failpoints="coordinator.lead.written=kill")
    run.until(lambda log: (run.folder / "run" / "b.lock").exists(), "b has its lock file")
    for name in "cd":
        run.start(name)
    run.until_step(5)
    run.agents["a"].kill()
    run.until(lambda log: leader_of(log) == "b", "led by b")
    run.until(lambda log: leader_of(log) in "cd" and len(starts(log)) > 1, "continued without b")
    assert run.ask("drain").returncode == 0
    assert set(run.ends(*"cd").values()) == {0}
    assert_accounted(run)


def test_the_time_to_detect_a_lost_host_is_in_the_ledger(job: Callable[..., Job]) -> None:
    run = job("--spares", "1", hosts=2, steps=100_000)
    for name in "abc":
        run.start(name)
    run.until_step(5)
    log = run.log()
    leader = leader_of(log)
    lost = next(name for name in starts(log)[0] if name != leader)
    run.agents[lost].kill()
    run.until(lambda log: len(starts(log)) == 2, "continued")
    assert run.ask("drain").returncode == 0
    assert set(run.ends(*(set("abc") - {lost})).values()) == {0}
    seconds, log = assert_accounted(run), run.log()
    cause = next(e.facts["cause"] for e in log if e.kind == "failure")
    assert cause == "lost", "a rank may miss the other host in a save before the agent does"
    handed_over = sum(e.kind == "lead" for e in log) > 1  # on a slow machine the new leader finds the failure already written
    least = 0.0 if handed_over else 2.5
    assert seconds.get("detect", 0.0) >= least, (seconds, [(e.kind, e.text) for e in log])


def test_steps_that_a_spare_repeats_are_no_useful_time(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """The spare has rank 0 now, whose time counts for the run, and has not seen the earlier steps."""
    monkeypatch.setenv("CKPT_TEST_EVERY", "1000000")  # nothing is saved, so all steps are repeated
    run = job("--spares", "1", hosts=2, steps=100_000)
    run.start("a")
    run.until(lambda log: any(e.kind == "lead" for e in log), "led")
    run.start("b")
    run.until_step(5)
    run.start("c")
    run.until(lambda log: (run.folder / "run" / "c.lock").exists(), "c has its lock file")
    first = starts(run.log())[0][0]
    run.agents[first].kill()
    run.until(lambda log: len(starts(log)) == 2, "continued")
    run.until_step(max(e.facts["step"] for e in run.log() if e.kind == "failure") + 10, 1)
    assert run.ask("drain").returncode == 0
    assert set(run.ends(*(set("abc") - {first})).values()) == {0}
    assert starts(run.log())[1][0] == "c"
    assert assert_accounted(run).get("redo", 0.0) > 0.0


def test_a_host_that_cannot_open_its_ledger_leads_the_run(job: Callable[..., Job]) -> None:
    """The folder of the run has a bad disk. The next leader can't read the ledger of the first, either."""
    run = job("--spares", "1", hosts=2, steps=200)
    for name in "abc":
        (run.folder / "run" / f"ledger-{name}.jsonl").mkdir(parents=True)
        run.start(name)
    run.until_step(5)
    leader = leader_of(run.log())
    run.agents[leader].kill()
    others = [name for name in "abc" if name != leader]
    assert set(run.ends(*others).values()) == {0}
    leaders = [entry.facts["name"] for entry in run.log() if entry.kind == "lead"]
    assert len(leaders) > 1
    for name in leaders:
        assert run.messages(name).count(f"ledger-{name}.jsonl can't be written: Is a directory") == 1
    assert f"ledger-{leader}.jsonl can't be read: Is a directory" in run.messages(leaders[1])
