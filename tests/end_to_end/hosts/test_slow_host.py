"""A host that is slow is not lost: the newest steps, which only its memory has, are waited for and are not given free."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from helpers.host_runs import starts
from helpers.memory_runs import InMemory, failures, job, keepers

from ckpt.recovery.ranks import processes
from ckpt.recovery.run_log.base import LogEntry

__all__ = ["job"]


def processes_of(run: InMemory, name: str) -> list[int]:
    """The agent and what serves the memory of its host."""
    agent = run.agents[name].pid
    return [agent, *(pid for pid in keepers(run) if int(processes._stat_fields(pid)[1]) == agent)]


def test_one_host_is_killed_and_the_other_stands_still(job: Callable[..., InMemory]) -> None:
    """Of a namespace of two: two more hosts begin with the steps of the one that comes back. Patience is for hosts, not for
    steps: it is 0 here."""
    run = job(hosts=2, steps=18)
    for name in "abcd":
        run.start(name)
    run.until_step(15)
    killed, slow = starts(run.log())[0]
    stopped = processes_of(run, slow)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    run.agents[killed].kill()

    def waits_or_went_on(log: list[LogEntry]) -> bool:
        return any("awaited" in entry.facts for entry in log) or len(list(run.folder.glob("from-1-*"))) == 2

    run.until(waits_or_went_on, "waited for")
    time.sleep(1.0)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    rest = sorted(set("abcd") - {killed})
    assert set(run.ends(*rest).values()) == {0}
    assert run.begins(1) >= 14, "the save of step 14 may have been under way"
    assert len(failures(run.log())) == 1
    run.is_right(2)


def test_a_host_that_is_to_leave_serves_the_only_copy_until_it_is_not_needed(job: Callable[..., InMemory]) -> None:
    run = job(hosts=2, steps=18)
    for name in "abcd":
        run.start(name, failpoints="agent.stop=sleep:3")  # the next attempt begins after that
    run.until_step(15)
    killed, leaving = starts(run.log())[0]
    run.agents[killed].kill()
    run.until(lambda log: bool(failures(log)), "failed")
    run.agents[leaving].send_signal(signal.SIGTERM)
    rest = sorted(set("abcd") - {killed, leaving})
    assert set(run.ends(*rest).values()) == {0}
    assert run.ends(leaving) == {leaving: 128 + signal.SIGTERM}
    assert run.begins(1) >= 14, "the save of step 14 may have been under way"
    run.is_right(2)


def test_memory_that_the_log_does_not_name_is_kept(job: Callable[..., InMemory]) -> None:
    """The log of another run is in the folder now, as from an old backup: it does not prove that nobody needs these steps."""
    run = job(hosts=2, steps=10_000)
    for name in "ab":
        run.start(name)
    run.until_step(6)
    for name in "ab":
        run.agents[name].kill()
        run.agents[name].wait()
    run.record.close()
    for path in (run.folder / "run").glob("run.sqlite*"):
        path.unlink()
    other = job("--no-memory", hosts=1, steps=1)
    other.start("c", program=("true",))
    assert other.ends("c") == {"c": 0}
    held = {path for name in "ab" for path in run.files(name) if "objects" in path.parts}
    assert held
    again = job(hosts=2, steps=3)
    for name in "ab":
        again.start(name)
    assert again.ends(*"ab") == {"a": 0, "b": 0}
    assert "they are kept" in again.said("a") + again.said("b")
    assert held <= {path for name in "ab" for path in run.files(name)}
