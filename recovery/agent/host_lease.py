"""`HostLease`, a thread that ends the ranks of this host when the other hosts may continue without it.

The lease of a host begins with its last report that the run log has acknowledged. coordinator/lost_contact.py decides what an
expired lease means. The thread waits for nothing but the network, so that it can end the ranks while a disk or the agent hangs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ckpt.recovery.agent.reachability import Address, AddressCache, find_unreachable
from ckpt.recovery.coordinator.lost_contact import PROBE_SECONDS, Contact, Probe
from ckpt.recovery.ranks import process_kill
from ckpt.recovery.ranks.orphan_guard import OrphanGuard
from ckpt.recovery.run_log.agent_reports import AgentReport
from ckpt.recovery.run_log.base import RunLog
from ckpt.storage.base.errors import is_transient
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.threads import WorkerThread

log = logging.getLogger("ckpt.run")

_TICK_SECONDS = 0.25
_UNACKNOWLEDGED_SECONDS = 0.85
"""Without an acknowledged report for this long, the thread probes the other machines. Reports are sent every REPORT_SECONDS."""
_RETRY_SECONDS = 5.0
"""How often a host that has never answered is tried."""


@dataclass(frozen=True, slots=True)
class ContactLoss:
    """A loss of contact after which the ranks of this host were ended."""

    seconds: float
    """How long there had been no contact."""
    hosts: int
    """The number of other hosts that were unreachable."""
    run_log: str
    """HOST:PORT of each server of the run log."""

    @property
    def detail(self) -> str:
        """The text about this host that follows "host X"."""
        return f"had no contact with the run log or {self._other_hosts} for {self.seconds:.1f} s, and ended its ranks"

    @property
    def user_message(self) -> str:
        """The message for the user of this host."""
        return (
            f"the run log ({self.run_log}) and {self._other_hosts} could not be reached for {self.seconds:.1f} s, so the ranks "
            "here are ended, as the others may continue; check the network, after which this host takes part again"
        )

    @property
    def _other_hosts(self) -> str:
        return "1 other host" if self.hosts == 1 else f"{self.hosts} other hosts"


@dataclass(frozen=True, slots=True)
class LoopHang:
    """A hang of the agent's loop, because of which the ranks of this host were ended."""

    seconds: float
    """How long the loop had been without a tick."""

    @property
    def detail(self) -> str:
        """The text about this host that follows "host X"."""
        return f"had an agent that hung for {self.seconds:.0f} s, and ended its ranks"

    @property
    def user_message(self) -> str:
        """The message for the user of this host."""
        return (
            f"this agent hung for {self.seconds:.0f} s or longer, so the ranks here were ended, as the others continue without "
            "them; check the file system of --run-dir: this host takes part again"
        )


class HostLease:
    """The lease of one host. Its thread also sends the heartbeats of the agent to the orphan guard.

    All methods except `close` return at once.

    name: the name of this host.
    min_hosts: how many hosts are enough to continue.
    """

    def __init__(self, run_log: RunLog, orphan_guard: OrphanGuard, name: str, min_hosts: int) -> None:
        self._run_log, self._orphan_guard, self._name = run_log, orphan_guard, name
        self._address_cache = AddressCache()
        self._lock = threading.Lock()
        """Guards `_contact`, `_sessions`, `_loss` and `_hang`."""
        self._contact = Contact(time.monotonic(), min_hosts)
        self._sessions: frozenset[int] = frozenset()
        self._loss: ContactLoss | LoopHang | None = None
        self._hang: LoopHang | None = None
        # These three are replaced as a whole: `_reports` by the main thread, the others by the thread that publishes reports.
        # So the other threads read them without the lock.
        self._reports: Mapping[str, AgentReport] = {}
        self._endpoints: tuple[Address, ...] = ()
        self._hosts: Mapping[str, Address] = {}
        # Only the thread of this object uses these two.
        self._reachable_machines: set[str] = set()  # numeric addresses that have answered; machines behind a firewall never do
        self._tried_at: dict[str, float] = {}  # when each machine was tried last, by its numeric address
        self._closed = threading.Event()
        self._thread = WorkerThread(target=self._run, name="ckpt-lease", daemon=True)
        self._thread.start()

    # --- called from the threads of the agent --------------------------------------------------------------------

    def renew(self, at: float) -> None:
        """Renew the lease: the run log has acknowledged a report that was sent at this time (CLOCK_MONOTONIC)."""
        with self._lock:
            self._contact = self._contact.after_acknowledgement(at)

    def resolve_addresses(self) -> None:
        """Update the addresses of the run log's servers and of the other hosts, which are looked up in another thread."""
        found = [self._address_cache.look_up(name, port) for name, port in self._run_log.endpoints()]
        self._endpoints = tuple(address for addresses in found for address in addresses)
        others = {
            name: self._address_cache.look_up(r.address, r.port) for name, r in self._reports.items() if name != self._name
        }
        self._hosts = {name: addresses[0] for name, addresses in others.items() if addresses}

    def set_reports(self, reports: Mapping[str, AgentReport]) -> None:
        """Set the reports of all living agents, including this one."""
        self._reports = reports

    def begin_attempt(self) -> None:
        """Renew the lease at the start of an attempt, and forget an earlier loss.

        The log gives ranks to this host, so its reports have arrived.
        """
        with self._lock:
            self._contact, self._loss = self._contact.after_acknowledgement(time.monotonic()), None

    def set_sessions(self, sessions: Collection[int]) -> None:
        """Set the process sessions (setsid(2)) of the ranks to kill when contact is lost; none without ranks."""
        with self._lock:
            self._sessions = frozenset(sessions)
            self._kill_ranks_if_suspended()

    def suspend(self, seconds: float) -> None:
        """End the ranks, and all that are started before `resume`, because the loop of the agent hangs.

        seconds: how long it has hung so far.

        The orphan guard gets no heartbeats meanwhile, so it ends processes that have left their session.
        """
        with self._lock:
            self._hang = LoopHang(seconds)
            self._kill_ranks_if_suspended()

    def resume(self) -> None:
        """Let ranks run again, because the loop of the agent runs again."""
        with self._lock:
            self._hang = None

    def _kill_ranks_if_suspended(self) -> None:
        """Kill the ranks while the loop of the agent hangs. Needs `_lock`."""
        if self._hang is not None:
            self._loss = self._hang
            process_kill.kill_process_groups(self._sessions)

    def take_loss(self) -> ContactLoss | LoopHang | None:
        """Return once why the ranks were ended; None if they were not since the last call."""
        with self._lock:
            loss, self._loss = self._loss, None
        return loss

    def close(self) -> None:
        """End the thread. Ranks are no longer ended after a loss of contact."""
        self._closed.set()
        self._thread.join()

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = _TICK_SECONDS
        while not self._closed.wait(pause):
            try:
                pause = self._check_contact()
            except Exception as error:
                if not is_transient(error):
                    raise
                log.warning("the contact of this host can't be checked, and is checked again: %s", error)
                pause = _TICK_SECONDS

    def _check_contact(self) -> float:
        """Send a heartbeat to the orphan guard, end the ranks if contact is lost; return the seconds until the next call.

        While no other host has a report, none can continue without this one, so its ranks run on.
        """
        with self._lock:
            contact, is_suspended = self._contact, self._hang is not None
        if is_suspended:
            return _TICK_SECONDS
        self._orphan_guard.send_heartbeat()
        if contact.silent_seconds(time.monotonic()) < _UNACKNOWLEDGED_SECONDS:
            self._find_reachable()
        elif self._hosts and self._endpoints:
            seconds = self._probe(contact)
            self._kill_ranks_if_lost()
            return max(0.01, PROBE_SECONDS - seconds)
        return _TICK_SECONDS

    def _find_reachable(self) -> None:
        """Find out which other hosts answer at all, while there is contact."""
        now = time.monotonic()
        due = {a for a in self._hosts.values() if now - self._tried_at.get(a.machine, -_RETRY_SECONDS) >= _RETRY_SECONDS}
        if new := {address for address in due if address.machine not in self._reachable_machines}:
            self._tried_at |= {address.machine: now for address in new}
            self._reachable_machines |= {address.machine for address in new - find_unreachable(new, PROBE_SECONDS)}

    def _probe(self, contact: Contact) -> float:
        """Probe the run log's servers, and the other hosts too if the last probe reached no server. Return its seconds."""
        began, endpoints, hosts = time.monotonic(), self._endpoints, dict[str, Address]()
        if contact.is_state_unreachable(began):
            hosts = {name: address for name, address in self._hosts.items() if address.machine in self._reachable_machines}
        unreachable = find_unreachable([*endpoints, *hosts.values()], PROBE_SECONDS)
        probe = Probe(
            began, time.monotonic(), not unreachable.issuperset(endpoints), frozenset(hosts),
            frozenset(name for name, address in hosts.items() if address in unreachable),
        )  # fmt: skip
        with self._lock:
            self._contact = self._contact.after_probe(probe)
        return probe.ended - began

    def _kill_ranks_if_lost(self) -> None:
        failpoint("lease.probed")
        now = time.monotonic()
        with self._lock:
            if self._sessions and self._contact.is_lost(now):
                servers = ", ".join(f"{name}:{port}" for name, port in self._run_log.endpoints())
                self._loss = ContactLoss(self._contact.silent_seconds(now), len(self._contact.probes[-1].unreachable), servers)
                process_kill.kill_process_groups(self._sessions)
                self._sessions = frozenset()
