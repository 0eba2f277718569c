"""Which memory has the newest steps, which hosts are awaited, and when memory is released: without processes."""

from __future__ import annotations

from dataclasses import replace

from helpers.agent_worlds import agent, failure, world

from ckpt.recovery.policy.failure import Failure
from ckpt.recovery.policy.hosts_of_next_attempt import worth_waiting_seconds
from ckpt.recovery.run_log import entry_drafts
from ckpt.recovery.run_log.agent_reports import HostFailure
from ckpt.recovery.run_log.base import Draft, LogEntry
from ckpt.recovery.run_log.memory_placement import MemoryNamespace, NewestStep, choose_memories, hosts_to_await, is_needed
from ckpt.recovery.run_log.run_spec import AttemptHost, RunSpec
from ckpt.recovery.run_log.run_state import RunState

TWO = MemoryNamespace((("a", "a:1"), ("b", "b:1")))


def test_hosts_with_the_only_copies_are_awaited() -> None:
    serving = replace(agent("b"), nodes=("b:1",))
    assert hosts_to_await(TWO, {"b": serving}) == (), "one copy exists"
    assert hosts_to_await(TWO, {}) == ("a", "b")
    assert hosts_to_await(TWO, {"b": agent("b")}) == ("a",), "b was started again, and its memory is lost"
    assert hosts_to_await(TWO, {"b": replace(agent("b"), memory="coming")}) == ("a", "b")
    assert hosts_to_await(TWO, {"a": agent("a"), "b": agent("b")}) == (), "both memories are lost"
    assert hosts_to_await(MemoryNamespace(), {}) == ()


def test_the_wait_is_worth_the_steps_that_are_lost() -> None:
    assert worth_waiting_seconds(20, 5.0, 600.0) == 100.0
    assert worth_waiting_seconds(20, 5.0, 30.0) == 30.0
    assert worth_waiting_seconds(5, 0.1, 600.0) == 10.0, "about what a restart costs"
    assert worth_waiting_seconds(0, 5.0, 600.0) == 0.0, "all steps are in the repository, too"


def test_the_newest_step_and_its_memory_follow_each_attempt() -> None:
    new, other = MemoryNamespace((("a", "a:2"), ("b", "b:2"))), MemoryNamespace((("a", "a:3"), ("b", "b:3")))
    ended = Failure("lost", (), "", 14, 14, 100.0, restored=3, durable=9, step_seconds=2.0)
    newest = NewestStep().after(ended, TWO, rolled_back=False)
    assert newest == NewestStep(14, 9, TWO, 5, 2.0)
    nothing = replace(ended, committed=14, restored=14, step_seconds=0.0)
    assert newest.after(nothing, new, rolled_back=False) == newest, "that attempt saved nothing"
    older = replace(ended, committed=11, restored=9, durable=10)
    assert newest.after(older, new, rolled_back=False) == replace(newest, durable=10, at_stake=4)
    rolled_back = newest.after(older, new, rolled_back=True)
    assert rolled_back == NewestStep(14, 10, new, 2, 2.0), "14 may be spoiled, and is not restored"
    assert rolled_back.after(replace(ended, committed=15, durable=15), other, False) == NewestStep(15, 15, other, 0, 2.0)


def test_the_memory_with_the_newest_step_is_kept() -> None:
    """This holds however many attempts have failed since."""
    many = [MemoryNamespace((("a", f"a:{port}"),)) for port in range(9, 2, -1)]
    kept = choose_memories(many, {"a": replace(agent("a"), memory="ready", fresh="a:10", nodes=("a:10",))}, [many[3]])
    assert kept == (MemoryNamespace((("a", "a:10"),)), *many[:2], many[3], many[-1])


def test_memory_with_newer_steps_is_kept_until_they_are_computed_again() -> None:
    """The job continued from an older step."""
    run = world(hosts=1, least=1, agents=1)
    run.advance()
    run.agents["a"] = replace(run.agents["a"], committed=14, wrong=HostFailure("exit", (0,), "failed"))
    run.advance()
    run.agents["a"] = replace(run.agents["a"], doing="idle", wrong=None)
    run.run_state = replace(run.run_state, memory=(MemoryNamespace((("a", "a:1"),)),))
    run.agents["a"] = replace(run.agents["a"], memory="ready", fresh="a:2", nodes=("a:1", "a:2"))
    run.clock += 100
    run.advance()
    assert len(run.run_state.memory) == 2
    run.agents["a"] = replace(run.agents["a"], restored=9, saved=10)
    run.advance()
    assert len(run.run_state.memory) == 2, "only the first memory has step 14"
    run.agents["a"] = replace(run.agents["a"], saved=15)
    run.advance()
    assert len(run.run_state.memory) == 1


def test_a_leaving_host_is_needed_where_others_lack_a_copy() -> None:
    three = MemoryNamespace((("a", "a:1"), ("b", "b:1"), ("c", "c:1")))
    others = {name: replace(agent(name), nodes=(f"{name}:1",)) for name in "ac"}
    assert not is_needed([three], "b", others), "each block is on two of the three"
    assert is_needed([three], "b", {"a": others["a"]}), "some blocks are on b and c"
    assert not is_needed([TWO], "c", {})


def test_the_run_after_a_killed_one_uses_its_last_reports() -> None:
    """No end was written: the next run must know which steps the memory may have."""
    run = world(hosts=1, least=1, agents=1)
    run.advance()
    run.run_state = replace(run.run_state, memory=(TWO,))
    last = replace(run.agents["a"], committed=14, durable=9, step_seconds=2.0)
    number = run.run_state.number

    def next_run(command: tuple[str, ...]) -> RunState:
        draft = entry_drafts.draft_run(1, "s", replace(run.spec, command=command), [last])
        return run.run_state.apply_entries(
            [LogEntry(number + 1, 0.0, draft.attempt, draft.kind, draft.text, dict(draft.facts))]
        )

    run_state = next_run(run.spec.command)
    assert (run_state.saved, run_state.newest) == (14, NewestStep(14, 9, TWO, 5, 2.0))
    assert not run_state.other_job
    other = next_run(("other",))
    assert (other.saved, other.newest) == (-1, NewestStep())
    assert other.other_job, "it computes none of these steps: their memory is released once they are in their repository"


def written(run_state: RunState, *drafts: Draft) -> RunState:
    """Return the state of the run after these drafts are appended to its log."""
    entries = [LogEntry(run_state.number + 1 + i, 0.0, d.attempt, d.kind, d.text, dict(d.facts)) for i, d in enumerate(drafts)]
    return run_state.apply_entries(entries)


def ended_run(spec: RunSpec, *memory: MemoryNamespace) -> RunState:
    """Return the state after a run of one attempt, which saved step 14, and whose memory could not be drained."""
    start = entry_drafts.AttemptStart(0, [AttemptHost("a", "a-1", 0, spec.ranks)], agent("a"), {}, memory)
    run_state = written(RunState(), entry_drafts.draft_run(0, "r", spec), entry_drafts.draft_start(start, "", spec.command))
    saved = entry_drafts.draft_failure(0, failure("a", 14, "asked", restored=9))
    return written(run_state, saved, entry_drafts.draft_end(0, "", 0), entry_drafts.draft_memory(run_state, memory, "kept"))


def test_memory_of_another_command_is_known_after_a_run_without_attempts() -> None:
    """The other command was ended while it waited for hosts. When it is started again, it must not release this memory."""
    first = ended_run(world().spec, TWO)
    other = replace(world().spec, command=("other",))
    run_state = written(first, entry_drafts.draft_run(1, "s", other))
    assert run_state.other_job
    run_state = written(run_state, entry_drafts.draft_end(0, "", 143))
    run_state = written(run_state, entry_drafts.draft_memory(run_state, [TWO], "kept"))
    assert (run_state.other_job, run_state.memory) == (True, (TWO,))
    run_state = written(run_state, entry_drafts.draft_run(1, "t", other))
    assert (run_state.other_job, run_state.newest.step) == (True, -1)
    drained = written(run_state, entry_drafts.draft_end(0, "", 143), entry_drafts.draft_memory(run_state, [], "drained"))
    assert not drained.other_job


def test_a_job_with_another_directory_is_another_job() -> None:
    """Its steps are in another repository, so they do not replace those in memory."""
    spec = replace(world().spec, directory="s3://bucket/a")
    ended = ended_run(spec, TWO)
    same = written(ended, entry_drafts.draft_run(1, "s", spec))
    assert (same.saved, same.newest.memory, same.other_job) == (14, TWO, False)
    other = written(ended, entry_drafts.draft_run(1, "s", replace(spec, directory="s3://bucket/b")))
    assert (other.saved, other.newest, other.other_job) == (-1, NewestStep(), True)


def test_the_newest_steps_of_another_command_outlive_failed_attempts() -> None:
    """They have one copy, in memory that is neither the newest nor the oldest."""
    run = world(hosts=1, least=1, agents=1)
    newest = MemoryNamespace((("a", "a:1"),))
    run.run_state = replace(run.run_state, memory=(newest, TWO), newest=NewestStep(14, 3, newest, 11))
    other = entry_drafts.draft_run(1, "s", replace(run.spec, command=("other",)))
    run.append(len(run.log), [other, Draft(1, "lead", "", {"name": "a"})])
    for port in range(2, 10):
        served = tuple(f"a:{each}" for each in range(1, port + 1))
        run.agents["a"] = replace(run.agents["a"], memory="ready", fresh=f"a:{port}", nodes=served)
        run.clock += 100
        run.advance()
        assert run.run_state.memory[0].nodes == (("a", f"a:{port}"),)
        assert {newest, TWO} <= set(run.run_state.memory), f"start {port - 1}"
        assert len(run.run_state.memory) <= 5
        run.agents["a"] = replace(run.agents["a"], step=-1, committed=-1, wrong=HostFailure("lost", (), "is gone"))
        run.advance()
    again = written(run.run_state, other)
    assert again.newest_of_others == (newest,)
    other_end = written(again, entry_drafts.draft_end(9, "", 0), entry_drafts.draft_memory(again, [], "drained"))
    assert written(other_end, other).newest_of_others == ()
