"""The next entries of the log of a run, from what its log and its agents say. Pure: the coordinator is a loop around it, and
a coordinator that comes after one that died goes on where the log ends.

    run → start → failure → decision → start → … → end
               ↘ stop ↗      (it was asked to end, or a host is to leave: all save after the same step)
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt.recovery.policy.coordinated_stop import StopRequest, next_stop
from ckpt.recovery.policy.decide import Cause, Failure, choose_hosts, decide, suspected_hosts
from ckpt.recovery.policy.stragglers import DEFAULT_FACTOR, find_stragglers
from ckpt.recovery.run_log import memory_placement
from ckpt.recovery.run_log.agent_reports import LOST_SECONDS, AgentReport
from ckpt.recovery.run_log.base import Draft
from ckpt.recovery.run_log.entry_drafts import (
    AttemptStart,
    draft_decision,
    draft_end,
    draft_failure,
    draft_memory,
    draft_note,
    draft_start,
    draft_stop,
)
from ckpt.recovery.run_log.entry_facts import DecisionFacts, NoteFacts, facts_of
from ckpt.recovery.run_log.run_spec import AttemptHost, RunSpec
from ckpt.recovery.run_log.run_state import RunState
from ckpt.storage.base.plural import format_count

_STOP_AHEAD_SECONDS = 0.5
"""With several hosts: how far ahead the step to stop after is named first. Some times what passes until agents read it."""

_ARRIVAL_SECONDS = 2.0
"""Hosts that are started together are all there by then."""

_CAUSE_ORDER: Sequence[Cause] = (
    "diverged",
    "lost",
    "out of memory",
    "signal",
    "stopped",
    "hang",
    "unusable",
    "damaged",
    "exit",
)
"""Of failures that come together, which is the cause: ranks whose peer is gone exit with an error."""


@dataclass(frozen=True, slots=True)
class DecisionInput:
    """All that a decision may depend on."""

    run_state: RunState
    living: Mapping[str, AgentReport]
    """By name."""
    maybe_living: Mapping[str, AgentReport]
    """The living, and those that were not listened to for long enough."""
    waited_seconds: float
    """Since the last entry was seen."""
    ran_seconds: float = 0.0
    """Since the attempt began."""
    silent: Mapping[str, AgentReport] = field(default_factory=dict)
    """What hosts reported last that are silent now."""
    silent_since_failure: frozenset[str] = frozenset()
    """Of the hosts, those that have said nothing since something was first seen to be wrong."""


def draft_next_entries(view: DecisionInput) -> list[Draft]:
    """What to write now; empty: nothing has changed."""
    last = view.run_state.last
    assert last is not None
    if last.kind == "failure":
        return _draft_decision(view, view.run_state.failures)
    if last.kind in ("start", "stop"):
        return _draft_while_running(view)
    if last.kind == "decision" and (decision := facts_of(last, DecisionFacts)).action == "halt":
        assert decision.status is not None
        return [draft_end(last.attempt, last.text, decision.status, view.run_state.failures[-1].cause != "asked")]
    return _draft_start(view) if last.kind in ("run", "decision") else []


# --- an attempt begins -------------------------------------------------------------------------------------------


def _draft_start(view: DecisionInput) -> list[Draft]:
    run_state = view.run_state
    spec, last = run_state.spec, run_state.last
    assert spec is not None
    assert last is not None
    asked = max((r.leaving for r in view.living.values()), default=0)
    staying = {name: report for name, report in view.living.items() if not report.leaving}
    if run_state.end_request or (asked and not staying):
        return [_draft_end(run_state, run_state.end_request or "it was asked to end", asked)]
    if view.waited_seconds < run_state.wait_seconds:
        return []
    if any(report.doing != "idle" for report in view.maybe_living.values()):
        return []  # what is left of the attempt before must have ended
    ready = sorted(staying, key=lambda name: (staying[name].joined, name))
    before = [member.name for member in run_state.members]
    waited = view.waited_seconds >= (spec.patience_seconds if before else spec.give_up_seconds)  # at first some come late
    choice = choose_hosts(before, ready, suspected_hosts(run_state.failures), spec.hosts, spec.least, waited)
    if choice is None:
        if view.waited_seconds < spec.give_up_seconds:
            return _draft_host_wait_note(view, spec, len(ready))
        came = f"{len(ready)} of {format_count(spec.least, 'host')} came within {spec.give_up_seconds:g} s"
        return [_draft_end(run_state, f"{came}; start ckpt-run on more, or lower --min", 0)]
    if hosts := _hosts_awaited_for_memory(view):
        return _draft_memory_wait_note(run_state, hosts)
    memory = memory_placement.choose_memories(
        run_state.memory, {name: staying[name] for name in choice.hosts}, run_state.newest.memory
    )
    if memory is None:
        return []
    attempt = run_state.attempt + 1
    members = [AttemptHost(name, staying[name].incarnation, i * spec.ranks, spec.ranks) for i, name in enumerate(choice.hosts)]
    start = AttemptStart(attempt, members, staying[choice.hosts[0]], run_state.environment, memory)
    ranks = format_count(len(members) * spec.ranks, "rank")
    where = "" if spec.hosts == 1 else f" on {', '.join(choice.hosts)}"
    changed = f", {choice.reason}" if choice.reason else ""
    return [draft_start(start, f"{ranks}{where}{changed}: {' '.join(spec.command)}", spec.command)]


def _hosts_awaited_for_memory(view: DecisionInput) -> tuple[str, ...]:
    """The silent hosts that are waited for, as only they may have the newest steps."""
    if view.waited_seconds >= view.run_state.memory_wait_seconds:
        return ()
    return memory_placement.hosts_to_await(view.run_state.newest.memory, view.maybe_living)


def _draft_memory_wait_note(run_state: RunState, hosts: tuple[str, ...]) -> list[Draft]:
    """Written once for the same hosts."""
    if run_state.awaited == hosts:
        return []
    steps, seconds = format_count(run_state.newest.at_stake, "step"), run_state.memory_wait_seconds
    text = f"waiting up to {seconds:.0f} s for {', '.join(hosts)}: silent, and {steps} may be in the memory there alone"
    return [draft_note(max(0, run_state.attempt), text, NoteFacts(awaited=hosts))]


def _draft_host_wait_note(view: DecisionInput, spec: RunSpec, arrived: int) -> list[Draft]:
    """How many hosts are here, where more are waited for: said when that is another number than was said."""
    if view.waited_seconds < _ARRIVAL_SECONDS or arrived == view.run_state.came:
        return []
    seconds = spec.patience_seconds if view.run_state.members else spec.give_up_seconds
    if arrived >= spec.least:
        then = f"with these it goes on {seconds:g} s after it began to wait"
    else:
        then = f"it gives up {spec.give_up_seconds:g} s after it began to wait"
    where = "with the same --state (agents of one host: --run-dir)"
    more = f"start the same command on {spec.hosts - arrived} more, {where}"
    text = f"{arrived} of {spec.hosts} hosts are here; {more}; {then}"
    return [draft_note(max(0, view.run_state.attempt), text, NoteFacts(came=arrived))]


# --- and goes wrong, or well -------------------------------------------------------------------------------------


def _draft_while_running(view: DecisionInput) -> list[Draft]:
    run_state = view.run_state
    last, spec = run_state.last, run_state.spec
    assert last is not None
    assert spec is not None
    reports_by_host = {member.name: view.maybe_living.get(member.name) for member in run_state.members}
    reports = [report for report in reports_by_host.values() if report is not None and report.attempt == run_state.attempt]
    failures = [
        _lost_host_failure(view, member) for member in run_state.members if _is_lost(member, reports_by_host[member.name])
    ]
    failures += [_reported_failure(view, report, reports) for report in reports if report.wrong is not None]
    cause = min(failures, key=lambda failure: _CAUSE_ORDER.index(failure.cause), default=None)
    ended = len(reports) == len(reports_by_host) and all(report.doing == "over" for report in reports)
    asked = [report for name, report in view.living.items() if report.leaving and name in reports_by_host]
    if last.kind == "stop":
        return _draft_while_stopping(view, reports, asked, cause, ended)
    if cause is not None:
        # Ranks that have lost their peers may fail before those are silent for long enough to be lost.
        follows = _CAUSE_ORDER.index(cause.cause) > _CAUSE_ORDER.index("lost")
        return (
            [] if follows and view.silent_since_failure & reports_by_host.keys() else _draft_failure_and_decision(view, cause)
        )
    if ended:
        return [draft_end(run_state.attempt, "all ranks have ended well", 0, final=True)]
    if asked or run_state.end_request:
        name = run_state.end_request or signal.Signals(max(report.leaving for report in asked)).name
        return [_draft_stop(run_state, reports, name)]
    drafts = [*_draft_fallback_note(run_state, reports), *_draft_spares_note(view), *_draft_straggler_notes(view, reports)]
    newest_known_step = max(
        run_state.newest.step, run_state.saved, -1 if run_state.before is None else run_state.budget.best_step
    )
    if memory_placement.is_newer(run_state.memory, reports, newest_known_step) and not run_state.other_job:
        why = "what was in the memory of the hosts before is not needed any more"
        drafts.append(draft_memory(run_state, run_state.memory[:1], why))
    return drafts


def _draft_stop(run_state: RunState, reports: Sequence[AgentReport], text: str) -> Draft:
    """All are to save after the same step, and to end."""
    several = run_state.spec is not None and run_state.spec.hosts > 1
    newest = max((report.newest for report in reports), default=-1)
    step_seconds = max(1e-6, min((report.step_seconds for report in reports), default=1.0))
    ahead = 1 + math.ceil(min(_STOP_AHEAD_SECONDS / step_seconds, 1e6)) if several else 1
    return draft_stop(run_state.attempt, text, StopRequest(newest + ahead, False, ahead))


def _draft_fallback_note(run_state: RunState, reports: Sequence[AgentReport]) -> list[Draft]:
    """It went on from an older step than the newest that was saved, and nobody had decided so."""
    restored = max((report.restored for report in reports), default=-1)
    is_expected = run_state.restored is not None or run_state.before is not None
    if is_expected or not 0 <= restored < run_state.committed:
        return []
    text = (
        f"the ranks go on from step {restored}, as no later one is whole: {run_state.committed} was saved. Or the program has "
        "restored that step by name. Their logs say more"
    )
    return [draft_note(run_state.attempt, text, NoteFacts(restored=restored))]


def _draft_spares_note(view: DecisionInput) -> list[Draft]:
    """Fewer hosts wait than were expected to, or as many again."""
    run_state = view.run_state
    assert run_state.spec is not None
    expected = run_state.spec.spares
    waiting = min(expected, len(_spare_hosts(view)))
    last_noted = expected if run_state.spares is None else run_state.spares
    if waiting == last_noted or view.ran_seconds < run_state.spec.patience_seconds:
        return []
    more = "start the same command on more" if waiting < expected else "as many as were asked for"
    return [draft_note(run_state.attempt, f"{waiting} of {expected} spare hosts wait; {more}", NoteFacts(spares=waiting))]


def _spare_hosts(view: DecisionInput) -> list[str]:
    """Hosts that could take the place of another."""
    taken = {member.name for member in view.run_state.members}
    return sorted(name for name, report in view.maybe_living.items() if name not in taken and not report.leaving)


def _draft_straggler_notes(view: DecisionInput, reports: Sequence[AgentReport]) -> list[Draft]:
    """Each is named once in an attempt. Where that is asked for, and another host waits, the host of the slowest is left out.

    A host is left out once: then it is suspected, and no longer counts among those that wait.
    """
    run_state = view.run_state
    spec = run_state.spec
    assert spec is not None
    found = find_stragglers((pace for report in reports for pace in report.paces), spec.straggler or DEFAULT_FACTOR)
    hosts = {rank: member.name for member in run_state.members for rank in range(member.first, member.first + member.count)}
    spares = [name for name in _spare_hosts(view) if name in view.living and name not in suspected_hosts(run_state.failures)]
    leave_out = bool(found and spec.straggler and spares)
    advice = (
        "" if leave_out
        else "no other host waits" if spec.straggler and spec.hosts > 1
        else "look for what slows it there, or use another host" if spec.hosts == 1
        else "--straggler 2 starts the job again without it, where a spare waits"
    )  # fmt: skip
    drafts = []
    for one in found:
        if one.rank not in run_state.stragglers:
            text = one.describe("" if spec.hosts == 1 else hosts[one.rank], spec.straggler_seconds)
            facts = NoteFacts(straggler=one.rank, host=hosts[one.rank], times=one.slowdown, seconds=one.seconds)
            drafts.append(draft_note(run_state.attempt, f"{text}; {advice}" if advice else text, facts))
    if leave_out:
        host = hosts[found[0].rank]
        text = f"{host} is left out, as rank {found[0].rank} there is slow, and {spares[0]} waits"
        drafts += [
            draft_note(run_state.attempt, text, NoteFacts(left_out=host)),
            _draft_stop(run_state, reports, "--straggler"),
        ]
    return drafts


def _draft_while_stopping(
    view: DecisionInput, reports: Sequence[AgentReport], asked: Sequence[AgentReport], cause: Failure | None, ended: bool
) -> list[Draft]:
    """They were asked to save and to end. What fails by an exit, or hangs, has until the end of the grace all the same."""
    run_state = view.run_state
    last, spec = run_state.last, run_state.spec
    assert last is not None
    assert spec is not None
    is_urgent = any(report.hurry for report in asked)
    uses_ckpt = any(report.heard for report in reports)
    if cause is not None and uses_ckpt and cause.cause not in ("exit", "hang"):
        if run_state.left_out:  # it was no more than a wish
            return _draft_failure_and_decision(view, cause)
        why = f"{cause.detail} before all had saved, as {last.text} asked"
        return _draft_failure_and_decision(view, replace(cause, cause=_stop_cause(view, asked), detail=why))
    if ended or is_urgent or view.waited_seconds > spec.grace_seconds:
        why = (
            f"were ended by {last.text}, with no Checkpointer opened," if not uses_ckpt
            else f"have ended, as {last.text} asked, but not well: {cause.detail}" if ended and cause is not None
            else f"have saved and ended, as {last.text} asked" if ended
            else f"were ended by {last.text}; they were not waited for" if is_urgent
            else f"were ended by {last.text}; they had no time to save"
        )  # fmt: skip
        ranks = [rank for member in run_state.members for rank in range(member.first, member.first + member.count)]
        return _draft_failure_and_decision(
            view, _make_failure(view, _stop_cause(view, asked), ranks, why, reports, run_state.left_out)
        )
    asked_before = facts_of(last, StopRequest)
    asked_now = _next_stop_request(asked_before, reports)
    return [draft_stop(last.attempt, last.text, asked_now)] if asked_now != asked_before else []


def _stop_cause(view: DecisionInput, asked: Sequence[AgentReport]) -> Cause:
    """preempted: only some hosts are to leave, and the others go on."""
    run_state = view.run_state
    several = run_state.spec is not None and run_state.spec.hosts > 1
    if not several or run_state.end_request or len(asked) == len(view.living):
        return "asked"
    return "straggler" if run_state.left_out else "preempted"


def _next_stop_request(asked: StopRequest, reports: Sequence[AgentReport]) -> StopRequest:
    """From what the agents say of their ranks."""
    rank_stops: list[tuple[int, int | None]] = []
    for report in reports:
        if report.doing == "over":
            continue
        if report.stop_step != asked.step or report.stop == "ahead":
            rank_stops.append((min(report.newest, asked.step - 1), None))
        else:
            rank_stops.append((report.newest, asked.step if report.stop == "heard" else None))
    return next_stop(asked, rank_stops)


def _is_lost(member: AttemptHost, report: AgentReport | None) -> bool:
    return report is None or report.incarnation != member.incarnation


def _lost_host_failure(view: DecisionInput, member: AttemptHost) -> Failure:
    reports = [r for r in view.maybe_living.values() if r.attempt == view.run_state.attempt]
    reports = reports or [r for r in view.silent.values() if r.attempt == view.run_state.attempt]
    report = view.maybe_living.get(member.name)
    detail = f"says nothing for {LOST_SECONDS:g} s" if report is None else "was started again"
    return _make_failure(view, "lost", [], detail, reports, member.name)


def _reported_failure(view: DecisionInput, report: AgentReport, reports: Sequence[AgentReport]) -> Failure:
    """With the rank that is behind all others as the cause of a hang: who waits for it hangs, too."""
    host_failure = report.wrong
    assert host_failure is not None
    if host_failure.cause == "hang" and len(reports) > 1:
        behind = [(r.slowest, r.name) for r in reports if r.slowest is not None]
        if behind:
            slowest, host = min(behind, key=lambda each: (each[0].step, -each[0].silent_seconds))
            logs = f"{view.maybe_living[host].logs}/{view.run_state.attempt}"
            return _make_failure(view, "hang", [slowest.rank], slowest.describe(logs), reports, host)
    log = f"{report.logs}/{view.run_state.attempt}/rank-{host_failure.ranks[0]}.log" if host_failure.ranks else ""
    return replace(
        _make_failure(view, host_failure.cause, host_failure.ranks, host_failure.detail, reports, report.name),
        bad=host_failure.bad,
        log=log,
    )


def _make_failure(
    view: DecisionInput, cause: Cause, ranks: Sequence[int], detail: str, reports: Sequence[AgentReport], host: str = ""
) -> Failure:
    """host: where it began. What that one says is of this moment; of the others it may be older than their last steps."""
    host_reports = [report for report in reports if report.name == host] or reports
    step = min((r.step for r in host_reports), default=-1)
    attempt_reports = [r for r in (*view.silent.values(), *reports) if r.attempt == view.run_state.attempt]
    # What a silent host reported before stays true.
    line, committed = max(((r.line, r.committed) for r in attempt_reports), default=(0, -1))
    return Failure(
        cause, tuple(ranks), detail, step if step < 0 else max(step, committed), committed, view.ran_seconds,
        host or (reports[0].name if reports else ""), restored=max((r.restored for r in attempt_reports), default=-1),
        durable=max((r.durable for r in attempt_reports), default=-1),
        step_seconds=max((r.step_seconds for r in host_reports), default=0.0), line=line,
    )  # fmt: skip


# --- what then ---------------------------------------------------------------------------------------------------


def _draft_failure_and_decision(view: DecisionInput, failure: Failure) -> list[Draft]:
    """Both at once; where only the failure came to be written, the next coordinator decides."""
    run_state = view.run_state
    return [draft_failure(run_state.attempt, failure), *_draft_decision(view, [*run_state.failures, failure])]


def _draft_decision(view: DecisionInput, failures: Sequence[Failure]) -> list[Draft]:
    run_state = view.run_state
    decision = decide(failures, run_state.budget, run_state.skip, run_state.before)
    asked = max((r.leaving for r in view.living.values()), default=0)
    status = 128 + asked if failures[-1].cause == "asked" and asked else int(failures[-1].cause != "asked")
    return [draft_decision(run_state.attempt, decision, status)]


def _draft_end(run_state: RunState, text: str, asked: int) -> Draft:
    return draft_end(run_state.attempt, text, 128 + asked if asked else int(not run_state.end_request))
