"""A requested stop: all ranks save after the same step and end, within the grace period of the run. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ckpt.recovery.coordinator.decision_input import DecisionInput
from ckpt.recovery.coordinator.failure_entries import draft_failure_and_decision, make_failure
from ckpt.recovery.policy.coordinated_stop import StopRequest, next_stop
from ckpt.recovery.policy.failure import Cause, Failure
from ckpt.recovery.run_log.agent_reports import AgentReport
from ckpt.recovery.run_log.base import Draft
from ckpt.recovery.run_log.entry_drafts import draft_stop
from ckpt.recovery.run_log.entry_facts import facts_of
from ckpt.recovery.run_log.run_state import RunState

_STOP_AHEAD_SECONDS = 0.5
"""With several hosts: how far ahead the first stop step lies. A few times the delay until the agents read it."""


def draft_stop_request(run_state: RunState, reports: Sequence[AgentReport], text: str) -> Draft:
    """Return the first stop request of an attempt. Its step lies so far ahead that the agents of all hosts read it in time.

    reports: of the hosts of the attempt.
    text: why the ranks stop, such as the name of a signal.
    """
    several = run_state.spec is not None and run_state.spec.hosts > 1
    newest = max((report.newest for report in reports), default=-1)
    step_seconds = max(1e-6, min((report.step_seconds for report in reports), default=1.0))
    ahead = 1 + math.ceil(min(_STOP_AHEAD_SECONDS / step_seconds, 1e6)) if several else 1
    return draft_stop(run_state.attempt, text, StopRequest(newest + ahead, False, ahead))


def draft_while_stopping(
    view: DecisionInput, reports: Sequence[AgentReport], leaving: Sequence[AgentReport], cause: Failure | None, ended: bool
) -> list[Draft]:
    """Return the entries after a stop request. A rank that exits with an error or hangs still has the whole grace period.

    reports: of all hosts of the attempt.
    leaving: of those that a signal has asked to leave.
    cause: the first failure, if there is one.
    ended: whether all ranks have ended.
    """
    run_state = view.run_state
    last, spec = run_state.last, run_state.spec
    assert last is not None
    assert spec is not None
    is_urgent = any(report.hurry for report in leaving)
    uses_ckpt = any(report.uses_ckpt for report in reports)
    if cause is not None and uses_ckpt and cause.cause not in ("exit", "hang"):
        if run_state.left_out:  # nobody requested this stop, so the failure is the cause of the end
            return draft_failure_and_decision(view, cause)
        detail = f"{cause.detail} while the ranks saved on {last.text},"
        return draft_failure_and_decision(view, replace(cause, cause=_stop_cause(view, leaving), detail=detail))
    if ended or is_urgent or view.waited_seconds > spec.grace_seconds:
        detail = (
            f"were ended by {last.text}, with no Checkpointer opened," if not uses_ckpt
            else f"have ended on {last.text}, not all with success ({cause.detail})," if ended and cause is not None
            else f"have saved and ended on {last.text}" if ended
            else f"were ended by {last.text}; they were not waited for" if is_urgent
            else f"were ended by {last.text}; they had no time to save"
        )  # fmt: skip
        ranks = [rank for host in run_state.attempt_hosts for rank in range(host.first, host.first + host.count)]
        return draft_failure_and_decision(
            view, make_failure(view, _stop_cause(view, leaving), ranks, detail, reports, run_state.left_out)
        )
    request = facts_of(last, StopRequest)
    next_request = _next_stop_request(request, reports)
    return [draft_stop(last.attempt, last.text, next_request)] if next_request != request else []


def _stop_cause(view: DecisionInput, leaving: Sequence[AgentReport]) -> Cause:
    """Return the cause of a requested stop. It is "preempted" if only some hosts leave and the others continue."""
    run_state = view.run_state
    several = run_state.spec is not None and run_state.spec.hosts > 1
    if not several or run_state.end_request or len(leaving) == len(view.living):
        return "asked"
    return "straggler" if run_state.left_out else "preempted"


def _next_stop_request(asked: StopRequest, reports: Sequence[AgentReport]) -> StopRequest:
    """Return the next stop request, by the reports of the agents."""
    rank_stops: list[tuple[int, int | None]] = []
    for report in reports:
        if report.doing == "over":
            continue
        if report.stop_step != asked.step or report.stop == "ahead":
            rank_stops.append((min(report.newest, asked.step - 1), None))
        else:
            rank_stops.append((report.newest, asked.step if report.stop == "acknowledged" else None))
    return next_stop(asked, rank_stops)
