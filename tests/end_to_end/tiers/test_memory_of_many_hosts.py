"""The memory tier of a run on several hosts: no step is lost that is in the memory of a remaining host.

The agents are processes of this host; each has memory, nodes and ranks of its own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.etcd_server import needs_etcd
from helpers.host_runs import OnHosts, answers, leader_of, starts
from helpers.memory_runs import InMemory, failures, memories_of, memory_server_pids, with_make_soak
from helpers.memory_runs import job as job
from helpers.network_namespaces import hosts_on_a_wire
from helpers.processes import stop, until
from helpers.runs import have_ended

from ckpt.recovery.ranks import processes


@with_make_soak
def test_killed_ranks_of_a_host_restart_from_memory(job: Callable[..., InMemory]) -> None:
    """All ranks of a host are killed: their saves are in its memory and in that of another host, and at most the step under way
    is repeated."""
    run = job(hosts=2, steps=13)
    for name in "ab":
        run.start(name)
    run.until_step(6)
    os.kill(run.pid(1), signal.SIGKILL)
    assert run.ends(*"ab") == {"a": 0, "b": 0}
    log = run.log()
    assert len(failures(log)) == 1
    assert run.first_step(1) >= 5, "more than the save under way, of step 5, is lost"
    assert memories_of(log)[1][1:] == memories_of(log)[0], (
        "the next attempt does not have fresh nodes and the earlier ones to read from"
    )
    assert run.saved()[-1] == 12
    run.is_right(2)
    run.assert_memory_is_released(*"ab")


def test_a_spare_restarts_from_the_memory_of_the_remaining_host(job: Callable[..., InMemory]) -> None:
    """A host is lost with its memory. A spare replaces it, in a new namespace; the newest step comes from the rest of the old
    one, which is freed then."""
    run = job(hosts=2, steps=13)
    for name in "abc":
        run.start(name)
    run.until_step(6)
    lost = starts(run.log())[0][1]
    run.agents[lost].kill()
    rest = sorted(set("abc") - {lost})
    assert set(run.ends(*rest).values()) == {0}
    log = run.log()
    assert len(failures(log)) == 1
    assert run.first_step(1) >= 5, "more than the save under way, of step 5, is lost"
    first, second = memories_of(log)
    assert [host for host, _ in second[0]] == rest
    assert second[1:] == first
    (dropped, ended) = [e for e in log if e.kind == "memory"]
    assert dropped.facts["memory"] == second[:1]
    assert ended.facts["memory"] == []
    run.is_right(2)
    run.assert_memory_is_released(*rest)


def test_a_job_that_is_given_up_copies_its_memory_to_the_record(job: Callable[..., InMemory]) -> None:
    """No rank could copy the steps that are only in memory: the leader does, and the others serve their memory until then."""
    run = job("--restarts", "0", hosts=2, steps=10_000)
    for name in "ab":
        run.start(name)
    run.until_step(6)
    os.kill(run.pid(1), signal.SIGKILL)
    assert run.ends(*"ab") == {"a": 1, "b": 1}
    log = run.log()
    (failure,) = failures(log)
    assert [e.kind for e in log][-2:] == ["end", "memory"]
    assert "was brought from ckpt://127.0.0.1:" in run.messages("a")
    assert run.saved()[-1] >= max(4, failure.facts["committed"])
    run.assert_memory_is_released(*"ab")


@with_make_soak
@pytest.mark.parametrize("which", ["both", "one"])
def test_restarted_agents_serve_the_memory_of_killed_ones(job: Callable[..., InMemory], which: str) -> None:
    """Of two hosts, the steps that are still in memory are served again, at the same ports."""
    run = job("--patience", "20", hosts=2, steps=15)
    for name in "ab":
        run.start(name)
    run.until_step(6)
    done = min(run.steps_done(0))
    victims = "ab" if which == "both" else "b"
    for name in victims:
        run.agents[name].kill()
    for name in victims:
        run.agents[name].wait()
        run.start(name)
    assert run.ends(*"ab") == {"a": 0, "b": 0}
    log = run.log()
    assert memories_of(log)[0][0] in memories_of(log)[-1]
    assert run.first_step(len(starts(log)) - 1) >= done - 1
    run.is_right(2)
    run.assert_memory_is_released(*"ab")


@with_make_soak
def test_the_last_of_two_hosts_continues_alone(job: Callable[..., InMemory]) -> None:
    run = job("--min", "1", hosts=2, steps=20)
    for name in "ab":
        run.start(name)
    run.until_step(6)
    leader = leader_of(run.log())
    other = "b" if leader == "a" else "a"
    run.agents[leader].kill()
    assert run.ends(other) == {other: 0}
    log = run.log()
    assert run.first_step(1) >= failures(log)[0].facts["step"] - 1
    assert [len(each[0]) for each in memories_of(log)] == [2, 1]
    run.is_right(1)
    run.assert_memory_is_released(other)


@with_make_soak
def test_killed_agents_leave_memory_and_no_process(job: Callable[..., InMemory]) -> None:
    """All agents are killed. The memory stays for agents that are started again."""
    run = job(hosts=2, steps=10_000)
    for name in "ab":
        run.start(name)
    run.until_step(6)
    assert len(memory_server_pids(run)) == 2
    pids = [run.pid(rank) for rank in range(2)]
    for process in run.agents.values():
        process.kill()
    until(lambda: not memory_server_pids(run))
    assert have_ended(pids)
    assert all(run.files(name) for name in "ab")


@with_make_soak
def test_no_host_waits_for_a_stopped_one(job: Callable[..., InMemory]) -> None:
    """Its agent and its memory nodes are stopped: they accept calls, and never answer."""
    run = job("--min", "2", steps=30)
    for name in "abc":
        run.start(name)
    run.until_step(6)
    victim = starts(run.log())[0][1]
    agent = run.agents[victim].pid
    (server_pid,) = [pid for pid in memory_server_pids(run) if int(processes._stat_fields(pid)[1]) == agent]
    for pid in (agent, server_pid):
        stop(pid)
    run.until_step(25, attempt=1)
    assert run.first_step(1) >= failures(run.log())[0].facts["step"] - 1
    for pid in (server_pid, agent):
        os.kill(pid, signal.SIGCONT)
    assert set(run.ends(*"abc").values()) == {0}
    run.is_right(2)
    run.assert_memory_is_released(*"abc")


@needs_etcd
@with_make_soak
def test_a_job_continues_without_a_host_whose_connection_is_cut(job: Callable[..., InMemory], tmp_path: Path) -> None:
    """Messages to it are lost without an error."""
    with hosts_on_a_wire(4) as hosts:
        hosts.run_etcd(3, tmp_path / "etcd")
        until(lambda: answers(f"http://{hosts.etcd_at(3)}"))
        job()
        state = f"etcd://{hosts.etcd_at(3)}/lab"
        run = OnHosts(tmp_path / "job", state, "-n", "1", "--memory", "--insecure", "--min", "2", steps=90)
        run.hosts = hosts
        for name in "abc":
            run.start(name)
        run.until_step(6)
        log = run.log()
        victim = starts(log)[0][1]
        assert all(at.startswith(f"{hosts.network}.") for _, at in memories_of(log)[0][0])
        hosts.unplug("abc".index(victim))
        run.until(lambda log: len(starts(log)) == 2, "continued")
        run.until_step(30, attempt=1)
        failure = failures(run.log())[0]
        assert (failure.facts["cause"], failure.facts["host"]) == ("lost", victim)
        assert int((run.folder / "from-1-0").read_text()) >= failure.facts["step"] - 1
        hosts.plug("abc".index(victim))
        assert set(run.ends(*"abc").values()) == {0}
        InMemory.is_right(run, 2)  # type: ignore[arg-type]
        assert not memory_server_pids(run)


@with_make_soak
def test_the_next_leader_completes_the_drain_of_a_killed_one(job: Callable[..., InMemory]) -> None:
    """It copies the newest step from the memory that the other hosts still serve."""
    run = job("--restarts", "0", steps=10_000)
    run.start("a", failpoints="agent.drain=kill")
    run.until(lambda log: any(e.kind == "lead" for e in log), "led")
    for name in "bc":
        run.start(name)
    run.until_step(6)
    os.kill(run.pid(1), signal.SIGKILL)
    assert run.ends(*"abc") == {"a": -signal.SIGKILL, "b": 1, "c": 1}
    log = run.log()
    assert len([e for e in log if e.kind == "lead"]) == 2
    assert log[-1].kind == "memory"
    assert run.saved()[-1] >= failures(log)[0].facts["step"] - 2
    run.assert_memory_is_released(*"bc")


@with_make_soak
def test_memory_is_kept_while_the_repository_is_away_at_the_end(job: Callable[..., InMemory]) -> None:
    """The next run finds the steps in it."""
    run = job("--restarts", "0", hosts=2, steps=13)
    for name in "ab":
        run.start(name)
    run.until_step(6)
    repo, away = run.folder / "repo", run.folder / "away"
    stop(run.pid(1))
    repo.rename(away)
    repo.write_text("no folder")
    assert run.ends(*"ab") == {"a": 1, "b": 1}
    assert "the memory is kept: start ckpt-run again" in run.messages("a")
    assert not memory_server_pids(run)
    assert run.files("a")
    repo.unlink()
    away.rename(repo)
    done = failures(run.log())[0].facts["step"]
    for path in run.folder.glob("from-*"):
        path.unlink()
    for name in "ab":
        run.start(name)
    assert run.ends(*"ab") == {"a": 0, "b": 0}
    assert run.first_step(1) >= done - 1
    run.is_right(2)
    run.assert_memory_is_released(*"ab")


@with_make_soak
def test_a_run_asked_to_end_saves_its_last_step(job: Callable[..., InMemory]) -> None:
    run = job(hosts=2, steps=10_000)
    for name in "ab":
        run.start(name)
    run.until_step(6)
    for name in "ab":
        run.agents[name].send_signal(signal.SIGTERM)
    assert set(run.ends(*"ab").values()) == {128 + signal.SIGTERM}
    assert run.saved()[-1] == failures(run.log())[0].facts["step"], "the last step is not saved"
    run.assert_memory_is_released(*"ab")


@with_make_soak
def test_no_step_is_repeated_when_a_host_leaves(job: Callable[..., InMemory]) -> None:
    run = job("--min", "2", steps=40)
    for name in "abc":
        run.start(name)
    run.until_step(6)
    run.agents["b"].send_signal(signal.SIGTERM)
    assert run.ends("b") == {"b": 128 + signal.SIGTERM}
    assert not run.files("b")
    assert run.ends("a", "c") == {"a": 0, "c": 0}
    log = run.log()
    assert run.first_step(1) == failures(log)[0].facts["step"] + 1, "a step is repeated"
    run.is_right(2)
    run.assert_memory_is_released(*"abc")


@with_make_soak
def test_a_flipped_byte_in_memory_is_read_from_the_other_copy(job: Callable[..., InMemory]) -> None:
    """A byte of each object of one host is flipped."""
    run = job(hosts=2, steps=15)
    for name in "ab":
        run.start(name)
    run.until_step(6)
    for rank in range(2):
        stop(run.pid(rank))
    flipped = 0
    for path in run.files("a"):
        if "objects" in path.parts and path.stat().st_size > 4096:
            with path.open("r+b") as file:
                file.seek(100)
                byte = file.read(1)[0]
                file.seek(100)
                file.write(bytes([byte ^ 1]))
            flipped += 1
    assert flipped
    assert run.ends(*"ab") == {"a": 0, "b": 0}
    assert run.first_step(1) >= failures(run.log())[0].facts["committed"] + 1
    run.is_right(2)
    run.assert_memory_is_released(*"ab")


@with_make_soak
def test_a_killed_memory_node_restarts_with_its_objects(job: Callable[..., InMemory]) -> None:
    """The job continues without it meanwhile."""
    run = job(steps=60)
    for name in "abc":
        run.start(name)
    run.until_step(6)
    killed = memory_server_pids(run)[1]
    os.kill(killed, signal.SIGKILL)
    run.until_step(30)
    assert len(memory_server_pids(run)) == 3
    assert killed not in memory_server_pids(run)
    assert not failures(run.log())
    os.kill(run.pid(1), signal.SIGKILL)
    assert set(run.ends(*"abc").values()) == {0}
    assert run.first_step(1) >= 29
    run.is_right(3)
    run.assert_memory_is_released(*"abc")


@with_make_soak
def test_ranks_restart_after_all_memory_nodes_are_killed(job: Callable[..., InMemory]) -> None:
    """A save fails, and the ranks start again from the steps that restarted nodes serve."""
    run = job(hosts=2, steps=30)
    for name in "ab":
        run.start(name)
    run.until_step(6)
    for pid in memory_server_pids(run):
        os.kill(pid, signal.SIGKILL)
    assert run.ends(*"ab") == {"a": 0, "b": 0}
    for attempt, failure in enumerate(failures(run.log()), 1):
        assert run.first_step(attempt) >= max(5, failure.facts["step"] - 1)
    run.is_right(2)
    run.assert_memory_is_released(*"ab")
