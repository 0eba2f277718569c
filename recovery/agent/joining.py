"""`Joining`, the start of an agent in a run: it joins the run that is under way, or begins one."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt.recovery.agent.followed_log import FollowedLog
from ckpt.recovery.memory_tier.memory_nodes import nodes_with_steps
from ckpt.recovery.ranks.signals import Signals
from ckpt.recovery.run_log import memory_placement
from ckpt.recovery.run_log.agent_name import NameTaken, holder_of
from ckpt.recovery.run_log.agent_reports import (
    LOST_SECONDS,
    REPORT_SECONDS,
    AgentReport,
    PastProgress,
    decode_reports,
    find_living_agents,
)
from ckpt.recovery.run_log.entry_drafts import draft_lead, draft_run
from ckpt.recovery.run_log.entry_facts import EndFacts, facts_of
from ckpt.recovery.run_log.run_spec import RunSpec
from ckpt.recovery.run_log.run_state import RunState
from ckpt.storage.base.errors import CkptError, LoginLost, Unavailable
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.plural import format_count

_JOIN_SECONDS = 10.0
"""A run log that does not answer for this long at the start is not only slow: its URL is wrong, or it does not exist."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The result of joining."""

    run_id: str
    """The random name of the run that this agent takes part in; "" none."""
    status: int | None = None
    """The exit status of the run if it has already ended, so that there is nothing to do; 128 + n if signal n came first."""
    has_begun_run: bool = False
    """Whether this agent has begun the run, and leads it until another agent takes over."""
    past: PastProgress | None = None
    """The progress that a killed agent of the same name has reported in the current attempt."""


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """What an agent needs to join a run."""

    name: str
    """The name of this host."""
    spec: RunSpec
    begin_anew: bool
    """Whether to begin another run if the run of several hosts has ended."""
    nodes_folder: Path | None
    """The folder of the memory nodes that this host serves, or served in runs on several hosts; None: it serves none."""
    make_report: Callable[[], AgentReport]
    """Returns the current report of this agent."""


class Joining:
    """Joins one agent to a run, once. print_line: prints a message for the user."""

    def __init__(self, log: FollowedLog, request: JoinRequest, signals: Signals, print_line: Callable[[str], None]) -> None:
        self._log, self._request, self._signals, self._print = log, request, signals, print_line
        self._is_wait_printed = False

    def join(self) -> Joined:
        """Join the run that is under way, or begin one.

        If the run log does not answer, or its server has forgotten the login, try again for a while. While a run is drained,
        wait for its end.
        """
        until = time.monotonic() + _JOIN_SECONDS
        while True:
            try:
                if (joined := self._try_join()) is not None:
                    return joined
                until = time.monotonic() + _JOIN_SECONDS
            except (Unavailable, LoginLost):
                if self._signals.first or time.monotonic() > until:
                    raise
                time.sleep(REPORT_SECONDS)

    def _try_join(self) -> Joined | None:
        """Try once. Return None if it must be tried again: another agent has begun a run, or one is drained now."""
        self._log.read()
        run_state, spec, single_host = self._log.run_state, self._request.spec, self._request.spec.hosts == 1
        reports = self._log.run_log.reports()
        is_under_way = run_state.last is not None and not run_state.has_ended
        can_join = is_under_way and not single_host and run_state.spec == spec and not run_state.end_request
        living = self._find_living(reports, can_join)
        self._refuse_conflict(living, run_state, is_under_way)
        if can_join:
            predecessor = decode_reports(reports).get(self._request.name)
            past = None if predecessor is None else predecessor.progress_in(run_state.attempt)
            self._take_name(reports, past)
            return Joined(run_state.run, past=past)
        if is_under_way and run_state.end_request and living:
            return self._wait_for_drain(run_state)
        # If steps are only in memory, another run is begun, which copies them to the repository.
        has_undrained_memory = not living and bool(memory_placement.node_addresses(run_state.memory))
        is_over = run_state.is_final and not single_host and run_state.spec == spec
        if is_over and not self._request.begin_anew and not has_undrained_memory:
            assert run_state.last is not None
            self._print(f"the run has ended: {run_state.last.text}; to begin another, give --again")
            return Joined("", facts_of(run_state.last, EndFacts).status)
        self._refuse_lost_log(run_state)
        self._refuse_unserved_memory(run_state)
        return self._begin(reports, living)

    def _find_living(self, reports: Mapping[str, Mapping[str, object]], can_join: bool) -> dict[str, AgentReport]:
        """Return the reports of living agents if the decision depends on them, as it takes a while to find them."""
        # The run log of a job on one host is in a folder that this agent has locked, so no other agent of the job is alive.
        is_alone = self._request.spec.hosts == 1 and not self._log.run_log.is_remote
        is_name_in_use = holder_of(reports.get(self._request.name)) not in ("", self._request.make_report().incarnation)
        must_observe = reports and not is_alone and (is_name_in_use or not can_join)
        # Another agent gets the name only once the hosts of the run count its previous holder as lost.
        seconds = LOST_SECONDS + REPORT_SECONDS if is_name_in_use else 3 * REPORT_SECONDS
        return find_living_agents(self._log.run_log, seconds) if must_observe else {}

    def _take_name(self, reports: Mapping[str, Mapping[str, object]], past: PastProgress | None = None) -> None:
        """Publish a first report. Raises NameTaken if another agent has done so since `reports` were read."""
        name = self._request.name
        replaces = holder_of(reports.get(name))
        failpoint("agent.take_name")
        self._log.run_log.publish_report(name, replace(self._request.make_report(), past=past).to_facts(), replaces)

    def _wait_for_drain(self, run_state: RunState) -> Joined | None:
        """Wait a moment, because the ranks of the other hosts save now. Return a result only if a signal has arrived."""
        if self._signals.first:
            return Joined("", 128 + self._signals.first)
        if not self._is_wait_printed:
            self._is_wait_printed = True
            self._print(f"this host waits until the run has ended on {run_state.end_request}; then it begins the next run")
        time.sleep(REPORT_SECONDS)
        return None

    def _refuse_conflict(self, living: Mapping[str, AgentReport], run_state: RunState, is_under_way: bool) -> None:
        name, single_host = self._request.name, self._request.spec.hosts == 1
        if name in living:
            raise NameTaken(name, living[name].to_facts())
        if is_under_way and living and (single_host or run_state.spec != self._request.spec):
            advice = (
                "for one job on several hosts give --nnodes on each" if single_host
                else "give the same command and options as on the other hosts"
            )  # fmt: skip
            raise CkptError(
                f"another run uses this run log ({_describe_spec(run_state.spec)}); {advice}, or give each job "
                f"{self._log.run_log.own_options}"
            )

    def _refuse_lost_log(self, run_state: RunState) -> None:
        folder = self._request.nodes_folder
        if run_state.last is None and folder is not None and (nodes := nodes_with_steps(folder)):
            raise CkptError(
                f"the log of the run is empty, but {nodes[0]} has steps: give the right --state, or another --run-dir; if "
                f"nobody needs these steps, remove {folder}"
            )

    def _refuse_unserved_memory(self, run_state: RunState) -> None:
        """Refuse a run on one host, which serves no nodes, if nodes of this host that the log names have steps."""
        name, folder = self._request.name, self._request.nodes_folder
        if self._request.spec.hosts > 1 or folder is None:
            return
        ports = {at.rpartition(":")[2] for memory in run_state.memory for host, at in memory.nodes if host == name}
        if any(path.name in ports for path in nodes_with_steps(folder)):
            raise CkptError(
                f"{folder} has steps of a run on several hosts: start with --nnodes 2 --min 1 --give-up 1, or give another "
                "--run-dir; if nobody needs these steps, remove that folder"
            )

    def _begin(self, reports: Mapping[str, Mapping[str, object]], living: Mapping[str, AgentReport]) -> Joined | None:
        """Begin a run, which this agent leads. Return None if another agent has begun one at the same time."""
        run_state, name, spec = self._log.run_state, self._request.name, self._request.spec
        run_id = secrets.token_hex(6)
        drafts = [
            draft_run(run_state.attempt + 1, run_id, spec, _unfinished_reports(run_state, reports)),
            draft_lead(run_state.attempt + 1, f"{name} leads the run", name),
        ]
        self._take_name(reports)  # before leading: the other agents take an agent without reports for lost
        failpoint("agent.named")
        if not self._log.append(drafts):
            self._log.run_log.remove_report(name, self._request.make_report().incarnation)  # not that of a replacement
            return None
        if run_state.spec is not None and run_state.spec.command != spec.command:
            before = " ".join(run_state.spec.command)
            continued = "log is" if self._log.run_log.is_remote else "log and ledger are"
            self._print(
                f"another job has used this run log ({before}), and its {continued} continued; give each job "
                f"{self._log.run_log.own_options}"
            )
        failpoint("agent.begun")
        for other in reports.keys() - living.keys() - {name}:
            self._log.run_log.remove_report(other, holder_of(reports[other]))
        self._log.read()
        return Joined(run_id, has_begun_run=True)


def _unfinished_reports(run_state: RunState, facts_by_name: Mapping[str, Mapping[str, object]]) -> list[AgentReport]:
    """Return the reports of the newest attempt if the agents ended before one of them wrote its end."""
    if run_state.last is None or run_state.last.kind not in ("start", "stop"):
        return []
    return [report for report in decode_reports(facts_by_name).values() if report.attempt == run_state.attempt]


def _describe_spec(spec: RunSpec | None) -> str:
    if spec is None:
        return ""
    ranks = f"{format_count(spec.ranks, 'rank')}{' each' if spec.hosts > 1 else ''}"
    return f"{format_count(spec.hosts, 'host')} with {ranks}: {' '.join(spec.command)}"
