"""Fence numbers: by what number a client's call goes, and below which number a member refuses calls.

A number has two parts. The *ring* says which members keep records (`aggregator/records/record_ring.py`). The *era* counts
how often clients agreed to delete what nobody refers to (`aggregator/file_io/eras.py`): before that, every member is fenced
by the next era, so that a client that stood still meanwhile is refused, and looks again at what it counted on.

In era 0 the number is that of the ring alone. Later the ring stands above the lowest 32 bits, and the era in them.

Whoever forgets a register forgets its ballots too. Therefore a member in a later era takes no ballot for an absent register
unless it is above the *floor* of its number: no register is forgotten whose ballots reach that floor.
"""

from __future__ import annotations

_ERA_BITS = 32
_FIRST_WITH_ERA = 1 << _ERA_BITS  # the lowest number with an era


def has_era(number: int) -> bool:
    """Whether anything was ever collected where members are fenced by this number."""
    return number >= _FIRST_WITH_ERA


def ring_epoch(number: int) -> int:
    """The ring of a fence number."""
    return number >> _ERA_BITS if has_era(number) else number


def order_key(number: int) -> int:
    """A fence number in a form whose integers compare as the numbers do."""
    return number if has_era(number) else number << _ERA_BITS


def advance_fence(current: int, number: int) -> int:
    """The fence number of a member that was fenced by `known` when it hears of `number`. Once there is an era it stays."""
    higher = max(current, number, key=order_key)
    return order_key(higher) if has_era(current) or has_era(number) else higher


def next_era(number: int, above: int = 0) -> int | None:
    """The number of the next era of the same ring, higher than `above`; None where there is none."""
    found = max(order_key(number), above) + 1
    return found if ring_epoch(found) == ring_epoch(number) else None


def number_for_ring(ring: int, member_number: int) -> int:
    """The number by which a client of this ring goes, where members say that they are fenced by `fenced`: never by that of
    another ring, which the client does not know."""
    if not has_era(member_number):
        return ring
    return member_number if ring_epoch(member_number) == ring else ring << _ERA_BITS


def outdated_message(fence: int, number: int) -> str:
    """Why a member that is fenced refuses a call that goes by this number."""
    return f"the members that keep records have changed (ring {_describe(fence)}, not {_describe(number)}); ask for them anew"


def _describe(number: int) -> str:
    return f"{ring_epoch(number)} in era {number % _FIRST_WITH_ERA}" if has_era(number) else str(number)
