"""Ranks, agents and hosts are killed, cut off and stopped; the job continues with spares or with fewer hosts."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.etcd_server import needs_etcd
from helpers.host_runs import ENGINES, ETCD, Job, OnHosts, answers, assert_result, leader_of, starts
from helpers.host_runs import job as job
from helpers.network_namespaces import hosts_on_a_wire
from helpers.processes import SOAK, stop, until
from helpers.runs import have_ended


def test_a_job_without_a_fault_ends_well(job: Callable[..., Job]) -> None:
    run = job()
    for name in "abc":
        run.start(name)
    assert run.ends(*"abc") == {"a": 0, "b": 0, "c": 0}
    log = run.log()
    assert [sorted(hosts) for hosts in starts(log)] == [["a", "b", "c"]]
    assert log[-1].text == "all ranks have ended with success"
    assert_result(run, 6)


@ENGINES
def test_all_ranks_start_again_after_one_is_killed(job: Callable[..., Job]) -> None:
    run = job()
    for name in "abc":
        run.start(name)
    run.until_step(12)
    os.kill(run.pid(3), signal.SIGKILL)
    assert set(run.ends(*"abc").values()) == {0}
    log = run.log()
    assert [(e.facts["cause"], e.facts["ranks"]) for e in log if e.kind == "failure"] == [("signal", [3])]
    assert starts(log)[0] == starts(log)[1]
    assert_result(run, 6)


@pytest.mark.parametrize("which", ["leader", "other"])
def test_a_spare_replaces_a_lost_host(job: Callable[..., Job], which: str) -> None:
    run = job(steps=200)  # more steps than the job makes while the test reads the log
    for name in "abcd":
        run.start(name)
    run.until_step(12)
    log = run.log()
    leader = leader_of(log)
    (spare,) = set("abcd") - set(starts(log)[0])
    lost = leader if which == "leader" else next(name for name in starts(log)[0] if name != leader)
    run.agents[lost].kill()
    others = sorted(set("abcd") - {lost})
    assert set(run.ends(*others).values()) == {0}
    log = run.log()
    if lost != spare:
        assert [sorted(hosts) for hosts in starts(log)][-1] == others
        places = starts(log)
        assert [b if b != lost else spare for b in places[0]] == places[-1], "another host has a new place"
    assert_result(run, 6)


def test_a_job_without_spares_continues_with_fewer_hosts(job: Callable[..., Job]) -> None:
    run = job("--min", "2")
    for name in "abc":
        run.start(name)
    run.until_step(12)
    run.agents["b"].kill()
    assert run.ends("a", "c") == {"a": 0, "c": 0}
    log = run.log()
    assert [len(hosts) for hosts in starts(log)] == [3, 2], [(e.kind, e.text) for e in log]
    assert "without b (gone)" in [e.text for e in log if e.kind == "start"][-1]
    assert_result(run, 4)


def test_a_job_with_too_few_hosts_gives_up(job: Callable[..., Job]) -> None:
    run = job("--give-up", "1")
    run.start("a")
    assert run.ends("a") == {"a": 1}
    assert "1 of 3 hosts joined within 1 s; start ckpt-run on more, or lower --min" in run.messages("a")


@pytest.mark.parametrize("place", [0, 2])
@ETCD
def test_a_stopped_agent_that_continues_becomes_a_spare(job: Callable[..., Job], place: int) -> None:
    """The other hosts continued without it. Its ranks have been ended."""
    run = job("--min", "2", steps=160)
    for name in "abc":
        run.start(name)
    run.until_step(12)
    victim = starts(run.log())[0][place]
    ranks = [run.pid(2 * place), run.pid(2 * place + 1)]
    stop(run.agents[victim].pid)
    run.until(lambda log: len(starts(log)) >= 2, "continued")
    assert have_ended(ranks)
    assert "its ranks are ended: the other hosts continue without this host" in run.messages(victim)
    os.kill(run.agents[victim].pid, signal.SIGCONT)
    assert set(run.ends(*"abc").values()) == {0}
    assert_result(run, 4)


def test_a_killed_agent_that_starts_again_rejoins_the_run(job: Callable[..., Job]) -> None:
    """It starts at once, under the same name: its ranks are gone, so all ranks start again with it."""
    run = job()
    for name in "abc":
        run.start(name)
    run.until_step(12)
    run.kill("b")
    run.start("b")
    assert set(run.ends(*"abc").values()) == {0}
    log = run.log()
    assert [e.facts["cause"] for e in log if e.kind == "failure"] == ["lost"]
    assert starts(log)[0] == starts(log)[1]
    assert_result(run, 6)


KILLED_AT = [("start", ".written"), ("failure", ""), ("end", "")]
if SOAK:
    KILLED_AT = [(kind, written) for kind in ("start", "failure", "end") for written in ("", ".written")]


@pytest.mark.soak
@ETCD
@pytest.mark.parametrize(("kind", "written"), KILLED_AT)
def test_another_agent_continues_from_the_log_of_a_killed_coordinator(job: Callable[..., Job], kind: str, written: str) -> None:
    """The coordinator is killed at each point of a decision; no decision is made twice."""
    run = job("--min", "2", "--give-up", "8")
    run.start("a", failpoints=f"coordinator.{kind}{written}=kill")
    run.until(lambda log: any(e.kind == "lead" for e in log), "led")
    for name in "bc":
        run.start(name)
    if kind == "failure":
        run.until_step(12)
        os.kill(run.pid(3), signal.SIGKILL)
    run.ends("b", "c")
    log = run.log()
    assert [e.facts["name"] for e in log if e.kind == "lead"][:2] in (["a", "b"], ["a", "c"], ["a"])
    assert log[-1].text == "all ranks have ended with success"
    assert len([e for e in log if e.kind == "start"]) == len({e.attempt for e in log if e.kind == "start"})
    assert_result(run, len(starts(log)[-1]) * 2)
    run.agents["a"].wait()


@pytest.mark.parametrize("point", ["agent.start", "agent.started", "agent.stop"])
def test_a_job_survives_an_agent_killed_at_any_point(job: Callable[..., Job], point: str) -> None:
    run = job("--min", "2")
    run.start("a")
    run.until(lambda log: any(e.kind == "lead" for e in log), "led")
    run.start("b", failpoints=f"{point}=kill")
    run.start("c")
    if point == "agent.stop":
        run.until_step(12)
        os.kill(run.pid(0), signal.SIGKILL)
    assert run.ends("a", "c") == {"a": 0, "c": 0}
    assert starts(run.log())[-1] == ["a", "c"]
    assert_result(run, 4)


def test_killed_agents_leave_no_process(job: Callable[..., Job]) -> None:
    run = job(steps=10_000)
    for name in "abc":
        run.start(name)
    run.until_step(3)
    pids = [run.pid(rank) for rank in range(6)]
    for agent in run.agents.values():
        agent.kill()
    assert have_ended(pids)


@needs_etcd
def test_a_host_cut_off_from_the_others_becomes_a_spare(tmp_path: Path) -> None:
    """The other hosts detect it and continue without it. The saves of its ranks do not count; when it is back it is a spare."""
    with hosts_on_a_wire(4) as hosts:
        hosts.run_etcd(3, tmp_path / "etcd")
        until(lambda: answers(f"http://{hosts.etcd_at(3)}"))
        run = OnHosts(tmp_path / "job", f"etcd://{hosts.etcd_at(3)}/lab", "--min", "2", steps=240)
        run.hosts = hosts
        for name in "abc":
            run.start(name)
        run.until_step(12)
        victim = starts(run.log())[0][1]
        hosts.cut("abc".index(victim), 3)
        run.until(lambda log: len(starts(log)) == 2, "continued")
        log = run.log()
        assert [(e.facts["cause"], e.facts["host"]) for e in log if e.kind == "failure"] == [("lost", victim)]
        run.until_step(12, attempt=1)
        hosts.mend("abc".index(victim), 3)
        assert set(run.ends(*"abc").values()) == {0}
        assert_result(run, 4)
