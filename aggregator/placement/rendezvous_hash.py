"""The choice of members for a key: weighted rendezvous hashing over failure domains.

Each member has a score for a key, and the highest scores win. So a new or a removed member moves as little as possible
(Thaler and Ravishankar 1998; weights as in Schindelhauer and Schomaker 2005). For fragments of files the choice is only a
proposal, because the record of a file names its members.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import xxhash

MAX_WEIGHT = 1e9
"""Weights are below this."""

_LARGEST_BELOW_1 = math.nextafter(1.0, 0.0)


@dataclass(frozen=True, slots=True)
class MemberLocation:
    """A member as placement sees it."""

    name: str
    domain: tuple[str, ...] = ()
    """Failure domains, the widest first, such as supernode, rack, host. The member itself is the narrowest one."""
    weight: float = 1.0
    """From 0 to below `MAX_WEIGHT`. A member of weight 0 gets no new fragments."""


def score(key: str, location: MemberLocation) -> float:
    """Return the score of a member for a key. A member of twice the weight wins twice as often."""
    hashed = xxhash.xxh3_64_intdigest(f"{location.name}\n{key}".encode())
    # The quotient of the 1,024 largest hashes is rounded to 1, whose logarithm is 0.
    return -location.weight / math.log(min((hashed + 0.5) / 2.0**64, _LARGEST_BELOW_1))


def choose_members(
    key: str, locations: Sequence[MemberLocation], count: int, host_domain: Sequence[str] = (), excluded: Collection[str] = ()
) -> list[str]:
    """Return the names of up to `count` members for a key, spread over the failure domains: first the widest, then the others.

    host_domain: the failure domains of the writer; the first member is the one that shares most of them. excluded: members
    that have other fragments of the same stripe; they are not chosen, and their domains count as used.
    """
    used: dict[tuple[str, ...], int] = {}
    chosen: list[str] = []

    def use(location: MemberLocation) -> None:
        for prefix in _domain_prefixes(location):
            used[prefix] = used.get(prefix, 0) + 1

    for location in locations:
        if location.name in excluded:
            use(location)
    usable = [location for location in locations if location.name not in excluded and location.weight > 0]
    candidates = {location.name: (location, score(key, location)) for location in usable}
    first = not excluded and bool(host_domain)
    while candidates and len(chosen) < count:

        def order(item: tuple[MemberLocation, float], first: bool = first) -> tuple[object, ...]:
            location, location_score = item
            uses = tuple(used.get(prefix, 0) for prefix in _domain_prefixes(location))
            shared_domains = count_shared_domains(host_domain, location.domain) if first else 0
            return (-shared_domains, uses, -location_score, location.name)

        location, _ = min(candidates.values(), key=order)
        del candidates[location.name]
        use(location)
        chosen.append(location.name)
        first = False
    return chosen


def max_fragments_per_domain(names: Collection[str], locations: Sequence[MemberLocation]) -> int:
    """Return how many fragments on these members are lost at most when one of the widest failure domains fails."""
    lost: dict[tuple[str, ...], int] = {}
    domains = {location.name: location.domain[:1] or (location.name,) for location in locations}
    for name in names:
        domain = domains.get(name, (name,))
        lost[domain] = lost.get(domain, 0) + 1
    return max(lost.values(), default=0)


def _domain_prefixes(location: MemberLocation) -> list[tuple[str, ...]]:
    return [location.domain[: i + 1] for i in range(len(location.domain))]


def count_shared_domains(host_domain: Sequence[str], domain: Sequence[str]) -> int:
    """Return how many of the widest failure domains are the same."""
    count = 0
    for host, other in zip(host_domain, domain, strict=False):
        if host != other:
            break
        count += 1
    return count
