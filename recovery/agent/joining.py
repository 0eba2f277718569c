"""How an agent comes into a run: it takes part in the one under way, or begins one."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt.recovery.agent.followed_log import FollowedLog
from ckpt.recovery.memory_tier.memory_nodes import nodes_with_objects
from ckpt.recovery.ranks.signals import Signals
from ckpt.recovery.run_log import memory_placement
from ckpt.recovery.run_log.agent_reports import REPORT_SECONDS, AgentReport, decode_reports, find_living_agents
from ckpt.recovery.run_log.entry_drafts import draft_lead, draft_run
from ckpt.recovery.run_log.entry_facts import EndFacts, facts_of
from ckpt.recovery.run_log.run_spec import RunSpec
from ckpt.recovery.run_log.run_state import RunState
from ckpt.storage.base.errors import CkptError, Unavailable
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.plural import format_count

_JOIN_SECONDS = 10.0
"""A state that does not answer for so long at the beginning is no pause: the URL is wrong, or it is not there."""


@dataclass(frozen=True, slots=True)
class Joined:
    """What came of it."""

    run_id: str
    """Of the run that this agent is part of; "" none."""
    status: int | None = None
    """With which the run has ended already, so that there is nothing to do."""


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """What joins."""

    name: str
    """Of this host."""
    spec: RunSpec
    begin_anew: bool
    """Begin anew where a run of several hosts has come to its end."""
    nodes_folder: Path | None
    """Of the nodes that this host serves from its memory."""
    make_report: Callable[[], AgentReport]
    """Makes the report of this agent, as it is now."""


class Joining:
    """Of one agent, once. log: is read on. print_line: for what the user should know."""

    def __init__(self, log: FollowedLog, request: JoinRequest, signals: Signals, print_line: Callable[[str], None]) -> None:
        self._log, self._request, self._signals, self._print = log, request, signals, print_line

    def join(self) -> Joined:
        """Become part of the run under way, or begin one. Where the state does not answer, it is asked again for a while."""
        until = time.monotonic() + _JOIN_SECONDS
        while True:
            try:
                if (joined := self._try_join()) is not None:
                    return joined
            except Unavailable:
                if self._signals.first or time.monotonic() > until:
                    raise
                time.sleep(REPORT_SECONDS)

    def _try_join(self) -> Joined | None:
        """None: somebody else has begun a run meanwhile."""
        self._log.read()
        run_state, spec, single_host = self._log.run_state, self._request.spec, self._request.spec.hosts == 1
        reports = self._log.state.reports()
        is_under_way = run_state.last is not None and not run_state.has_ended
        can_join = is_under_way and not single_host and run_state.spec == spec and not run_state.end_request
        living = self._find_living(reports, can_join)
        self._refuse_conflict(living, run_state, is_under_way)
        if can_join:
            return Joined(run_state.run)
        # Where steps are only in memory, the next run brings them home.
        has_undrained_memory = not living and bool(memory_placement.node_addresses(run_state.memory))
        is_over = run_state.is_final and not single_host and run_state.spec == spec
        if is_over and not self._request.begin_anew and not has_undrained_memory:
            assert run_state.last is not None
            self._print(f"the run has ended: {run_state.last.text}; to begin another, give --again")
            return Joined("", facts_of(run_state.last, EndFacts).status)
        self._refuse_lost_log(run_state)
        return self._begin(reports, living)

    def _find_living(self, reports: Mapping[str, Any], can_join: bool) -> dict[str, AgentReport]:
        """Who of those that have reported lives, where that matters: it takes a while."""
        locked = self._request.spec.hosts == 1 and not self._log.state.is_remote
        must_listen = reports and not locked and (self._request.name in reports or not can_join)
        return find_living_agents(self._log.state) if must_listen else {}

    def _refuse_conflict(self, living: Mapping[str, AgentReport], run_state: RunState, is_under_way: bool) -> None:
        name, single_host = self._request.name, self._request.spec.hosts == 1
        if name in living:
            raise CkptError(f"another host of this run is called {name}; give this one another --name")
        if is_under_way and living and (single_host or run_state.spec != self._request.spec):
            same = "the same command and options as on the other hosts"
            then = "for one job on several hosts give --nnodes on each" if single_host else f"give {same}"
            raise CkptError(
                f"another run is under way there ({_describe_spec(run_state.spec)}); {then}, or another --run-dir or --state"
            )

    def _refuse_lost_log(self, run_state: RunState) -> None:
        folder = self._request.nodes_folder
        if run_state.last is None and folder is not None and (nodes := nodes_with_objects(folder)):
            raise CkptError(
                f"the log of the run is empty, and {nodes[0]} holds steps of a run: the log was lost, or this is another "
                "--state. Give the --state of that run, or another --run-dir; if nobody needs these steps, remove "
                f"{folder}"
            )

    def _begin(self, reports: Mapping[str, Mapping[str, Any]], living: Mapping[str, AgentReport]) -> Joined | None:
        """Begin a run, which this agent leads."""
        run_state, name, spec = self._log.run_state, self._request.name, self._request.spec
        run_id = secrets.token_hex(6)
        drafts = [
            draft_run(run_state.attempt + 1, run_id, spec, _unfinished_reports(run_state, reports)),
            draft_lead(run_state.attempt + 1, f"{name} coordinates", name),
        ]
        own_report = self._request.make_report()
        # Before it leads: the others take who says nothing for lost.
        self._log.state.publish_report(name, own_report.to_facts())
        if not self._log.append(drafts):
            self._log.state.remove_report(name)
            return None
        if run_state.spec is not None and run_state.spec.command != spec.command:
            before = " ".join(run_state.spec.command)
            self._print(f"another job was run there ({before}): the record and the ledger go on; give each its own --run-dir")
        failpoint("agent.begun")
        for other in reports.keys() - living.keys() - {name}:
            self._log.state.remove_report(other)
        self._log.read()
        return Joined(run_id)


def _unfinished_reports(run_state: RunState, facts_by_name: Mapping[str, Mapping[str, Any]]) -> list[AgentReport]:
    """The reports of the newest attempt, where the agents ended before one of them wrote what became of it."""
    if run_state.last is None or run_state.last.kind not in ("start", "stop"):
        return []
    return [each for each in decode_reports(facts_by_name).values() if each.attempt == run_state.attempt]


def _describe_spec(spec: RunSpec | None) -> str:
    if spec is None:
        return ""
    ranks = f"{format_count(spec.ranks, 'rank')}{' each' if spec.hosts > 1 else ''}"
    return f"{format_count(spec.hosts, 'host')} with {ranks}: {' '.join(spec.command)}"
