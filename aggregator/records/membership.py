"""Who a namespace is made of: its members, the ring of those that keep its records, and where they stand."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ckpt.aggregator.cluster.config import Member, NamespaceConfig, is_address
from ckpt.aggregator.cluster.fanout import FanOut, MemberHealth
from ckpt.aggregator.cluster.member_facts import MemberFacts, failure_domains, require_distinct_devices
from ckpt.aggregator.cluster.open_member import OpenMember
from ckpt.aggregator.placement.rendezvous_hash import MemberLocation, count_shared_domains
from ckpt.aggregator.records import record_ring as rings
from ckpt.storage.base.errors import Unavailable
from ckpt.storage.member.device import MemberInfo

_INFO_SECONDS = 1.0


class Membership:
    """The members of a namespace. Safe to use from many threads."""

    def __init__(self, config: NamespaceConfig) -> None:
        self.config = config
        self.url = f"ckpt://{config.name}"
        self.open_members = {m.name: OpenMember(m, config.credentials) for m in config.members}
        self.locations = tuple(m.location for m in config.members)
        self.fan_out = FanOut(MemberHealth(probe=self._probe_member))
        self.host_domain = config.host_domain
        """The domains of this host."""
        self._member_registers = {name: open_member.registers for name, open_member in self.open_members.items()}
        self._member_facts = MemberFacts(self.fan_out)
        self._infos: Mapping[str, MemberInfo] = {}
        self._domains: Mapping[str, tuple[str, ...]] = {}
        self._ring: rings.RecordRing | None = None
        self._needs_fence_number = False  # by a member: all are asked for their fence number, for the next might refuse as well
        self._ring_lock = threading.RLock()

    def _probe_member(self, name: str) -> None:
        open_member = self.open_members.get(name)
        if open_member is not None:  # else it was left out meanwhile
            open_member.info()

    @property
    def ring(self) -> rings.RecordRing:
        """Who keeps the records. Asked when first needed."""
        ring = self._ring
        if ring is not None:
            return ring
        found = self._find_ring()
        while found is None:
            with self._ring_lock:
                seconds, tolerated = self.config.credentials.deadline_seconds, self.config.redundancy.tolerated_losses
                self.update_domains(seconds, wait_for_all=True)
                self.check_devices(self.open_members)
                rings.create_first_ring(self._member_registers, self.locations, tolerated, self.fan_out, seconds)
            found = self._find_ring()  # which may be that of another client
        return found

    def exists(self) -> bool:
        """Whether anything was ever written here. Only writing makes a namespace."""
        return self._find_ring() is not None

    def answers(self, seconds: float) -> bool:
        """Whether anything may have been written here. Members that do not answer within this time are left alone from then on,
        until they do. Raises Unavailable where they are more than may be lost."""
        calls = {name: partial(registers.scan, rings.RING_PREFIX) for name, registers in self._member_registers.items()}
        answers, errors = self.fan_out.ask(calls, seconds)
        if len(errors) > self.config.redundancy.tolerated_losses:
            reasons = "; ".join(f"{name}: {error}" for name, error in errors.items())
            raise Unavailable(f"{len(answers)} of {len(calls)} members of {self.url} answer, which is too few ({reasons})")
        return any(answers.values())  # all take the first ring before anything is written

    def _find_ring(self) -> rings.RecordRing | None:
        with self._ring_lock:
            if self._ring is None:
                seconds = self.config.credentials.deadline_seconds
                found = rings.find_ring(self._member_registers, self.fan_out, seconds, self._open_ring_members)
                if found is not None and self._needs_fence_number:
                    fenced = rings.highest_fence_number(found, self._member_registers, self.fan_out, seconds)
                    found, self._needs_fence_number = (
                        replace(found, member_fence_number=max(found.member_fence_number, fenced)),
                        False,
                    )
                if found is not None:
                    if unconfigured := [name for name in found.all_members if name not in self.open_members]:
                        raise self._unconfigured_error(unconfigured)
                    self.locations = tuple(s for s in self.locations if s.name not in found.removed_members)
                self._ring = found
            return self._ring

    def invalidate_ring(self) -> None:
        """Ask again who keeps the records, and by which fence number calls go, when that is next needed."""
        self._needs_fence_number = True
        self._ring = None

    def _open_ring_members(self, found: rings.RecordRing) -> bool:
        """Know the members of a ring that came after this process was configured, as far as their names say where they are."""
        unconfigured = [spot for name, spot in found.all_members.items() if name not in self._member_registers]
        if unknown := [spot.name for spot in unconfigured if not is_address(spot.name)]:
            raise self._unconfigured_error(unknown)
        for spot in unconfigured:
            open_member = OpenMember(Member(spot, address=spot.name), self.config.credentials)
            self.open_members = {**self.open_members, spot.name: open_member}
            self._member_registers[spot.name] = open_member.registers
            if any(spot.name == s.name for s in found.members):
                self.locations = (*self.locations, spot)
        return bool(unconfigured)

    def _unconfigured_error(self, names: Sequence[str]) -> Unavailable:
        return Unavailable(
            f"{self.url} names {', '.join(self.open_members)}, but records are kept by {', '.join(names)} too; name all of them"
        )

    def drop_member(self, member: str) -> None:
        """Go on without a member."""
        self.open_members = {name: open_member for name, open_member in self.open_members.items() if name != member}
        self.locations = tuple(s for s in self.locations if s.name != member)

    def shared_domains(self, member: str) -> int:
        """How many of the widest failure domains a member shares with this host."""
        open_member = self.open_members.get(member)
        return (
            0
            if open_member is None
            else count_shared_domains(self.host_domain, self._domains.get(member, open_member.member.location.domain))
        )

    def update_domains(self, timeout_seconds: float = _INFO_SECONDS, wait_for_all: bool = False) -> None:
        """Learn where members stand of which the configuration does not say it. Another client may know less, or more: it only
        proposes other places then. Waits so long for those who were not asked before, or for everyone."""
        infos = self._member_facts.get_infos(self.open_members, timeout_seconds, wait_for_all)
        if infos is self._infos:
            return
        with self._ring_lock:
            agreed = {} if self._ring is None else {name: spot.domain for name, spot in self._ring.all_members.items()}
            configured = {name: open_member.member.location.domain for name, open_member in self.open_members.items()}
            unlabelled = {name for name in configured if name not in infos or not infos[name].labels}
            self._domains = failure_domains(
                {n: d or (agreed.get(n, ()) if n in unlabelled else ()) for n, d in configured.items()}, infos
            )
            self.locations = self.with_known_domains(self.locations)
            if (
                len(self.config.host_domain) == 1 and configured.get(self.config.host_domain[0]) == self.config.host_domain
            ):  # the member's own name
                self.host_domain = self._domains[self.config.host_domain[0]]
            self._infos = infos

    def with_known_domains(self, locations: Iterable[MemberLocation]) -> tuple[MemberLocation, ...]:
        """Members with the domains that are known by now."""
        return tuple(replace(s, domain=self._domains.get(s.name, s.domain)) for s in locations)

    def check_devices(self, names: Iterable[str]) -> None:
        """Raises InvalidArgument where two of these members are the same device."""
        require_distinct_devices(self._infos, names, self.url)
