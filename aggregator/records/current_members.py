"""The members of an open namespace, its current record ring, and the failure domains of the members."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ckpt.aggregator.cluster.config import Member, NamespaceConfig, is_address
from ckpt.aggregator.cluster.fanout import FanOut
from ckpt.aggregator.cluster.member_facts import MemberFacts, failure_domains, require_distinct_devices
from ckpt.aggregator.cluster.member_health import MemberHealth
from ckpt.aggregator.cluster.open_member import OpenMember
from ckpt.aggregator.placement.rendezvous_hash import MemberLocation, count_shared_domains
from ckpt.aggregator.records import record_ring
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
        """The failure domains of this host."""
        self._member_registers = {name: open_member.registers for name, open_member in self.open_members.items()}
        self._member_facts = MemberFacts(self.fan_out)
        self._infos: Mapping[str, MemberInfo] = {}
        self._domains: Mapping[str, tuple[str, ...]] = {}
        self._ring: record_ring.RecordRing | None = None
        self._needs_fence_number = False  # set after a refusal: read the fence numbers of all members with the ring
        self._ring_lock = threading.RLock()
        """Guards changes of `open_members`, `locations`, `host_domain`, `_member_registers`, `_infos`, `_domains`, `_ring` and
        `_needs_fence_number`. It is held while the ring is read, so that the other threads wait for that."""

    def _probe_member(self, name: str) -> None:
        open_member = self.open_members.get(name)
        if open_member is not None:  # else it was removed meanwhile
            open_member.info()

    @property
    def ring(self) -> record_ring.RecordRing:
        """The current record ring, read when it is first needed. Creates the namespace if it does not exist."""
        ring = self._ring
        if ring is not None:
            return ring
        found = self._find_ring()
        while found is None:
            with self._ring_lock:
                seconds, tolerated = self.config.credentials.deadline_seconds, self.config.redundancy.tolerated_losses
                self.update_domains(seconds, wait_for_all=True)
                self.check_devices(self.open_members)
                record_ring.create_first_ring(self._member_registers, self.locations, tolerated, self.fan_out, seconds)
            found = self._find_ring()  # another client may have created it first
        return found

    def exists(self) -> bool:
        """Return whether the namespace exists. The first write creates it."""
        return self._find_ring() is not None

    def answers(self, seconds: float) -> bool:
        """Return whether the namespace exists according to the members that answer within this time. The others count as down.

        Raises Unavailable if more members do not answer than may be lost.
        """
        # Another thread may add to `_member_registers` meanwhile. `open_members` is only replaced as a whole.
        calls = {name: partial(each.registers.scan, record_ring.RING_PREFIX) for name, each in self.open_members.items()}
        answers, errors = self.fan_out.ask(calls, seconds)
        if len(errors) > self.config.redundancy.tolerated_losses:
            reasons = "; ".join(f"{name}: {error}" for name, error in errors.items())
            raise Unavailable(
                f"{len(answers)} of {len(calls)} members of {self.url} answer, which is too few ({reasons}); start the others"
            )
        return any(answers.values())  # all members have the first ring before anything is written

    def _find_ring(self) -> record_ring.RecordRing | None:
        with self._ring_lock:
            if self._ring is None:
                seconds = self.config.credentials.deadline_seconds
                found = record_ring.find_ring(self._member_registers, self.fan_out, seconds, self._open_ring_members)
                if found is not None and self._needs_fence_number:
                    fenced = record_ring.highest_fence_number(found, self._member_registers, self.fan_out, seconds)
                    found = replace(found, member_fence_number=max(found.member_fence_number, fenced))
                    self._needs_fence_number = False
                if found is not None:
                    if unconfigured := [name for name in found.all_members if name not in self.open_members]:
                        raise self._unconfigured_error(unconfigured)
                    self.locations = tuple(s for s in self.locations if s.name not in found.removed_members)
                self._ring = found
            return self._ring

    def invalidate_ring(self) -> None:
        """Read the record ring and the fence number again when they are next needed."""
        with self._ring_lock:
            self._needs_fence_number = True
            self._ring = None

    def _open_ring_members(self, found: record_ring.RecordRing) -> bool:
        """Open the members of a ring that the configuration lacks, and return whether there were any. Needs `_ring_lock`.

        Raises Unavailable if the name of such a member is not its address.
        """
        unconfigured = [location for name, location in found.all_members.items() if name not in self._member_registers]
        if unknown := [location.name for location in unconfigured if not is_address(location.name)]:
            raise self._unconfigured_error(unknown)
        for location in unconfigured:
            open_member = OpenMember(Member(location, address=location.name), self.config.credentials)
            self.open_members = {**self.open_members, location.name: open_member}
            self._member_registers[location.name] = open_member.registers
            if any(location.name == member.name for member in found.members):
                self.locations = (*self.locations, location)
        return bool(unconfigured)

    def _unconfigured_error(self, names: Sequence[str]) -> Unavailable:
        return Unavailable(
            f"{self.url} names {', '.join(self.open_members)}, but {', '.join(names)} keep records too; name all of them"
        )

    def drop_member(self, member: str) -> None:
        """Remove a member from the open members and from the candidates for new fragments."""
        with self._ring_lock:
            self.open_members = {name: open_member for name, open_member in self.open_members.items() if name != member}
            self.locations = tuple(s for s in self.locations if s.name != member)

    def set_locations(self, locations: Iterable[MemberLocation]) -> None:
        """Set the candidates for new fragments."""
        with self._ring_lock:
            self.locations = tuple(locations)

    def shared_domains(self, member: str) -> int:
        """Return how many of the widest failure domains a member shares with this host."""
        open_member = self.open_members.get(member)
        return (
            0
            if open_member is None
            else count_shared_domains(self.host_domain, self._domains.get(member, open_member.member.location.domain))
        )

    def update_domains(self, timeout_seconds: float = _INFO_SECONDS, wait_for_all: bool = False) -> None:
        """Update the failure domains that the configuration lacks from the reports of the members.

        Waits up to this time for members that are asked for the first time, or for all (`wait_for_all`). Clients may have
        different reports: they only propose other members for fragments then.
        """
        infos = self._member_facts.get_infos(self.open_members, timeout_seconds, wait_for_all)
        if infos is self._infos:
            return
        with self._ring_lock:
            agreed = {} if self._ring is None else {name: member.domain for name, member in self._ring.all_members.items()}
            configured = {name: open_member.member.location.domain for name, open_member in self.open_members.items()}
            unlabelled = {name for name in configured if name not in infos or not infos[name].labels}
            self._domains = failure_domains(
                {n: d or (agreed.get(n, ()) if n in unlabelled else ()) for n, d in configured.items()}, infos
            )
            self.locations = self.with_known_domains(self.locations)
            host_domain = self.config.host_domain
            if len(host_domain) == 1 and configured.get(host_domain[0]) == host_domain:  # it is the name of a member
                self.host_domain = self._domains[host_domain[0]]
            self._infos = infos

    def with_known_domains(self, locations: Iterable[MemberLocation]) -> tuple[MemberLocation, ...]:
        """Return the locations with the failure domains that are known now."""
        return tuple(replace(s, domain=self._domains.get(s.name, s.domain)) for s in locations)

    def check_devices(self, names: Iterable[str]) -> None:
        """Raise InvalidArgument if two of these members are the same device."""
        require_distinct_devices(self._infos, names, self.url)
