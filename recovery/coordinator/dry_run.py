"""Predicts the decisions after a supposed failure, by the same functions that decide in a run. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpt.recovery.coordinator.decision_input import DecisionInput
from ckpt.recovery.coordinator.transitions import draft_next_entries
from ckpt.recovery.run_log.agent_reports import AgentReport, HostFailure
from ckpt.recovery.run_log.base import Draft, LogEntry
from ckpt.recovery.run_log.run_state import RunState


def predict_entries(
    entries: Sequence[LogEntry], reports: Mapping[str, AgentReport], lost: Sequence[str], killed: int | None
) -> list[Draft]:
    """Return the entries that would follow, up to the start of the next attempt or the end of the run.

    entries: the log of the run so far.
    reports: the reports of the agents, by name.
    lost: the hosts that are supposed to be lost.
    killed: the rank that is supposed to be killed; None none.
    """
    run_state = RunState().apply_entries(entries)
    living = {name: report for name, report in reports.items() if name not in lost}
    for host in run_state.attempt_hosts:
        if killed is not None and host.first <= killed < host.first + host.count and host.name in living:
            living[host.name] = replace(living[host.name], wrong=HostFailure("signal", (killed,), "was killed by SIGKILL"))
    found: list[Draft] = []
    waited = 0.0
    for _ in range(8):
        drafts = draft_next_entries(DecisionInput(run_state, living, living, waited))
        number = run_state.number
        run_state = run_state.apply_entries(
            [LogEntry(number + 1 + i, 0.0, d.attempt, d.kind, d.text, dict(d.facts)) for i, d in enumerate(drafts)]
        )
        found += drafts
        if run_state.has_ended or (drafts and drafts[-1].kind == "start"):
            return found
        idle = {name: replace(r, doing="idle", wrong=None) for name, r in living.items()}
        living, waited = idle, (0.0 if drafts else 1e9)  # suppose that every wait ends without a result
    return found
