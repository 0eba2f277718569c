"""Fence numbers: each call of a client has one, and a member refuses calls with lower numbers than its own.

A number has two parts. The *epoch* is the number of the record ring, the list of members that keep records
(`aggregator/records/record_ring.py`). The *era* counts how often clients agreed to delete unreferenced data
(`aggregator/records/eras.py`). Before each such deletion, every member is fenced by the next era. So a client that was stopped
meanwhile is refused, and must read again what it relied on.

In era 0 the number is the epoch alone. In later eras the epoch is above the lowest 32 bits, and the era is in them.

A member that deletes a register loses its ballots too. Therefore a member in a later era accepts a ballot for a missing
register only above the *floor* of its number: no register is deleted whose ballots reach that floor.
"""

from __future__ import annotations

_ERA_BITS = 32
_FIRST_WITH_ERA = 1 << _ERA_BITS  # the lowest number with an era


def has_era(number: int) -> bool:
    """Return whether a fence number has an era above 0, so that data may have been collected."""
    return number >= _FIRST_WITH_ERA


def ring_epoch(number: int) -> int:
    """Return the epoch of a fence number."""
    return number >> _ERA_BITS if has_era(number) else number


def order_key(number: int) -> int:
    """Return a fence number as an integer by which fence numbers are ordered."""
    return number if has_era(number) else number << _ERA_BITS


def advance_fence(current: int, number: int) -> int:
    """Return the new fence number of a member with the number `current` that is fenced by `number`: the higher one.

    If either number has an era, so has the result.
    """
    higher = max(current, number, key=order_key)
    return order_key(higher) if has_era(current) or has_era(number) else higher


def next_era(number: int, above: int = 0) -> int | None:
    """Return the fence number of the next era of the same epoch, higher than `above`; None if the eras are used up."""
    found = max(order_key(number), above) + 1
    return found if ring_epoch(found) == ring_epoch(number) else None


def number_for_ring(epoch: int, member_number: int) -> int:
    """Return the fence number for calls of a client with the ring of this epoch, given the number that a member reports.

    A client never uses a number of another ring, whose members it does not know.
    """
    if not has_era(member_number):
        return epoch
    return member_number if ring_epoch(member_number) == epoch else epoch << _ERA_BITS


def outdated_message(fence: int, number: int) -> str:
    """Return the message of a member with the number `fence` that refuses a call with `number`."""
    return (
        f"the members that keep records have changed: they have ring {_describe(fence)}, and the call has "
        f"ring {_describe(number)}"
    )


def _describe(number: int) -> str:
    return f"{ring_epoch(number)} in era {number % _FIRST_WITH_ERA}" if has_era(number) else str(number)
