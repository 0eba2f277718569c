"""Ends the ranks of a host that has lost contact with the others, from a thread that waits for nothing but the network.

The lease of a host runs from its last report that the state has acknowledged. contact.py decides what its end means.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ckpt.recovery.agent.reachability import Address, AddressCache, find_unreachable
from ckpt.recovery.coordinator.lost_contact import PROBE_SECONDS, Contact, Probe
from ckpt.recovery.ranks import processes
from ckpt.recovery.ranks.orphan_guard import OrphanGuard
from ckpt.recovery.run_log.agent_reports import AgentReport
from ckpt.recovery.run_log.base import RunLog

_TICK_SECONDS = 0.25
_UNACKNOWLEDGED_SECONDS = 0.85
"""After so long without an acknowledged report it looks who is in reach: they are sent every SAY_SECONDS."""
_RETRY_SECONDS = 5.0
"""How often a host is tried that has never answered."""


@dataclass(frozen=True, slots=True)
class ContactLoss:
    """Contact was lost, and the ranks of this host were ended."""

    seconds: float
    """For how long there was none by then."""
    hosts: int
    """How many other hosts were out of reach."""

    @property
    def detail(self) -> str:
        """What happened to this host: "host X …"."""
        return f"had no contact with the state or {self._other_hosts} for {self.seconds:.1f} s, and ended its ranks"

    @property
    def user_message(self) -> str:
        """What the user of this host should know."""
        return (
            f"no contact for {self.seconds:.1f} s: the state and {self._other_hosts} can't be reached. The ranks here are "
            "ended, as "
            "the others may go on without them. Check the network; this host takes part again when it is back"
        )

    @property
    def _other_hosts(self) -> str:
        return "1 other host" if self.hosts == 1 else f"{self.hosts} other hosts"


class HostLease:
    """Of one agent. It also tells the guardian of this host that the agent lives.

    name: of this host. least: how many hosts can go on. All methods but `learn` and `close` return at once.
    """

    def __init__(self, state: RunLog, guardian: OrphanGuard, name: str, min_hosts: int) -> None:
        self._state, self._guardian, self._name = state, guardian, name
        self._address_cache = AddressCache()
        self._lock = threading.Lock()  # over the contact, the sessions and the loss
        self._contact = Contact(time.monotonic(), min_hosts)
        self._sessions: frozenset[int] = frozenset()
        self._loss: ContactLoss | None = None
        self._reports: Mapping[str, AgentReport] = {}
        self._endpoints: tuple[Address, ...] = ()
        self._hosts: Mapping[str, Address] = {}
        self._reachable_machines: set[str] = set()  # numeric addresses that have answered: behind a firewall none ever does
        self._tried_at: dict[str, float] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckpt-lease", daemon=True)
        self._thread.start()

    # --- from the threads of the agent ---------------------------------------------------------------------------

    def renew(self, at: float) -> None:
        """The state has acknowledged a report that was sent at this time (CLOCK_MONOTONIC)."""
        with self._lock:
            self._contact = self._contact.after_acknowledgement(at)

    def resolve_addresses(self) -> None:
        """Where the state and the other hosts are. Looks up names, which may take long; call it after a report."""
        found = [self._address_cache.look_up(name, port) for name, port in self._state.endpoints()]
        self._endpoints = tuple(address for addresses in found for address in addresses)
        others = {
            name: self._address_cache.look_up(r.address, r.port) for name, r in self._reports.items() if name != self._name
        }
        self._hosts = {name: addresses[0] for name, addresses in others.items() if addresses}

    def set_reports(self, reports: Mapping[str, AgentReport]) -> None:
        """What the agents that live have reported, this one's among them."""
        self._reports = reports

    def begin_attempt(self) -> None:
        """An attempt begins: the log names this host, so its reports have arrived. A loss before it is no longer of concern."""
        with self._lock:
            self._contact, self._loss = self._contact.after_acknowledgement(time.monotonic()), None

    def set_sessions(self, sessions: Collection[int]) -> None:
        """These ranks are ended where contact is lost; none: there are no ranks any more."""
        with self._lock:
            self._sessions = frozenset(sessions)

    def take_loss(self) -> ContactLoss | None:
        """What has happened, once."""
        with self._lock:
            loss, self._loss = self._loss, None
        return loss

    def close(self) -> None:
        """The ranks are no longer looked after."""
        self._closed.set()
        self._thread.join()

    # --- its own thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = _TICK_SECONDS
        while not self._closed.wait(pause):
            self._guardian.send_heartbeat()
            with self._lock:
                contact = self._contact
            pause = _TICK_SECONDS
            if contact.silent_seconds(time.monotonic()) < _UNACKNOWLEDGED_SECONDS:
                self._find_reachable()
            elif self._hosts and self._endpoints:
                pause = max(0.01, PROBE_SECONDS - self._probe(contact))
                self._kill_ranks_if_lost()

    def _find_reachable(self) -> None:
        """Find out who of the others can be reached, while there is contact."""
        now = time.monotonic()
        due = {a for a in self._hosts.values() if now - self._tried_at.get(a.machine, -_RETRY_SECONDS) >= _RETRY_SECONDS}
        if new := {address for address in due if address.machine not in self._reachable_machines}:
            self._tried_at |= {address.machine: now for address in new}
            self._reachable_machines |= {address.machine for address in new - find_unreachable(new, PROBE_SECONDS)}

    def _probe(self, contact: Contact) -> float:
        """How long it took. The other hosts are tried only where the state was out of reach a moment ago."""
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
        now = time.monotonic()
        with self._lock:
            if self._sessions and self._contact.is_lost(now):
                self._loss = ContactLoss(self._contact.silent_seconds(now), len(self._contact.probes[-1].unreachable))
                processes.kill_process_groups(self._sessions)
                self._sessions = frozenset()
