"""`RunState`, the state of a run: computed from the entries of its log alone, so the same on all hosts. Pure."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt.recovery.policy.failure import PLANNED_CAUSES, Failure
from ckpt.recovery.policy.hosts_of_next_attempt import worth_waiting_seconds
from ckpt.recovery.policy.loss_rollback import rollback_environment
from ckpt.recovery.policy.restart_decision import Budget, next_restore_step_limit
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
from ckpt.training.batch_order import Ranges
from ckpt.training.save_interval import MTBF_VARIABLE, posterior_mtbf_seconds

log = logging.getLogger("ckpt.run")


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run after some entry of its log."""

    number: int = 0
    """The number of that entry."""
    run: str = ""
    """A random name of the run."""
    spec: RunSpec | None = None
    leader: str = ""
    last: LogEntry | None = None
    """The last entry of a kind that changes the phase of the run: run, start, stop, failure, decision or end."""
    attempt: int = -1
    attempt_hosts: tuple[AttemptHost, ...] = ()
    """The hosts of this attempt, or of the last one."""
    failures: tuple[Failure, ...] = ()
    budget: Budget = field(default_factory=Budget)
    skip: Ranges = ()
    """The batches that are skipped."""
    restore_step_limit: int | None = None
    """Restore a step before this one, until this step and later ones are committed again and trusted."""
    loss_limit: float | None = None
    """The loss above which a rank reports a bad loss, until it has seen enough losses to judge by itself."""
    saved: int = -1
    """The newest step of the run before this one, if it had the same command and `--dir`; -1 unknown."""
    end_request: str = ""
    """Text: why the run is requested to end; "" if it is not."""
    stragglers: Mapping[int, str] = field(default_factory=dict)
    """Texts about the stragglers of this attempt, by rank."""
    left_out: str = ""
    """The slow host that the next attempt leaves out; "" none."""
    spares: int | None = None
    """How many spares wait, by the last note about it."""
    arrived_hosts: int | None = None
    """How many hosts have arrived while the run waits for more, by the last note about it."""
    awaited: tuple[str, ...] = ()
    """The silent hosts that the run waits for because they may have the newest steps, by the last note about it."""
    restored: int | None = None
    """The step that this attempt resumed from, if a note reports that it is older than the newest saved one."""
    memory: tuple[MemoryNamespace, ...] = ()
    """With several hosts: the memory namespace that steps are saved to, then older ones that may have steps, also of earlier
    runs."""
    newest: NewestStep = field(default_factory=NewestStep)
    """The newest saved step, which namespace has it, and what its loss would cost."""
    other_job: bool = False
    """Whether some namespaces may have steps of another command or `--dir`. This run does not write those steps again."""
    newest_of_others: tuple[MemoryNamespace, ...] = ()
    """The namespaces that have the newest step of each of these other jobs."""
    memory_drained: bool = False
    """After the end: the steps that were only in memory are copied to the repository, or the copy was tried."""

    @property
    def committed(self) -> int:
        """The newest known step that was saved before this attempt; -1 none."""
        return self.failures[-1].committed if self.failures else self.saved

    @property
    def memory_wait_seconds(self) -> float:
        """How long to wait for the silent hosts whose memory has the newest step."""
        most = 0.0 if self.spec is None or not self.newest.memory.nodes else self.spec.give_up_seconds
        return worth_waiting_seconds(self.newest.at_stake, self.newest.step_seconds, most)

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of the next attempt's ranks that follow from earlier attempts."""
        failed = [failure.ran_seconds for failure in self.failures if failure.cause not in PLANNED_CAUSES]
        ran = sum(failure.ran_seconds for failure in self.failures)
        return rollback_environment(self.skip, self.restore_step_limit, self.loss_limit) | {
            MTBF_VARIABLE: str(posterior_mtbf_seconds(ran, len(failed)))
        }

    @property
    def wait_seconds(self) -> float:
        """How long to wait before the next start, by the last decision."""
        return facts_of(self.last, DecisionFacts).wait if self.last is not None and self.last.kind == "decision" else 0.0

    @property
    def has_ended(self) -> bool:
        """Whether the log has the end of the run."""
        return self.last is not None and self.last.kind == "end"

    @property
    def is_final(self) -> bool:
        """Whether the run ended by itself: no request ended it, and it did not lack hosts."""
        return self.has_ended and self.last is not None and facts_of(self.last, EndFacts).final

    def apply_entries(self, entries: Sequence[LogEntry]) -> RunState:
        """Return the state after more entries. An entry that can't follow the earlier ones is ignored, with a warning."""
        run_state = self
        for entry in entries:
            try:
                run_state = _apply_entry(run_state, entry)
            except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
                log.warning("entry %d of the log of the run (%s) is skipped: %r", entry.number, entry.kind, error)
                run_state = replace(run_state, number=entry.number)
        return run_state


def _apply_entry(run_state: RunState, entry: LogEntry) -> RunState:
    """Return the state after one more entry. Raises ValueError if it can't follow the earlier ones."""
    run_state = replace(run_state, number=entry.number)
    apply = _APPLY_IN_ANY_PHASE.get(entry.kind)
    if apply is not None:
        return apply(run_state, entry)
    _require_order(run_state, entry)
    apply = _APPLY.get(entry.kind)
    return replace(run_state if apply is None else apply(run_state, entry), last=entry)


def _apply_lead(run_state: RunState, entry: LogEntry) -> RunState:
    return replace(run_state, leader=facts_of(entry, LeadFacts).name)


def _apply_request(run_state: RunState, entry: LogEntry) -> RunState:
    return replace(run_state, end_request=entry.text)


def _apply_memory(run_state: RunState, entry: LogEntry) -> RunState:
    memory = memories_of(entry)
    # While the run lasts, the first namespace is its own. After its end, it may have none of its own among those that are kept.
    has_earlier = bool(memory) if run_state.has_ended else len(memory) > 1
    return replace(run_state, memory=memory, memory_drained=run_state.has_ended, other_job=run_state.other_job and has_earlier)


def _apply_note(run_state: RunState, entry: LogEntry) -> RunState:
    """Remember the facts of a note, so that it is not written twice."""
    facts = facts_of(entry, NoteFacts)
    if facts.straggler is not None:
        run_state = replace(run_state, stragglers={**run_state.stragglers, facts.straggler: entry.text})
    if facts.awaited is not None:
        run_state = replace(run_state, awaited=facts.awaited)
    return replace(
        run_state,
        left_out=run_state.left_out if facts.left_out is None else facts.left_out,
        spares=run_state.spares if facts.spares is None else facts.spares,
        arrived_hosts=run_state.arrived_hosts if facts.came is None else facts.came,
        restored=run_state.restored if facts.restored is None else facts.restored,
    )


def _apply_run(run_state: RunState, entry: LogEntry) -> RunState:
    facts = facts_of(entry, RunFacts)
    spec, newest, limit, budget = facts.spec, run_state.newest, run_state.restore_step_limit, run_state.budget
    same = run_state.spec is not None and _job(run_state.spec) == _job(spec)
    if facts.cut_off is not None:
        failure = facts.cut_off.as_failure()
        newest = newest.after(failure, _current_memory(run_state), limit is not None)
        limit, budget = next_restore_step_limit(limit, failure, budget), budget.after(failure, limit is not None)
    continues = same and not run_state.is_final  # else a user may have mended the program or its data
    others = run_state.newest_of_others if same else (*run_state.newest_of_others, newest.memory)
    return RunState(
        entry.number,
        facts.run,
        spec,
        attempt=entry.attempt - 1,
        # A step counts as newer, which lifts the limit, only if it is newer than all that were committed before.
        budget=Budget(spec.restarts, spec.restarts, best_step=budget.best_step if continues else -1),
        skip=run_state.skip if continues else (),
        restore_step_limit=limit if continues else None,
        loss_limit=run_state.loss_limit if continues else None,
        memory=run_state.memory,
        saved=newest.step if same else -1,
        newest=newest if same else NewestStep(),
        other_job=bool(memory_placement.node_addresses(run_state.memory)) and (run_state.other_job or not same),
        newest_of_others=tuple(memory for memory in others if memory in run_state.memory),
    )


def _apply_start(run_state: RunState, entry: LogEntry) -> RunState:
    cleared = replace(run_state, stragglers={}, left_out="", arrived_hosts=None, awaited=(), restored=None)
    return replace(cleared, attempt=entry.attempt, attempt_hosts=facts_of(entry, StartFacts).members, memory=memories_of(entry))


def _apply_failure(run_state: RunState, entry: LogEntry) -> RunState:
    failure = failure_of(entry)
    restore_step_limit = next_restore_step_limit(run_state.restore_step_limit, failure, run_state.budget)
    newest = run_state.newest.after(failure, _current_memory(run_state), run_state.restore_step_limit is not None)
    return replace(run_state, failures=(*run_state.failures, failure), restore_step_limit=restore_step_limit, newest=newest)


def _apply_decision(run_state: RunState, entry: LogEntry) -> RunState:
    """Apply a decision. What the decision leaves open stays as it was."""
    facts = facts_of(entry, DecisionFacts)
    return replace(
        run_state,
        budget=run_state.budget.after(run_state.failures[-1], run_state.restore_step_limit is not None),
        restore_step_limit=run_state.restore_step_limit if facts.before is None else facts.before,
        loss_limit=run_state.loss_limit if facts.limit is None else facts.limit,
        skip=run_state.skip if facts.skip is None else facts.skip,
    )


_APPLY_IN_ANY_PHASE: Mapping[str, Callable[[RunState, LogEntry], RunState]] = {
    "note": _apply_note,
    "lead": _apply_lead,
    "request": _apply_request,
    "memory": _apply_memory,
}
"""Kinds of entries that do not change the phase of the run. They may follow any entry."""

_APPLY: Mapping[str, Callable[[RunState, LogEntry], RunState]] = {
    "run": _apply_run,
    "start": _apply_start,
    "failure": _apply_failure,
    "decision": _apply_decision,
}


def _job(spec: RunSpec) -> tuple[tuple[str, ...], str]:
    """Return what is the same for all runs of one job, whose steps continue each other."""
    return spec.command, spec.directory


def _current_memory(run_state: RunState) -> MemoryNamespace:
    """Return the memory namespace that the attempt saves to."""
    return run_state.memory[0] if run_state.memory else MemoryNamespace()


def _require_order(run_state: RunState, entry: LogEntry) -> None:
    """Raise ValueError if the entries that must precede this one are missing because they could not be read."""
    if not run_state.attempt_hosts and entry.kind == "stop":
        raise ValueError("nothing was started before it")
    if not run_state.failures and entry.kind == "decision":
        raise ValueError("nothing has failed before it")


def is_failure(entry: LogEntry) -> bool:
    """Return whether an entry is a failure, and not the end of an attempt by request."""
    return entry.kind == "failure" and facts_of(entry, FailureSummary).cause not in PLANNED_CAUSES
