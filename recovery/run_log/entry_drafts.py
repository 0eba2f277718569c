"""Entries to be written, by their kind: the one place that says which fields they have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ckpt.recovery.policy.coordinated_stop import StopRequest
from ckpt.recovery.policy.decide import Decision, Failure
from ckpt.recovery.run_log import memory_placement
from ckpt.recovery.run_log.agent_reports import AgentReport
from ckpt.recovery.run_log.base import Draft
from ckpt.recovery.run_log.entry_facts import NoteFacts
from ckpt.recovery.run_log.memory_placement import MemoryNamespace
from ckpt.recovery.run_log.run_spec import AttemptHost, RunSpec
from ckpt.recovery.run_log.run_state import RunState


@dataclass(frozen=True, slots=True)
class AttemptStart:
    """What begins with an attempt."""

    attempt: int
    members: Sequence[AttemptHost]
    first: AgentReport
    """Of the host that has rank 0."""
    environment: Mapping[str, str]
    """What the ranks are given of the attempts before."""
    memory: Sequence[MemoryNamespace]


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


def draft_lead(attempt: int, text: str, name: str) -> Draft:
    """The agent of this name leads from now on."""
    return Draft(attempt, "lead", text, {"name": name})


def draft_start(start: AttemptStart, text: str, command: Sequence[str]) -> Draft:
    """The members start their ranks."""
    first = start.first
    facts = {
        "ranks": sum(member.count for member in start.members),
        "command": list(command),
        "members": [asdict(member) for member in start.members],
        "address": first.address,
        "port": first.port,
        "pages": first.pages,
        "logs": f"{first.logs}/{start.attempt}",
        "pid": first.pid,
        "environment": start.environment,
        "memory": memory_placement.to_facts(start.memory),
    }
    return Draft(start.attempt, "start", text, facts)


def draft_stop(attempt: int, text: str, request: StopRequest) -> Draft:
    """All ranks save after the same step, and end."""
    return Draft(attempt, "stop", text, asdict(request))


def draft_failure(attempt: int, failure: Failure) -> Draft:
    """An attempt has ended."""
    facts: dict[str, Any] = asdict(failure)
    return Draft(attempt, "failure", facts.pop("detail"), facts)


def draft_decision(attempt: int, decision: Decision, status: int) -> Draft:
    """What is done next. status: of the run, where it ends."""
    facts: dict[str, Any] = {"action": decision.action, "wait": decision.wait_seconds}
    facts |= {"before": decision.before, "skip": decision.skip, "limit": decision.limit}
    if decision.action == "halt":
        facts["status"] = status
    return Draft(attempt, "decision", decision.reason, facts)


def draft_memory(run_state: RunState, memory: Sequence[MemoryNamespace], text: str) -> Draft:
    """From now on these memories are in use, and no others."""
    return Draft(max(0, run_state.attempt), "memory", text, {"memory": memory_placement.to_facts(memory)})


def draft_note(attempt: int, text: str, facts: NoteFacts | None = None) -> Draft:
    """Only to be read, but for what it notes."""
    return Draft(
        attempt, "note", text, {name: value for name, value in asdict(facts or NoteFacts()).items() if value is not None}
    )


def draft_end(attempt: int, text: str, status: int, final: bool | None = None) -> Draft:
    """The run is over. final: whether it came to its end by itself; None: the entry leaves that out, which is no."""
    return Draft(attempt, "end", text, {"status": status} | ({} if final is None else {"final": final}))
