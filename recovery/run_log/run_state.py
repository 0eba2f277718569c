"""What the log of a run says so far, put together. Pure: who reads the same log knows the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt.recovery.policy.decide import PLANNED_CAUSES, Budget, Failure, next_restore_limit, worth_waiting_seconds
from ckpt.recovery.policy.loss_rollback import rollback_environment
from ckpt.recovery.run_log import memory_placement
from ckpt.recovery.run_log.base import LogEntry
from ckpt.recovery.run_log.entry_facts import (
    DecisionFacts,
    EndFacts,
    FailureSummary,
    LeadFacts,
    NoteFacts,
    RunFacts,
    StartFacts,
    facts_of,
    failure_of,
    memories_of,
)
from ckpt.recovery.run_log.memory_placement import MemoryNamespace, NewestStep
from ckpt.recovery.run_log.run_spec import AttemptHost, RunSpec
from ckpt.training.data_position import Ranges
from ckpt.training.save_interval import MTBF_VARIABLE, posterior_mtbf_seconds

log = logging.getLogger("ckpt.run")


@dataclass(frozen=True, slots=True)
class RunState:
    """A run, up to an entry of its log."""

    number: int = 0
    """Of the last entry."""
    run: str = ""
    """A random name."""
    spec: RunSpec | None = None
    leader: str = ""
    last: LogEntry | None = None
    """The last entry that moves the run on: neither lead nor request."""
    attempt: int = -1
    members: tuple[AttemptHost, ...] = ()
    """Of this attempt, or of the last one."""
    failures: tuple[Failure, ...] = ()
    budget: Budget = field(default_factory=Budget)
    skip: Ranges = ()
    """Batches that are passed over."""
    before: int | None = None
    """A step before this one is restored, until those from it on have been made anew and are trusted."""
    limit: float | None = None
    """What loss is too much, until the ranks have seen enough."""
    saved: int = -1
    """The newest step of the run before this one, if that was the same job; -1 nothing is known."""
    end_request: str = ""
    """Somebody wants the run to end: in words. "" nobody."""
    stragglers: Mapping[int, str] = field(default_factory=dict)
    """Stragglers of this attempt, in words, by rank."""
    left_out: str = ""
    """The host without which all are to start again, as it is slow."""
    spares: int | None = None
    """How many spares wait, as it was said last."""
    came: int | None = None
    """How many hosts there were, as it was said last while more were waited for."""
    awaited: tuple[str, ...] = ()
    """Silent hosts that are waited for, as was noted last, because they may hold the newest steps."""
    restored: int | None = None
    """The step that this attempt went on from, where that was said: it is an older one than was saved."""
    memory: tuple[MemoryNamespace, ...] = ()
    """Of several hosts: the one that steps are saved to, and those before it that may hold steps; of earlier runs, too."""
    newest: NewestStep = field(default_factory=NewestStep)
    """Which of them has the newest step, and what it costs to do without."""
    other_job: bool = False
    """Whether some of them may have steps of another command, which this run does not make anew."""
    memory_drained: bool = False
    """After the end: what was only in memory is where it belongs, or was tried to be brought there."""

    @property
    def committed(self) -> int:
        """The newest step that was saved before this attempt, as far as is known; -1 none."""
        return self.failures[-1].committed if self.failures else self.saved

    @property
    def memory_wait_seconds(self) -> float:
        """How long to wait for the memory that has the newest step where its hosts are silent."""
        most = 0.0 if self.spec is None or not self.newest.memory.nodes else self.spec.give_up_seconds
        return worth_waiting_seconds(self.newest.at_stake, self.newest.step_seconds, most)

    @property
    def environment(self) -> dict[str, str]:
        """What the ranks of the next attempt are told of those before."""
        failed = [failure.ran_seconds for failure in self.failures if failure.cause not in PLANNED_CAUSES]
        ran = sum(failure.ran_seconds for failure in self.failures)
        return rollback_environment(self.skip, self.before, self.limit) | {
            MTBF_VARIABLE: str(posterior_mtbf_seconds(ran, len(failed)))
        }

    @property
    def wait_seconds(self) -> float:
        """How long to wait before the next start, as was decided last."""
        return facts_of(self.last, DecisionFacts).wait if self.last is not None and self.last.kind == "decision" else 0.0

    @property
    def has_ended(self) -> bool:
        return self.last is not None and self.last.kind == "end"

    @property
    def is_final(self) -> bool:
        """Whether it has come to its end by itself: it was not asked to, and there were enough hosts."""
        return self.has_ended and self.last is not None and facts_of(self.last, EndFacts).final

    def apply_entries(self, entries: Sequence[LogEntry]) -> RunState:
        """After some more entries. One that does not follow from those before it is passed over, with a warning."""
        run_state = self
        for entry in entries:
            try:
                run_state = _apply_entry(run_state, entry)
            except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
                log.warning("entry %d of the log of the run (%s) is passed over: %r", entry.number, entry.kind, error)
                run_state = replace(run_state, number=entry.number)
        return run_state


def _apply_entry(run_state: RunState, entry: LogEntry) -> RunState:
    """After one more entry. Raises ValueError where it does not follow."""
    run_state = replace(run_state, number=entry.number)
    apply = _APPLY_BESIDE.get(entry.kind)
    if apply is not None:
        return apply(run_state, entry)
    _require_order(run_state, entry)
    apply = _APPLY.get(entry.kind)
    run_state = replace(run_state, last=entry)
    return run_state if apply is None else apply(run_state, entry)


def _apply_lead(run_state: RunState, entry: LogEntry) -> RunState:
    return replace(run_state, leader=facts_of(entry, LeadFacts).name)


def _apply_request(run_state: RunState, entry: LogEntry) -> RunState:
    return replace(run_state, end_request=entry.text)


def _apply_memory(run_state: RunState, entry: LogEntry) -> RunState:
    memory = memories_of(entry)
    return replace(
        run_state, memory=memory, memory_drained=run_state.has_ended, other_job=run_state.other_job and len(memory) > 1
    )


def _apply_note(run_state: RunState, entry: LogEntry) -> RunState:
    """What is said once is remembered."""
    facts = facts_of(entry, NoteFacts)
    if facts.straggler is not None:
        run_state = replace(run_state, stragglers={**run_state.stragglers, facts.straggler: entry.text})
    if facts.awaited is not None:
        run_state = replace(run_state, awaited=facts.awaited)
    return replace(
        run_state,
        left_out=run_state.left_out if facts.left_out is None else facts.left_out,
        spares=run_state.spares if facts.spares is None else facts.spares,
        came=run_state.came if facts.came is None else facts.came,
        restored=run_state.restored if facts.restored is None else facts.restored,
    )


def _apply_run(run_state: RunState, entry: LogEntry) -> RunState:
    facts = facts_of(entry, RunFacts)
    spec, newest = facts.spec, run_state.newest
    same = run_state.spec is not None and run_state.spec.command == spec.command
    if facts.cut_off is not None:
        newest = newest.after(facts.cut_off.as_failure(), _current_memory(run_state), run_state.before is not None)
    return RunState(
        entry.number,
        facts.run,
        spec,
        last=entry,
        attempt=entry.attempt - 1,
        budget=Budget(spec.restarts, spec.restarts),
        memory=run_state.memory,
        saved=newest.step if same else -1,
        newest=newest if same else NewestStep(),
        other_job=bool(memory_placement.node_addresses(run_state.memory)) and (run_state.other_job or not same),
    )


def _apply_start(run_state: RunState, entry: LogEntry) -> RunState:
    anew = replace(run_state, stragglers={}, left_out="", came=None, awaited=(), restored=None)
    return replace(anew, attempt=entry.attempt, members=facts_of(entry, StartFacts).members, memory=memories_of(entry))


def _apply_failure(run_state: RunState, entry: LogEntry) -> RunState:
    failure = failure_of(entry)
    before = next_restore_limit(run_state.before, failure, run_state.budget)
    newest = run_state.newest.after(failure, _current_memory(run_state), run_state.before is not None)
    return replace(run_state, failures=(*run_state.failures, failure), before=before, newest=newest)


def _apply_decision(run_state: RunState, entry: LogEntry) -> RunState:
    """Each is kept where the decision says nothing of it."""
    facts = facts_of(entry, DecisionFacts)
    return replace(
        run_state,
        budget=run_state.budget.after(run_state.failures[-1], run_state.before is not None),
        before=run_state.before if facts.before is None else facts.before,
        limit=run_state.limit if facts.limit is None else facts.limit,
        skip=run_state.skip if facts.skip is None else facts.skip,
    )


_APPLY_BESIDE: Mapping[str, Callable[[RunState, LogEntry], RunState]] = {
    "note": _apply_note,
    "lead": _apply_lead,
    "request": _apply_request,
    "memory": _apply_memory,
}
"""Kinds that do not move the run on: they may stand anywhere."""

_APPLY: Mapping[str, Callable[[RunState, LogEntry], RunState]] = {
    "run": _apply_run,
    "start": _apply_start,
    "failure": _apply_failure,
    "decision": _apply_decision,
}


def _current_memory(run_state: RunState) -> MemoryNamespace:
    """The memory that the attempt saves to."""
    return run_state.memory[0] if run_state.memory else MemoryNamespace()


def _require_order(run_state: RunState, entry: LogEntry) -> None:
    """Raise ValueError where the entries that must come before this one are missing, as they could not be read."""
    if not run_state.members and entry.kind == "stop":
        raise ValueError("nothing was started before it")
    if not run_state.failures and entry.kind == "decision":
        raise ValueError("nothing has failed before it")


def is_failure(entry: LogEntry) -> bool:
    """Not an end that somebody wanted."""
    return entry.kind == "failure" and facts_of(entry, FailureSummary).cause not in PLANNED_CAUSES
