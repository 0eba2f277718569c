"""Who a namespace is made of: its members, the ring of those that keep its records, and where they stand."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ckpt.aggregator import ring as rings
from ckpt.aggregator.fanout import FanOut, Health
from ckpt.aggregator.members import Config, Member, is_address
from ckpt.aggregator.place import Place
from ckpt.aggregator.placement import Spot, shared
from ckpt.aggregator.told import Told, check_devices, domains
from ckpt.storage.device import Info
from ckpt.storage.errors import Unavailable

_MEET_SECONDS = 1.0


class Membership:
    """The members of a namespace. Safe to use from many threads."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.url = f"ckpt://{config.name}"
        self.places = {m.name: Place(m, config.access) for m in config.members}
        self.spots = tuple(m.spot for m in config.members)
        self.fan_out = FanOut(Health(probe=self._probe))
        self.near = config.near
        """The domains of this host."""
        self._registers = {name: place.registers for name, place in self.places.items()}
        self._told = Told(self.fan_out)
        self._infos: Mapping[str, Info] = {}
        self._domains: Mapping[str, tuple[str, ...]] = {}
        self._ring: rings.Ring | None = None
        self._refused = False  # by a member: all are asked for their fence number, for the next might refuse as well
        self._opening = threading.RLock()

    def _probe(self, name: str) -> None:
        place = self.places.get(name)
        if place is not None:  # else it was left out meanwhile
            place.info()

    @property
    def ring(self) -> rings.Ring:
        """Who keeps the records. Asked when first needed."""
        known = self._ring
        if known is not None:
            return known
        found = self._find()
        while found is None:
            with self._opening:
                seconds, tolerated = self.config.access.deadline_seconds, self.config.redundancy.tolerated
                self.meet(seconds, everyone=True)
                self.check_devices(self.places)
                rings.make(self._registers, self.spots, tolerated, self.fan_out, seconds)
            found = self._find()  # which may be that of another client
        return found

    def exists(self) -> bool:
        """Whether anything was ever written here. Only writing makes a namespace."""
        return self._find() is not None

    def answers(self, seconds: float) -> bool:
        """Whether anything may have been written here. Members that do not answer within this time are left alone from then on,
        until they do. Raises Unavailable where they are more than may be lost."""
        calls = {name: partial(registers.scan, rings.PREFIX) for name, registers in self._registers.items()}
        answers, errors = self.fan_out.ask(calls, seconds)
        if len(errors) > self.config.redundancy.tolerated:
            reasons = "; ".join(f"{name}: {error}" for name, error in errors.items())
            raise Unavailable(f"{len(answers)} of {len(calls)} members of {self.url} answer, which is too few ({reasons})")
        return any(answers.values())  # all take the first ring before anything is written

    def _find(self) -> rings.Ring | None:
        with self._opening:
            if self._ring is None:
                seconds = self.config.access.deadline_seconds
                found = rings.find(self._registers, self.fan_out, seconds, self._adopt)
                if found is not None and self._refused:
                    fenced = rings.fence_number(found, self._registers, self.fan_out, seconds)
                    found, self._refused = replace(found, fenced=max(found.fenced, fenced)), False
                if found is not None:
                    if strange := [name for name in found.everyone if name not in self.places]:
                        raise self._unnamed(strange)
                    self.spots = tuple(s for s in self.spots if s.name not in found.gone)
                self._ring = found
            return self._ring

    def renew(self) -> None:
        """Ask again who keeps the records, and by which fence number calls go, when that is next needed."""
        self._refused = True
        self._ring = None

    def _adopt(self, found: rings.Ring) -> bool:
        """Know the members of a ring that came after this process was configured, as far as their names say where they are."""
        strange = [spot for name, spot in found.everyone.items() if name not in self._registers]
        if unknown := [spot.name for spot in strange if not is_address(spot.name)]:
            raise self._unnamed(unknown)
        for spot in strange:
            place = Place(Member(spot, address=spot.name), self.config.access)
            self.places = {**self.places, spot.name: place}
            self._registers[spot.name] = place.registers
            if any(spot.name == s.name for s in found.members):
                self.spots = (*self.spots, spot)
        return bool(strange)

    def _unnamed(self, names: Sequence[str]) -> Unavailable:
        return Unavailable(
            f"{self.url} names {', '.join(self.places)}, but records are kept by {', '.join(names)} too; name all of them"
        )

    def leave_out(self, member: str) -> None:
        """Go on without a member."""
        self.places = {name: place for name, place in self.places.items() if name != member}
        self.spots = tuple(s for s in self.spots if s.name != member)

    def nearness(self, member: str) -> int:
        """How many of the widest failure domains a member shares with this host."""
        place = self.places.get(member)
        return 0 if place is None else shared(self.near, self._domains.get(member, place.member.spot.domain))

    def meet(self, seconds: float = _MEET_SECONDS, everyone: bool = False) -> None:
        """Learn where members stand of which the configuration does not say it. Another client may know less, or more: it only
        proposes other places then. Waits so long for those who were not asked before, or for everyone."""
        infos = self._told.ask(self.places, seconds, everyone)
        if infos is self._infos:
            return
        with self._opening:
            agreed = {} if self._ring is None else {name: spot.domain for name, spot in self._ring.everyone.items()}
            known = {name: place.member.spot.domain for name, place in self.places.items()}
            silent = {name for name in known if name not in infos or not infos[name].labels}
            self._domains = domains({n: d or (agreed.get(n, ()) if n in silent else ()) for n, d in known.items()}, infos)
            self.spots = self.placed(self.spots)
            if len(self.config.near) == 1 and known.get(self.config.near[0]) == self.config.near:  # the member's own name
                self.near = self._domains[self.config.near[0]]
            self._infos = infos

    def placed(self, spots: Iterable[Spot]) -> tuple[Spot, ...]:
        """Members with the domains that are known by now."""
        return tuple(replace(s, domain=self._domains.get(s.name, s.domain)) for s in spots)

    def check_devices(self, names: Iterable[str]) -> None:
        """Raises InvalidArgument where two of these members are the same device."""
        check_devices(self._infos, names, self.url)
