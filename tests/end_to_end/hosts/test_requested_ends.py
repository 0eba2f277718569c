"""Hosts of a run are asked to leave or to end, arrive late, or have a wrong name."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable

import pytest
from helpers.host_runs import ETCD, RUN, Job, assert_result, starts
from helpers.host_runs import job as job
from helpers.processes import until


@ETCD
def test_all_ranks_save_before_a_host_leaves(job: Callable[..., Job]) -> None:
    """All save after the same step, and the other hosts continue from it."""
    run = job("--min", "2")
    for name in "abc":
        run.start(name)
    run.until_step(12)
    run.agents["b"].send_signal(signal.SIGTERM)
    assert run.ends("b") == {"b": 128 + signal.SIGTERM}
    assert run.ends("a", "c") == {"a": 0, "c": 0}
    log = run.log()
    (failure,) = [e for e in log if e.kind == "failure"]
    assert failure.facts["cause"] == "preempted"
    assert failure.facts["step"] == failure.facts["committed"], "a step is repeated"
    assert sorted(starts(log)[-1]) == ["a", "c"]
    assert_result(run, 4)


def test_a_run_ends_when_all_hosts_are_asked_to_end(job: Callable[..., Job]) -> None:
    run = job()
    for name in "abc":
        run.start(name)
    run.until_step(12)
    for name in "abc":
        run.agents[name].send_signal(signal.SIGTERM)
    assert set(run.ends(*"abc").values()) == {128 + signal.SIGTERM}
    for name in "abc":
        run.start(name)
    assert set(run.ends(*"abc").values()) == {0}
    assert_result(run, 6)


def test_a_host_that_arrives_after_the_end_begins_no_run(job: Callable[..., Job]) -> None:
    """The host reports how the run ended; a new run needs --again."""
    run = job("--give-up", "60", hosts=2, steps=30)
    for name in "ab":
        run.start(name)
    assert run.ends(*"ab") == {"a": 0, "b": 0}
    run.start("b")
    assert run.ends("b") == {"b": 0}
    ended = "the run has ended: all ranks have ended with success"
    assert run.messages("b") == f"ckpt-run: {ended}; to begin another, give --again\n"
    assert len([e for e in run.log() if e.kind == "run"]) == 1
    run.options += ["--again"]
    for name in "ab":
        run.start(name)
    assert run.ends(*"ab") == {"a": 0, "b": 0}
    assert len([e for e in run.log() if e.kind == "run"]) == 2


def test_drain_ends_a_run_after_an_agreed_step(job: Callable[..., Job]) -> None:
    run = job(steps=10_000)
    for name in "abc":
        run.start(name)
    run.until_step(5)
    assert run.ask("drain").returncode == 0
    assert set(run.ends(*"abc").values()) == {0}
    log = run.log()
    (agreed,) = [e.facts["step"] for e in log if e.kind == "stop" and e.facts["agreed"]]
    (stop_line,) = [line for line in run.ask("why").stdout.splitlines() if "  stop  " in line]
    assert stop_line.endswith(f"  stop  drain, after step {agreed}")
    assert "have saved and ended on drain" in log[-1].text


@ETCD
def test_a_host_that_arrives_during_a_drain_waits_for_its_end(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of the other hosts save before they end. A waiting agent ends at once when it is asked to."""
    monkeypatch.setenv("CKPT_TEST_SLOW", "300")
    run = job("--grace", "3000", hosts=2, steps=10_000)
    for name in "ab":
        run.start(name)
    run.until_step(0)
    assert run.ask("drain").returncode == 0
    run.start("c")
    run.start("d")
    until(lambda: all("this host waits until the run has ended on drain" in run.messages(name) for name in "cd"))
    run.agents["d"].send_signal(signal.SIGTERM)
    assert run.ends("d") == {"d": 128 + signal.SIGTERM}
    assert [entry.kind for entry in run.log() if entry.kind == "run"] == ["run"], "the drain is in progress"
    assert run.ends(*"ab") == {"a": 0, "b": 0}
    run.until(lambda log: [entry.kind for entry in log].count("run") == 2, "the waiting host begins the next run")
    log = run.log()
    ended = next(i for i, entry in enumerate(log) if entry.kind == "end")
    assert "have saved and ended on drain" in log[ended].text
    assert [entry.kind for entry in log[ended + 1 :]][:2] == ["run", "lead"]
    assert log[ended + 2].facts["name"] == "c"


def test_status_and_plan_describe_the_run_and_change_nothing(job: Callable[..., Job]) -> None:
    run = job("--min", "2", "--spares", "2", steps=10_000)
    for name in "abcd":
        run.start(name)
    run.until_step(5)
    run.until(lambda log: log[-1].text == "1 of 2 spare hosts wait; start the same command on more", "said")
    log = run.log()
    (spare,) = set("abcd") - set(starts(log)[0])
    status = run.ask("status").stdout
    assert f"{spare} " in status
    assert "spare" in status
    assert "leads" in status
    assert "1 of 2 spare hosts wait" in status
    lost = starts(log)[0][1]
    planned = run.ask("plan", "--dry-run", "--lose", lost).stdout
    assert planned.startswith(f"suppose  {lost} is lost\ndecision  host {lost} sent no report")
    assert f"without {lost} (gone) with {spare} instead" in planned
    planned = run.ask("plan", "--dry-run", "--lose", lost, "--lose", spare).stdout
    assert "4 ranks on" in planned
    assert "rank 3 was killed by SIGKILL" in run.ask("plan", "--dry-run", "--fail", "3").stdout
    assert run.ask("plan").stdout.startswith("suppose  rank 0 is killed\ndecision  rank 0 was killed by SIGKILL")
    everyone = [word for name in "abcd" for word in ("--lose", name)]
    assert "without any host nothing is decided" in run.ask("plan", *everyone).stderr
    assert run.ask("plan", "--lose", "nobody").returncode == 1
    assert "there is no rank 6: the run has 6 ranks, numbered from 0" in run.ask("plan", "--fail", "6").stderr
    assert [e.kind for e in run.log()] == [e.kind for e in log], "plan has written an entry"


def test_a_host_with_another_command_is_refused(job: Callable[..., Job]) -> None:
    run = job(steps=10_000)
    run.start("a")
    run.until(lambda log: bool(log), "begun")
    run.start("b", program=("sleep", "1"))
    assert run.ends("b") == {"b": 1}
    assert "another run uses this run log (3 hosts with 2 ranks each" in run.messages("b")


@ETCD
def test_hosts_without_nnodes_are_refused(job: Callable[..., Job]) -> None:
    """Each would be a job on one host: they can't share a run log."""
    run = job(hosts=1)
    run.start("a", program=("sleep", "60"))
    run.until(lambda log: bool(log), "begun")
    run.start("b", program=("sleep", "60"))
    assert run.ends("b") == {"b": 1}
    message = (
        "another run uses this run log (1 host with 2 ranks: sleep 60); for one job on several hosts give --nnodes on each"
    )
    assert message in run.messages("b")


def test_a_one_host_run_in_the_folder_of_another_run_is_refused(job: Callable[..., Job]) -> None:
    run = job(steps=10_000)
    for name in "abc":
        run.start(name)
    run.until_step(3)
    command = [*RUN, "--run-dir", str(run.folder / "run"), "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    assert "another ckpt-run works in" in done.stderr
    assert all(agent.poll() is None for agent in run.agents.values())


@ETCD
def test_a_second_host_of_the_same_name_is_refused(job: Callable[..., Job]) -> None:
    run = job(steps=10_000)
    run.start("a")
    run.until(lambda log: bool(log), "begun")
    time.sleep(1)
    first = run.agents["a"]
    run.start("a", files="elsewhere")
    try:
        assert run.ends("a") == {"a": 1}
        advice = r"an agent called a runs already \(process \d+ at .*, since .*\); end it, or give this host another --name"
        assert re.search(advice, run.messages("a"))
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()
