"""Where things go: weighted rendezvous hashing over failure domains. A proposal only: a file says itself where it is.

Each member draws a number for a key, and the highest win, so that growing and shrinking move as little as can be
(Thaler and Ravishankar 1998; weights as in Schindelhauer and Schomaker 2005).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import xxhash


@dataclass(frozen=True, slots=True)
class MemberLocation:
    """A member as placement sees it."""

    name: str
    domain: tuple[str, ...] = ()
    """Failure domains, the widest first: supernode, rack, host. The member itself is the narrowest."""
    weight: float = 1.0


def score(key: str, location: MemberLocation) -> float:
    """The number that a member draws for a key; a member of twice the weight wins twice as often."""
    hashed = xxhash.xxh3_64_intdigest(f"{location.name}\n{key}".encode())
    return -location.weight / math.log((hashed + 0.5) / 2.0**64)


def choose_members(
    key: str, locations: Sequence[MemberLocation], count: int, host_domain: Sequence[str] = (), excluded: Collection[str] = ()
) -> list[str]:
    """Names of up to `count` members for a key, as far apart as the domains allow: first over the widest, then within.

    near: the writer's own domains; the first member is the one that shares most of them. taken: members that hold other
    parts of the same thing: they are not chosen, and their domains count as used.
    """
    used: dict[tuple[str, ...], int] = {}
    chosen: list[str] = []

    def use(spot: MemberLocation) -> None:
        for prefix in _domain_prefixes(spot):
            used[prefix] = used.get(prefix, 0) + 1

    for spot in locations:
        if spot.name in excluded:
            use(spot)
    candidates = {spot.name: (spot, score(key, spot)) for spot in locations if spot.name not in excluded and spot.weight > 0}
    first = not excluded and bool(host_domain)
    while candidates and len(chosen) < count:

        def order(item: tuple[MemberLocation, float], first: bool = first) -> tuple[object, ...]:
            spot, drawn = item
            crowded = tuple(used.get(prefix, 0) for prefix in _domain_prefixes(spot))
            return (-count_shared_domains(host_domain, spot.domain) if first else 0, crowded, -drawn, spot.name)

        spot, _ = min(candidates.values(), key=order)
        del candidates[spot.name]
        use(spot)
        chosen.append(spot.name)
        first = False
    return chosen


def max_parts_per_domain(names: Collection[str], locations: Sequence[MemberLocation]) -> int:
    """The most parts that one failure of a widest domain takes, for parts on these members."""
    lost: dict[tuple[str, ...], int] = {}
    domain = {spot.name: spot.domain[:1] or (spot.name,) for spot in locations}
    for name in names:
        at = domain.get(name, (name,))
        lost[at] = lost.get(at, 0) + 1
    return max(lost.values(), default=0)


def _domain_prefixes(location: MemberLocation) -> list[tuple[str, ...]]:
    return [location.domain[: i + 1] for i in range(len(location.domain))]


def count_shared_domains(host_domain: Sequence[str], domain: Sequence[str]) -> int:
    """How many of the widest domains are the same."""
    count = 0
    for mine, other in zip(host_domain, domain, strict=False):
        if mine != other:
            break
        count += 1
    return count
