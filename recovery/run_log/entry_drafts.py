"""Builds the drafts of all kinds of entries of the run log; defines which fields each has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from ckpt.recovery.policy.coordinated_stop import StopRequest
from ckpt.recovery.policy.failure import Failure
from ckpt.recovery.policy.restart_decision import Decision
from ckpt.recovery.run_log import memory_placement
from ckpt.recovery.run_log.agent_reports import AgentReport
from ckpt.recovery.run_log.base import Draft
from ckpt.recovery.run_log.entry_facts import NoteFacts
from ckpt.recovery.run_log.memory_placement import MemoryNamespace
from ckpt.recovery.run_log.run_spec import AttemptHost, RunSpec
from ckpt.recovery.run_log.run_state import RunState


@dataclass(frozen=True, slots=True)
class AttemptStart:
    """The hosts of an attempt that starts, and what their ranks get."""

    attempt: int
    hosts: Sequence[AttemptHost]
    first: AgentReport
    """The report of the host that has rank 0."""
    environment: Mapping[str, str]
    """Environment variables of the ranks that follow from earlier attempts."""
    memory: Sequence[MemoryNamespace]


def draft_run(attempt: int, name: str, spec: RunSpec, reports: Sequence[AgentReport] = ()) -> Draft:
    """Return the draft that begins a run.

    attempt: the number of its first attempt.
    reports: the reports of the attempt before, if the log does not contain its end.
    """
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
    """Return the draft by which the agent of this name becomes the leader."""
    return Draft(attempt, "lead", text, {"name": name})


def draft_start(start: AttemptStart, text: str, command: Sequence[str]) -> Draft:
    """Return the draft that makes the hosts start their ranks."""
    first = start.first
    facts = {
        "ranks": sum(host.count for host in start.hosts),
        "command": list(command),
        "members": [asdict(host) for host in start.hosts],
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
    """Return the draft that makes all ranks save after the same step and end."""
    return Draft(attempt, "stop", text, asdict(request))


def draft_failure(attempt: int, failure: Failure) -> Draft:
    """Return the draft that ends an attempt."""
    facts = asdict(failure)
    return Draft(attempt, "failure", facts.pop("detail"), facts)


def draft_decision(attempt: int, decision: Decision, status: int) -> Draft:
    """Return the draft of a decision. status: the exit status of the run, if the decision is to halt."""
    facts: dict[str, object] = {"action": decision.action, "wait": decision.wait_seconds}
    facts |= {"before": decision.restore_step_limit, "skip": decision.skip, "limit": decision.loss_limit}
    if decision.action == "halt":
        facts["status"] = status
    return Draft(attempt, "decision", decision.reason, facts)


def draft_memory(run_state: RunState, memory: Sequence[MemoryNamespace], text: str) -> Draft:
    """Return the draft that replaces the list of memory namespaces in use."""
    return Draft(max(0, run_state.attempt), "memory", text, {"memory": memory_placement.to_facts(memory)})


def draft_note(attempt: int, text: str, facts: NoteFacts | None = None) -> Draft:
    """Return the draft of a note: a text for people, and the few facts that later decisions use."""
    return Draft(
        attempt, "note", text, {name: value for name, value in asdict(facts or NoteFacts()).items() if value is not None}
    )


def draft_end(attempt: int, text: str, status: int, final: bool | None = None) -> Draft:
    """Return the draft that ends the run.

    status: the exit status of the run.
    final: whether the run ended by itself. None leaves the field out, which means no.
    """
    return Draft(attempt, "end", text, {"status": status} | ({} if final is None else {"final": final}))
