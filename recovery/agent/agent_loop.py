"""`AgentLoop`, the loop of an agent: poll the ranks, follow the run log, coordinate, wait."""

from __future__ import annotations

import selectors
import time
from dataclasses import dataclass, replace

from ckpt.recovery.agent.agent_heartbeat import AgentHeartbeat
from ckpt.recovery.agent.agent_identity import AgentIdentity
from ckpt.recovery.agent.end_of_run_drain import SharedMemoryDrain, drain_host_memory
from ckpt.recovery.agent.followed_log import FollowedLog
from ckpt.recovery.agent.host_lease import ContactLoss, HostLease, LoopHang
from ckpt.recovery.agent.host_memory import HostMemory
from ckpt.recovery.agent.host_ranks import HostRanks
from ckpt.recovery.agent.time_accounting import TimeAccounting
from ckpt.recovery.agent.user_messages import UserMessages, describe_pending, leave_seconds
from ckpt.recovery.coordinator.coordinator import Coordinator
from ckpt.recovery.goodput.time_category import TimeCategory
from ckpt.recovery.policy.coordinated_stop import StopRequest
from ckpt.recovery.ranks.signals import Signals
from ckpt.recovery.run_log.agent_reports import AgentReport, HostFailure
from ckpt.recovery.run_log.base import LogEntry
from ckpt.recovery.run_log.entry_drafts import draft_end
from ckpt.recovery.run_log.entry_facts import EndFacts, RunFacts, facts_of
from ckpt.recovery.run_log.run_spec import AttemptHost, RunSpec
from ckpt.storage.base.errors import CkptError, StoreError, Unavailable

_TICK_SECONDS = 0.05
"""The longest wait of the loop, unless a rank ends or a signal arrives."""
_TIDY_SECONDS = 0.5
"""The time between two rounds of the periodic work (`HostRanks.tidy`)."""


@dataclass(frozen=True, slots=True)
class AgentParts:
    """The parts of an agent, from the beginning to the end of a run. Each part owns its own data."""

    identity: AgentIdentity
    spec: RunSpec
    run_id: str
    signals: Signals
    select: selectors.BaseSelector
    messages: UserMessages
    log: FollowedLog
    ranks: HostRanks
    memory: HostMemory
    coordinator: Coordinator
    accounting: TimeAccounting
    lease: HostLease
    heartbeat: AgentHeartbeat


def make_report(identity: AgentIdentity, signals: Signals, ranks: HostRanks, memory: HostMemory) -> AgentReport:
    """Return the current report of an agent."""
    return memory.add_to_report(ranks.add_to_report(identity.report(signals)))


class AgentLoop:
    """The loop of one agent in one run. The main thread owns it."""

    def __init__(self, parts: AgentParts) -> None:
        self._parts = parts
        self.status: int | None = None
        """The exit status of the run, once its log has an end."""
        self._is_leaving = False
        self._is_log_current = False
        """Whether the run log has answered the last time, so that the state of the run and the reports are those of now."""
        self._tidy_at = 0.0

    def run(self) -> int:
        """Run until the run has ended, or until a signal has asked this agent to end and the run can continue without it.

        Returns the exit status of the agent.
        """
        parts = self._parts
        while True:
            self._poll()
            self._handle_contact_loss()
            try:
                while self.status is None and (self._follow_log() or self._coordinate()):
                    pass
                self._is_log_current = True
                parts.messages.forget_log_error()
            except StoreError as error:
                self._is_log_current = False
                self._handle_log_error(error)
            if self.status is not None:
                return self.status
            if parts.signals.first:
                self._note_leaving()
                if self._can_leave():
                    return 128 + parts.signals.first
            self._wait()

    def finish(self) -> None:
        """End the ranks, and drain the memory if the run is over."""
        parts = self._parts
        self._stop_ranks()
        if self.status is None:
            return
        parts.heartbeat.end_watch()  # a drain takes as long as it takes
        if parts.memory.folder is None:
            self._drain_shared_memory()
        else:
            drain_host_memory(parts.memory, parts.log, parts.messages)

    def can_free_memory(self) -> bool:
        """Return whether this agent leaves a run that continues, and that does not need the memory of this host.

        While the run log does not answer, another host may have gone meanwhile, so that the memory is needed.
        """
        return self._is_leaving and self._is_log_current and not self._is_memory_needed()

    # --- this host -----------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        parts = self._parts
        parts.memory.update(parts.log.run_state)
        parts.ranks.poll(bool(parts.signals.first))
        if parts.ranks.are_started and time.monotonic() >= self._tidy_at:
            self._tidy_at = time.monotonic() + _TIDY_SECONDS
            parts.memory.measure()
            parts.ranks.tidy()

    def _handle_contact_loss(self) -> None:
        """If the host lease has killed the ranks, clean up after them and report it."""
        parts = self._parts
        parts.lease.set_reports(parts.coordinator.reports())
        if (loss := self._take_loss()) is not None:
            self._stop_ranks()
            parts.ranks.set_failure(HostFailure("lost", ranks=(), detail=loss.detail, silent_seconds=loss.seconds))
            parts.heartbeat.set_report(self._make_report())

    def _take_loss(self) -> ContactLoss | LoopHang | None:
        """Print, and return once, why the host lease has killed the ranks; None if they run, or had ended by themselves."""
        parts = self._parts
        loss = parts.lease.take_loss()
        ended_well = parts.ranks.have_ended and parts.ranks.failure is None
        if loss is None or not parts.ranks.are_started or ended_well:
            return None
        parts.messages.print(loss.user_message)
        return loss

    def _stop_ranks(self) -> None:
        if self._parts.ranks.stop(self._parts.lease):
            self._account("stop")

    def _wait(self) -> None:
        """Wait for the end of a rank or for a signal, at most one tick."""
        self._parts.heartbeat.tick()
        for key, _ in self._parts.select.select(_TICK_SECONDS):
            if key.data is self._parts.signals:
                self._parts.signals.clear_wakeup()

    def _make_report(self) -> AgentReport:
        parts = self._parts
        return make_report(parts.identity, parts.signals, parts.ranks, parts.memory)

    def _account(self, category: TimeCategory) -> None:
        self._parts.accounting.account(self._parts.log.run_state, category)

    # --- follow the log ------------------------------------------------------------------------------------------

    def _follow_log(self) -> bool:
        """Read new entries, start or stop ranks as they require, and return whether anything was done."""
        parts = self._parts
        is_alone_or_leads = parts.spec.hosts == 1 or parts.log.run_state.leader == parts.identity.name
        if not is_alone_or_leads and parts.log.was_read_just_now():
            return False
        for entry in parts.log.read():
            if entry.kind == "run" and facts_of(entry, RunFacts).run != parts.run_id:
                raise CkptError(f"another run has begun in the same log; give each run {parts.log.run_log.own_options}")
            parts.messages.print_entry(entry)
            if entry.kind == "end":
                self.status = facts_of(entry, EndFacts).status
                return True
        assert parts.log.run_state.last is not None
        return self._follow_entry(parts.log.run_state.last)

    def _follow_entry(self, last: LogEntry) -> bool:
        """Start or stop ranks as the last entry that changes the phase of the run requires."""
        parts, run_state = self._parts, self._parts.log.run_state
        attempt_continues = last.kind in ("start", "stop") and run_state.attempt == parts.ranks.attempt
        if parts.ranks.are_started and not attempt_continues:
            self._account("decide")
            self._take_loss()  # the log may answer, and say that the others continue, right after the ranks were killed
            if last.kind == "failure" or (run_state.failures and run_state.failures[-1].cause in ("hang", "stopped")):
                parts.ranks.save_stacks()
            self._stop_ranks()
            return True
        own_index = next((i for i, host in enumerate(run_state.attempt_hosts) if self._is_this_agent(host)), None)
        if last.kind == "start" and own_index is not None and run_state.attempt != parts.ranks.attempt:
            self._account("spawn" if run_state.attempt == 0 else "decide")
            self._start_ranks(own_index, last)
            return True
        if last.kind == "stop" and parts.ranks.are_started:
            parts.ranks.request_stop(facts_of(last, StopRequest))
        return False

    def _is_this_agent(self, host: AttemptHost) -> bool:
        return (host.name, host.incarnation) == (self._parts.identity.name, self._parts.identity.incarnation)

    def _start_ranks(self, host_index: int, entry: LogEntry) -> None:
        parts, run_state = self._parts, self._parts.log.run_state
        try:
            parts.ranks.start(entry, run_state, host_index, parts.memory.rank_environment(run_state), parts.lease)
        except CkptError as error:  # the ranks report it as their failure, and the coordinator decides
            if parts.spec.hosts == 1 and not isinstance(error, Unavailable):
                parts.log.append([draft_end(entry.attempt, str(error), status=1)])
                raise

    # --- coordinate ----------------------------------------------------------------------------------------------

    def _coordinate(self) -> bool:
        """Append the entries that are due if this agent leads, and return whether any were appended."""
        parts, own_report = self._parts, self._make_report()
        parts.heartbeat.set_report(own_report)
        before = parts.log.run_state
        try:
            return parts.coordinator.coordinate(before, own_report)
        finally:  # each report is consumed once, so count it even if the append may have failed
            parts.accounting.account_by_reports(before, own_report)

    def _handle_log_error(self, error: StoreError) -> None:
        parts = self._parts
        pending = describe_pending(parts.signals.first, parts.ranks.failure, parts.ranks.have_ended, parts.spec)
        parts.messages.print_log_error(error, pending)

    # --- end -----------------------------------------------------------------------------------------------------

    def _note_leaving(self) -> None:
        """Note that this agent, which a signal has asked to end, leaves the run, once no rank of this host takes part in it."""
        parts, run_state = self._parts, self._parts.log.run_state
        last = run_state.last
        assert last is not None
        if not parts.ranks.are_started and parts.spec.hosts > 1 and last.kind == "decision":
            self._is_leaving = True
        takes_part = any(map(self._is_this_agent, run_state.attempt_hosts))
        if not parts.ranks.are_started and last.kind == "start" and not takes_part:
            self._is_leaving = True

    def _can_leave(self) -> bool:
        """Return whether this agent, which a signal has asked to end, is no longer needed by the run."""
        parts = self._parts
        if self.can_free_memory():
            return True
        # After this time no leader is left that would decide.
        return time.monotonic() - parts.signals.first_at > leave_seconds(parts.spec)

    def _is_memory_needed(self) -> bool:
        parts = self._parts
        return parts.memory.is_needed(parts.log.run_state, parts.coordinator.reports())

    def _drain_shared_memory(self) -> None:
        """Wait until the leader has drained the memory of all hosts, or until one more signal asks this agent to end."""
        parts = self._parts
        drain = SharedMemoryDrain(parts.log, parts.coordinator, parts.messages, parts.run_id, parts.identity.name)
        signals, until = parts.signals.count, time.monotonic() + parts.spec.give_up_seconds
        while drain.is_pending() and parts.signals.count == signals and time.monotonic() < until:
            own_report = replace(self._make_report(), leaving=0)  # the leader keeps the lead until the drain has ended
            parts.heartbeat.set_report(own_report)
            try:
                drain.advance(own_report)
                until = time.monotonic() + parts.spec.give_up_seconds
            except StoreError as error:
                self._handle_log_error(error)
            self._poll()
            self._wait()
        if drain.is_pending():
            parts.messages.print(
                "steps that may be only in memory were not copied to the repository; the memory is kept: start ckpt-run again"
            )
