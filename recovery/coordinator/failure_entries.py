"""The failures of an attempt, by the reports and the silence of hosts, and their entries in the run log. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckpt.recovery.coordinator.decision_input import DecisionInput
from ckpt.recovery.policy.failure import Cause, Failure
from ckpt.recovery.policy.restart_decision import decide
from ckpt.recovery.run_log.agent_reports import LOST_SECONDS, AgentReport, PastProgress
from ckpt.recovery.run_log.base import Draft
from ckpt.recovery.run_log.entry_drafts import draft_decision, draft_failure
from ckpt.recovery.run_log.run_spec import AttemptHost


def is_lost(host: AttemptHost, report: AgentReport | None) -> bool:
    """Return whether the agent that an attempt was assigned to is gone: it has no report, or was started again."""
    return report is None or report.incarnation != host.incarnation


def lost_host_failure(view: DecisionInput, host: AttemptHost) -> Failure:
    """Return the failure of an attempt by the loss of one of its hosts."""
    reports = [r for r in view.maybe_living.values() if r.attempt == view.run_state.attempt]
    reports = reports or [r for r in view.silent.values() if r.attempt == view.run_state.attempt]
    report = view.maybe_living.get(host.name)
    detail = f"sent no report for {LOST_SECONDS:g} s" if report is None else "was started again"
    return make_failure(view, "lost", [], detail, reports, host.name)


def reported_failure(view: DecisionInput, report: AgentReport, reports: Sequence[AgentReport]) -> Failure:
    """Return the failure in a report. The cause of a hang is the rank that is behind all others, as the others wait for it."""
    host_failure = report.wrong
    assert host_failure is not None
    if host_failure.cause == "hang" and len(reports) > 1:
        behind = [(r.slowest, r.name) for r in reports if r.slowest is not None]
        if behind:
            slowest, host = min(behind, key=lambda each: (each[0].step, -each[0].silent_seconds))
            logs = f"{view.maybe_living[host].logs}/{view.run_state.attempt}"
            return make_failure(view, "hang", [slowest.rank], slowest.describe(logs), reports, host)
    log = f"{report.logs}/{view.run_state.attempt}/rank-{host_failure.ranks[0]}.log" if host_failure.ranks else ""
    return replace(
        make_failure(view, host_failure.cause, host_failure.ranks, host_failure.detail, reports, report.name),
        bad=host_failure.bad,
        log=log,
    )


def make_failure(
    view: DecisionInput, cause: Cause, ranks: Sequence[int], detail: str, reports: Sequence[AgentReport], host: str = ""
) -> Failure:
    """Return the failure of an attempt.

    host: where it began. The report of this host is current. Those of other hosts may be older than their last steps.
    """
    host_reports = [report for report in reports if report.name == host] or reports
    step = min((r.step for r in host_reports), default=-1)
    attempt_reports = [r for r in (*view.silent.values(), *reports) if r.attempt == view.run_state.attempt]
    # Commits that a silent host has reported, or a killed agent, stay valid.
    killed = [r.past for r in view.maybe_living.values() if r.past is not None and r.past.attempt == view.run_state.attempt]
    progress: list[AgentReport | PastProgress] = [*attempt_reports, *killed]
    line, committed = max(((r.line, r.committed) for r in progress), default=(0, -1))
    return Failure(
        cause, tuple(ranks), detail, step if step < 0 else max(step, committed), committed, view.ran_seconds,
        host or (reports[0].name if reports else ""), restored=max((r.restored for r in progress), default=-1),
        durable=max((r.durable for r in progress), default=-1),
        step_seconds=max((r.step_seconds for r in host_reports or killed), default=0.0), line=line,
        uses_ckpt=any(r.uses_ckpt for r in attempt_reports),
    )  # fmt: skip


def draft_failure_and_decision(view: DecisionInput, failure: Failure) -> list[Draft]:
    """Return both entries, to be appended together. If the decision can't be read later, the leader then decides again."""
    run_state = view.run_state
    return [draft_failure(run_state.attempt, failure), *draft_decisions(view, [*run_state.failures, failure])]


def draft_decisions(view: DecisionInput, failures: Sequence[Failure]) -> list[Draft]:
    """Return the entry with the decision after these failures, the last of which is new."""
    run_state = view.run_state
    decision = decide(failures, run_state.budget, run_state.skip, run_state.restore_step_limit)
    asked = max((r.leaving for r in view.living.values()), default=0)
    status = 128 + asked if failures[-1].cause == "asked" and asked else int(failures[-1].cause != "asked")
    return [draft_decision(run_state.attempt, decision, status)]
