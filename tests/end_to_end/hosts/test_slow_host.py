"""A slow host is not lost: a job waits for the newest steps that only its memory has, and does not free them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from helpers.host_runs import starts
from helpers.memory_runs import InMemory, failures, job, memory_server_pids
from helpers.processes import stop

from ckpt.recovery.ranks import processes
from ckpt.recovery.run_log.base import LogEntry

__all__ = ["job"]


def processes_of(run: InMemory, name: str) -> list[int]:
    """Return the process numbers of an agent and of the nodes that serve the memory of its host."""
    agent = run.agents[name].pid
    return [agent, *(pid for pid in memory_server_pids(run) if int(processes._stat_fields(pid)[1]) == agent)]


def test_a_job_waits_for_the_steps_in_the_memory_of_a_stopped_host(job: Callable[..., InMemory]) -> None:
    """Of two hosts with memory, one is killed and one is stopped: two more hosts start from the steps of the stopped one when
    it continues. The patience, 0 in this run, is for hosts, not for steps."""
    run = job(hosts=2, steps=18)
    for name in "abcd":
        run.start(name)
    run.until_step(15)
    killed, slow = starts(run.log())[0]
    stopped = processes_of(run, slow)
    for pid in stopped:
        stop(pid)
    run.agents[killed].kill()

    def waits_or_continued(log: list[LogEntry]) -> bool:
        return any("awaited" in entry.facts for entry in log) or len(list(run.folder.glob("from-1-*"))) == 2

    run.until(waits_or_continued, "waited for")
    time.sleep(1.0)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    rest = sorted(set("abcd") - {killed})
    assert set(run.ends(*rest).values()) == {0}
    assert run.first_step(1) >= 14, "more than the save under way, of step 14, is lost"
    assert len(failures(run.log())) == 1
    run.is_right(2)


def test_a_leaving_host_serves_the_only_copy_until_it_is_not_needed(job: Callable[..., InMemory]) -> None:
    run = job(hosts=2, steps=18)
    for name in "abcd":
        run.start(name, failpoints="agent.stop=sleep:3")  # the next attempt begins after the sleep
    run.until_step(15)
    killed, leaving = starts(run.log())[0]
    run.agents[killed].kill()
    run.until(lambda log: bool(failures(log)), "failed")
    run.agents[leaving].send_signal(signal.SIGTERM)
    rest = sorted(set("abcd") - {killed, leaving})
    assert set(run.ends(*rest).values()) == {0}
    assert run.ends(leaving) == {leaving: 128 + signal.SIGTERM}
    assert run.first_step(1) >= 14, "more than the save under way, of step 14, is lost"
    run.is_right(2)


def test_memory_that_the_run_log_does_not_name_is_kept(job: Callable[..., InMemory]) -> None:
    """The folder has the log of another run, as from an old backup: it does not prove that no run needs these steps."""
    run = job(hosts=2, steps=10_000)
    for name in "ab":
        run.start(name)
    run.until_step(6)
    run.kill("a", "b")
    run.run_log.close()
    for path in (run.folder / "run").glob("run.sqlite*"):
        path.unlink()
    other = job("--no-memory", hosts=1, steps=1)
    other.start("c", program=("true",))
    assert other.ends("c") == {"c": 0}
    objects = {path for name in "ab" for path in run.files(name) if "objects" in path.parts and path.name[0] != "."}
    assert objects
    again = job(hosts=2, steps=3)
    for name in "ab":
        again.start(name)
    assert again.ends(*"ab") == {"a": 0, "b": 0}
    assert "they are kept" in again.messages("a") + again.messages("b")
    assert objects <= {path for name in "ab" for path in run.files(name)}
