"""Computes the next entries of the run log from the log and the reports of the agents. Pure.

    run → start → failure → decision → start → … → end
               ↘ stop ↗      (the run was requested to end, or a host leaves: all ranks save after the same step)

The coordinator of each agent calls `draft_next_entries` in a loop while its agent leads. A new leader continues where the
entries of a dead one end.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from ckpt.recovery.coordinator.decision_input import DecisionInput
from ckpt.recovery.coordinator.failure_entries import (
    draft_decisions,
    draft_failure_and_decision,
    is_lost,
    lost_host_failure,
    reported_failure,
)
from ckpt.recovery.coordinator.requested_stop import draft_stop_request, draft_while_stopping
from ckpt.recovery.policy.failure import Cause
from ckpt.recovery.policy.hosts_of_next_attempt import choose_hosts, suspected_hosts
from ckpt.recovery.policy.stragglers import DEFAULT_FACTOR, find_stragglers
from ckpt.recovery.run_log import memory_placement
from ckpt.recovery.run_log.agent_reports import AgentReport
from ckpt.recovery.run_log.base import Draft
from ckpt.recovery.run_log.entry_drafts import (
    AttemptStart,
    draft_end,
    draft_memory,
    draft_note,
    draft_start,
)
from ckpt.recovery.run_log.entry_facts import DecisionFacts, NoteFacts, facts_of
from ckpt.recovery.run_log.run_spec import AttemptHost, RunSpec
from ckpt.recovery.run_log.run_state import RunState
from ckpt.storage.base.plural import format_count

_ARRIVAL_SECONDS = 2.0
"""Within this time, hosts that are started together have all arrived."""

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
"""Of several failures at a time, the first in this order is the cause: ranks that lose a peer exit with an error."""


def draft_next_entries(view: DecisionInput) -> list[Draft]:
    """Return the entries to append now; none if nothing has changed."""
    last = view.run_state.last
    assert last is not None
    if last.kind == "failure":
        return draft_decisions(view, view.run_state.failures)
    if last.kind in ("start", "stop"):
        return _draft_while_running(view)
    if last.kind == "decision" and (decision := facts_of(last, DecisionFacts)).action == "halt":
        assert decision.status is not None
        return [draft_end(last.attempt, last.text, decision.status, final=view.run_state.failures[-1].cause != "asked")]
    return _draft_start(view) if last.kind in ("run", "decision") else []


# --- start of an attempt -----------------------------------------------------------------------------------------


def _draft_start(view: DecisionInput) -> list[Draft]:
    run_state = view.run_state
    spec, last = run_state.spec, run_state.last
    assert spec is not None
    assert last is not None
    signal_number = max((report.leaving for report in view.living.values()), default=0)
    staying = {name: report for name, report in view.living.items() if not report.leaving}
    if run_state.end_request or (signal_number and not staying):
        return [_draft_end(run_state, run_state.end_request or "a signal requested the end", signal_number)]
    if view.waited_seconds < run_state.wait_seconds:
        return []
    if any(report.doing != "idle" for report in view.maybe_living.values()):
        return []  # the ranks of the attempt before must have ended
    ready = sorted(staying, key=lambda name: (staying[name].joined, name))
    before = [host.name for host in run_state.attempt_hosts]
    # Before the first attempt hosts may arrive late, so the wait is longer.
    has_waited = view.waited_seconds >= (spec.patience_seconds if before else spec.give_up_seconds)
    choice = choose_hosts(before, ready, suspected_hosts(run_state.failures), spec.hosts, spec.least, has_waited)
    if choice is None:
        if view.waited_seconds < spec.give_up_seconds:
            return _draft_host_wait_note(view, spec, len(ready))
        arrived = f"{len(ready)} of {format_count(spec.least, 'host')} joined within {spec.give_up_seconds:g} s"
        return [_draft_end(run_state, f"{arrived}; start ckpt-run on more, or lower --min", 0)]
    if hosts := _hosts_awaited_for_memory(view):
        return _draft_memory_wait_note(run_state, hosts)
    newest = (run_state.newest.memory, *run_state.newest_of_others)
    memory = memory_placement.choose_memories(run_state.memory, {name: staying[name] for name in choice.hosts}, newest)
    if memory is None:  # the memory of a host is still starting; after some seconds it counts as off
        return []
    attempt = run_state.attempt + 1
    chosen = [AttemptHost(name, staying[name].incarnation, i * spec.ranks, spec.ranks) for i, name in enumerate(choice.hosts)]
    start = AttemptStart(attempt, chosen, staying[choice.hosts[0]], run_state.environment, memory)
    ranks = format_count(len(chosen) * spec.ranks, "rank")
    where = "" if spec.hosts == 1 else f" on {', '.join(choice.hosts)}"
    changed = f", {choice.reason}" if choice.reason else ""
    return [draft_start(start, f"{ranks}{where}{changed}: {' '.join(spec.command)}", spec.command)]


def _hosts_awaited_for_memory(view: DecisionInput) -> tuple[str, ...]:
    """Return the silent hosts to wait for, because only they may have the newest steps."""
    if view.waited_seconds >= view.run_state.memory_wait_seconds:
        return ()
    return memory_placement.hosts_to_await(view.run_state.newest.memory, view.maybe_living)


def _draft_memory_wait_note(run_state: RunState, hosts: tuple[str, ...]) -> list[Draft]:
    """Return the note about silent hosts that are awaited. It is written once for the same hosts."""
    if run_state.awaited == hosts:
        return []
    steps, seconds = format_count(run_state.newest.at_stake, "step"), run_state.memory_wait_seconds
    text = f"waiting up to {seconds:.0f} s for {', '.join(hosts)}: silent, and the only ones whose memory may have {steps}"
    return [draft_note(max(0, run_state.attempt), text, NoteFacts(awaited=hosts))]


def _draft_host_wait_note(view: DecisionInput, spec: RunSpec, arrived: int) -> list[Draft]:
    """Return the note about how many hosts have arrived while more are awaited. It is written when the number changes."""
    if view.waited_seconds < _ARRIVAL_SECONDS or arrived == view.run_state.arrived_hosts:
        return []
    seconds = spec.patience_seconds if view.run_state.attempt_hosts else spec.give_up_seconds
    if arrived >= spec.least:
        then = f"the run continues with these {seconds:g} s after it began to wait"
    else:
        then = f"the run gives up {spec.give_up_seconds:g} s after it began to wait"
    advice = f"start the same command on {spec.hosts - arrived} more, with the same --state (agents of one host: --run-dir)"
    text = f"{arrived} of {spec.hosts} hosts have joined; {advice}; {then}"
    return [draft_note(max(0, view.run_state.attempt), text, NoteFacts(came=arrived))]


# --- while an attempt runs ---------------------------------------------------------------------------------------


def _draft_while_running(view: DecisionInput) -> list[Draft]:
    run_state = view.run_state
    last, spec = run_state.last, run_state.spec
    assert last is not None
    assert spec is not None
    reports_by_host = {host.name: view.maybe_living.get(host.name) for host in run_state.attempt_hosts}
    reports = [report for report in reports_by_host.values() if report is not None and report.attempt == run_state.attempt]
    failures = [lost_host_failure(view, host) for host in run_state.attempt_hosts if is_lost(host, reports_by_host[host.name])]
    failures += [reported_failure(view, report, reports) for report in reports if report.wrong is not None]
    first_failure = min(failures, key=lambda failure: _CAUSE_ORDER.index(failure.cause), default=None)
    ended = len(reports) == len(reports_by_host) and all(report.doing == "over" for report in reports)
    leaving = [report for name, report in view.living.items() if report.leaving and name in reports_by_host]
    if last.kind == "stop":
        return draft_while_stopping(view, reports, leaving, first_failure, ended)
    if first_failure is not None:
        # Ranks that lose a peer may fail before the peer's host is silent for long enough to be lost.
        may_have_lost_host_as_cause = _CAUSE_ORDER.index(first_failure.cause) > _CAUSE_ORDER.index("lost")
        if may_have_lost_host_as_cause and view.silent_since_failure & reports_by_host.keys():
            return []
        return draft_failure_and_decision(view, first_failure)
    if ended:
        return [draft_end(run_state.attempt, "all ranks have ended with success", 0, final=True)]
    if leaving or run_state.end_request:
        reason = run_state.end_request or signal.Signals(max(report.leaving for report in leaving)).name
        return [draft_stop_request(run_state, reports, reason)]
    drafts = [*_draft_fallback_note(run_state, reports), *_draft_spares_note(view), *_draft_straggler_entries(view, reports)]
    newest_known_step = max(
        run_state.newest.step, run_state.saved, -1 if run_state.restore_step_limit is None else run_state.budget.best_step
    )
    if memory_placement.is_newer(run_state.memory, reports, newest_known_step) and not run_state.other_job:
        text = "the steps in the memory of earlier attempts are not needed any more"
        drafts.append(draft_memory(run_state, run_state.memory[:1], text))
    return drafts


def _draft_fallback_note(run_state: RunState, reports: Sequence[AgentReport]) -> list[Draft]:
    """Return a note if the attempt resumed from an older step than the newest saved one, without a decision to do so."""
    restored = max((report.restored for report in reports), default=-1)
    is_expected = run_state.restored is not None or run_state.restore_step_limit is not None
    if is_expected or not 0 <= restored < run_state.committed:
        return []
    text = (
        f"the ranks continue from step {restored}, although step {run_state.committed} was saved: the later steps are damaged, "
        "or the program asked for this one; look at the logs of the ranks"
    )
    return [draft_note(run_state.attempt, text, NoteFacts(restored=restored))]


def _draft_spares_note(view: DecisionInput) -> list[Draft]:
    """Return a note if the number of waiting spares has changed: fewer than expected, or enough again."""
    run_state = view.run_state
    assert run_state.spec is not None
    expected = run_state.spec.spares
    waiting = min(expected, len(_spare_hosts(view)))
    last_noted = expected if run_state.spares is None else run_state.spares
    if waiting == last_noted or view.ran_seconds < run_state.spec.patience_seconds:
        return []
    more = "start the same command on more" if waiting < expected else "no more are needed"
    return [draft_note(run_state.attempt, f"{waiting} of {expected} spare hosts wait; {more}", NoteFacts(spares=waiting))]


def _spare_hosts(view: DecisionInput) -> list[str]:
    """Return the hosts that could replace another host."""
    taken = {host.name for host in view.run_state.attempt_hosts}
    return sorted(name for name, report in view.maybe_living.items() if name not in taken and not report.leaving)


def _draft_straggler_entries(view: DecisionInput, reports: Sequence[AgentReport]) -> list[Draft]:
    """Return notes that name new stragglers, and the stop that leaves a host out.

    Each straggler is named once per attempt. With --straggler, the host of the slowest rank is left out if a spare waits. A
    host is left out once, because it is suspected from then on, and no longer counts as a spare.
    """
    run_state = view.run_state
    spec = run_state.spec
    assert spec is not None
    found = find_stragglers((pace for report in reports for pace in report.paces), spec.straggler or DEFAULT_FACTOR)
    hosts = {rank: host.name for host in run_state.attempt_hosts for rank in range(host.first, host.first + host.count)}
    spares = [name for name in _spare_hosts(view) if name in view.living and name not in suspected_hosts(run_state.failures)]
    leave_out = bool(found and spec.straggler and spares)
    advice = (
        "" if leave_out
        else "no host waits that could replace it" if spec.straggler and spec.hosts > 1
        else "look for what slows it there, or use another host" if spec.hosts == 1
        else "--straggler 2 starts the job again without it, where a spare waits"
    )  # fmt: skip
    drafts = []
    for straggler in found:
        rank = straggler.rank
        if rank not in run_state.stragglers:
            text = straggler.describe("" if spec.hosts == 1 else hosts[rank], spec.straggler_seconds)
            facts = NoteFacts(straggler=rank, host=hosts[rank], times=straggler.slowdown, seconds=straggler.seconds)
            drafts.append(draft_note(run_state.attempt, f"{text}; {advice}" if advice else text, facts))
    if leave_out:
        host = hosts[found[0].rank]
        text = f"{host} is left out, as rank {found[0].rank} there is slow, and {spares[0]} waits"
        drafts += [
            draft_note(run_state.attempt, text, NoteFacts(left_out=host)),
            draft_stop_request(run_state, reports, "--straggler"),
        ]
    return drafts


def _draft_end(run_state: RunState, text: str, signal_number: int) -> Draft:
    """Return the end of a run between two attempts. signal_number: the signal that requested it; 0 for none."""
    return draft_end(run_state.attempt, text, 128 + signal_number if signal_number else int(not run_state.end_request))
