"""What the log of a run says so far, put together. Pure: who reads the same log knows the same."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ckpt.recovery.policy.decide import PLANNED_CAUSES, Budget, Failure, next_restore_limit, worth_waiting_seconds
from ckpt.recovery.policy.loss_rollback import rollback_environment
from ckpt.recovery.run_log import memory_placement
from ckpt.recovery.run_log.agent_reports import AgentReport
from ckpt.recovery.run_log.base import Draft, LogEntry
from ckpt.recovery.run_log.memory_placement import MemoryNamespace, NewestStep
from ckpt.storage.base.checked_decode import decode
from ckpt.training.data_position import Ranges
from ckpt.training.save_interval import MTBF_VARIABLE, posterior_mtbf_seconds

log = logging.getLogger("ckpt.run")


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What is to be run, and how: the same on all hosts."""

    command: tuple[str, ...]
    ranks: int
    """On each host."""
    hosts: int = 1
    least: int = 1
    """It goes on with so many hosts, where there are no more."""
    restarts: int = 10
    """In a row, without a newer step."""
    grace_seconds: float = 30.0
    """From a signal to the end: time to save."""
    patience_seconds: float = 30.0
    """How long it waits for a host in place of a lost one, before it goes on with fewer."""
    give_up_seconds: float = 600.0
    """How long it waits for as many hosts as it can't do without."""
    spares: int = 0
    """So many more hosts are expected to wait."""
    straggler: float = 0.0
    """A host with a rank that takes so many times as long as the median is left out, where a spare waits; 0 never."""
    straggler_seconds: float = 60.0
    """How long a rank must be slow."""
    directory: str = ""
    """The repository that the ranks use, where they name none."""


@dataclass(frozen=True, slots=True)
class AttemptHost:
    """A host that takes part in an attempt."""

    name: str
    incarnation: str
    first: int
    """Its first rank; the others follow."""
    count: int


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
    def has_ended(self) -> bool:
        return self.last is not None and self.last.kind == "end"

    @property
    def is_final(self) -> bool:
        """Whether it has come to its end by itself: it was not asked to, and there were enough hosts."""
        return self.has_ended and self.last is not None and bool(self.last.facts.get("final"))

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
    facts = entry.facts
    run_state = replace(run_state, number=entry.number)
    if entry.kind == "note":
        return _apply_note(run_state, entry)
    if entry.kind == "lead":
        return replace(run_state, leader=str(facts["name"]))
    if entry.kind == "request":
        return replace(run_state, end_request=entry.text)
    if entry.kind == "memory":
        memory = memory_placement.from_facts(facts["memory"])
        return replace(
            run_state, memory=memory, memory_drained=run_state.has_ended, other_job=run_state.other_job and len(memory) > 1
        )
    _require_order(run_state, entry)
    run_state = replace(run_state, last=entry)
    if entry.kind == "run":
        spec = decode(RunSpec, facts["spec"])
        budget = Budget(spec.restarts, spec.restarts)
        same = run_state.spec is not None and run_state.spec.command == spec.command
        newest = run_state.newest
        if facts.get("cut_off") is not None:
            cut_off_facts = {**facts["cut_off"], "cause": "lost", "ranks": (), "detail": "", "step": -1, "ran_seconds": 0.0}
            cut_off = decode(Failure, cut_off_facts)
            newest = newest.after(cut_off, _current_memory(run_state), run_state.before is not None)
        return RunState(
            entry.number,
            str(facts["run"]),
            spec,
            last=entry,
            attempt=entry.attempt - 1,
            budget=budget,
            memory=run_state.memory,
            saved=newest.step if same else -1,
            newest=newest if same else NewestStep(),
            other_job=bool(memory_placement.node_addresses(run_state.memory)) and (run_state.other_job or not same),
        )
    if entry.kind == "start":
        members = tuple(decode(AttemptHost, member) for member in facts["members"])
        memory = memory_placement.from_facts(facts.get("memory", ()))
        anew = replace(run_state, stragglers={}, left_out="", came=None, awaited=(), restored=None)
        return replace(anew, attempt=entry.attempt, members=members, memory=memory)
    if entry.kind == "failure":
        failure = decode(Failure, {**facts, "detail": entry.text})
        before = next_restore_limit(run_state.before, failure, run_state.budget)
        newest = run_state.newest.after(failure, _current_memory(run_state), run_state.before is not None)
        return replace(run_state, failures=(*run_state.failures, failure), before=before, newest=newest)
    if entry.kind == "decision":
        changes = {name: facts[name] for name in ("before", "limit") if facts.get(name) is not None}
        if facts.get("skip") is not None:
            changes["skip"] = tuple((first, last) for first, last in facts["skip"])
        return replace(
            run_state, budget=run_state.budget.after(run_state.failures[-1], run_state.before is not None), **changes
        )
    return run_state


def _current_memory(run_state: RunState) -> MemoryNamespace:
    """The memory that the attempt saves to."""
    return run_state.memory[0] if run_state.memory else MemoryNamespace()


def _require_order(run_state: RunState, entry: LogEntry) -> None:
    """Raise ValueError where the entries that must come before this one are missing, as they could not be read."""
    if not run_state.members and entry.kind == "stop":
        raise ValueError("nothing was started before it")
    if not run_state.failures and entry.kind == "decision":
        raise ValueError("nothing has failed before it")


def _apply_note(run_state: RunState, entry: LogEntry) -> RunState:
    """What is said once is remembered."""
    facts = entry.facts
    if "straggler" in facts:
        run_state = replace(run_state, stragglers={**run_state.stragglers, int(facts["straggler"]): entry.text})
    if "awaited" in facts:
        run_state = replace(run_state, awaited=tuple(facts["awaited"]))
    noted = {name: facts[name] for name in ("left_out", "spares", "came", "restored") if name in facts}
    return replace(run_state, **noted)


def is_failure(entry: LogEntry) -> bool:
    """Not an end that somebody wanted."""
    return entry.kind == "failure" and entry.facts["cause"] not in PLANNED_CAUSES


# --- entries -----------------------------------------------------------------------------------------------------


def draft_run(attempt: int, name: str, spec: RunSpec, reports: Sequence[AgentReport] = ()) -> Draft:
    """A new run begins; its first attempt has this number. reports: of the attempt before, where the log has no end of it."""
    cut_off = None
    if reports:
        line, committed = max((report.line, report.committed) for report in reports)
        cut_off = {
            "committed": committed,
            "line": line,
            "restored": max(report.restored for report in reports),
            "durable": max(report.durable for report in reports),
            "step_seconds": max(report.step_seconds for report in reports),
        }
    return Draft(attempt, "run", " ".join(spec.command), {"run": name, "spec": asdict(spec), "cut_off": cut_off})


def draft_failure(attempt: int, failure: Failure) -> Draft:
    facts: dict[str, Any] = asdict(failure)
    return Draft(attempt, "failure", facts.pop("detail"), facts)


def draft_memory(run_state: RunState, memory: Sequence[MemoryNamespace], text: str) -> Draft:
    """From now on these memories are in use, and no others."""
    return Draft(max(0, run_state.attempt), "memory", text, {"memory": memory_placement.to_facts(memory)})
