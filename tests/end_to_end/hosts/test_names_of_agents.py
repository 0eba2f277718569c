"""Two agents of one name: one holds the name, and the other ends, whichever of them starts or wakes up when."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable

from helpers.host_runs import ETCD, Job, assert_result
from helpers.host_runs import job as job
from helpers.processes import stop, wait_until_stopped


def _start_another(run: Job) -> subprocess.Popen[str]:
    """Start a second agent a, with a folder of its own; return the first. The messages of the first are in `first.messages`."""
    first = run.agents["a"]
    (run.folder / "a.messages").rename(run.folder / "first.messages")
    run.start("a", files="elsewhere")
    return first


def _failures(run: Job) -> list[str]:
    return [entry.text for entry in run.log() if entry.kind == "failure"]


def _continue_and_refuse(run: Job, first: subprocess.Popen[str], message: str) -> None:
    """Let the stopped first agent run again: it ends with this message, and the job of the others ends well."""
    os.kill(first.pid, signal.SIGCONT)
    first.wait(timeout=600)
    assert first.returncode == 1
    assert message in run.messages("first")
    assert run.ends("a", "b") == {"a": 0, "b": 0}
    assert_result(run, 4)


@ETCD
def test_of_two_agents_of_one_name_that_start_together_one_is_refused(job: Callable[..., Job]) -> None:
    """Neither has seen a report of the other. The names of two hosts are often the same by mistake."""
    run = job(hosts=2)
    run.start("b")
    run.until(lambda log: any(entry.kind == "lead" for entry in log), "begun")
    run.start("a", failpoints="agent.take_name=stop")
    wait_until_stopped(run.agents["a"])
    first = _start_another(run)
    try:
        run.until_step(12)
        _continue_and_refuse(run, first, "an agent called a runs already (process")
        assert _failures(run) == []
    finally:
        first.kill()
        first.wait()


@ETCD
def test_an_agent_that_was_stopped_as_it_began_the_run_removes_no_report_of_its_replacement(job: Callable[..., Job]) -> None:
    """Its replacement and the other host have begun the run meanwhile."""
    run = job(hosts=2)
    run.start("a", failpoints="agent.named=stop")
    wait_until_stopped(run.agents["a"])
    first = _start_another(run)
    try:
        run.start("b")
        run.until_step(12)
        _continue_and_refuse(run, first, "an agent called a runs already (process")
        assert _failures(run) == []
    finally:
        first.kill()
        first.wait()


@ETCD
def test_a_stopped_agent_whose_name_was_taken_ends_when_it_continues(job: Callable[..., Job]) -> None:
    """Its replacement has started after the lease, and runs on: the job restarts once, for the agent that was stopped."""
    run = job(hosts=2)
    for name in "ab":
        run.start(name)
    run.until_step(12)
    stop(run.agents["a"].pid)
    first = _start_another(run)
    try:
        run.until_step(30, attempt=1)
        _continue_and_refuse(run, first, "another agent took the name a while this one was silent (process")
        assert len(_failures(run)) == 1
    finally:
        first.kill()
        first.wait()
