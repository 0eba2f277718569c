"""Checks whether a history of calls to one register is linearizable, by the algorithm of Wing and Gong as in Porcupine.

A history is linearizable if each call can be given a moment between its begin and its end, such that the calls in the order of
these moments return what one register returns that serves one call at a time. A call whose outcome is unknown (its client was
killed or got an error) may have any moment after its begin, or never happen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

State = str | None
"""The value of a file, None if it does not exist."""


@dataclass(frozen=True)
class Call:
    """One call of a client. Times are seconds on a clock that all clients share."""

    client: str
    kind: Literal["put", "put_new", "get", "delete"]
    began: float
    ended: float
    """Infinity if the outcome is unknown."""
    value: str | None = None
    """What `put` and `put_new` write."""
    result: str | None = None
    """What `get` returned: a value, or None if there was no file. Of `put_new`, "exists" if it was refused. Of `delete`,
    "missing" if there was no file."""

    @property
    def is_unknown(self) -> bool:
        return math.isinf(self.ended)


def state_after(call: Call, state: State) -> tuple[bool, State]:
    """Return whether a call may return its result in a state, and the state after it."""
    if call.kind == "get":
        return call.is_unknown or call.result == state, state
    if call.kind == "put":
        return True, call.value
    if call.kind == "delete":
        return call.result != "missing" or state is None, None
    if call.is_unknown:
        return True, call.value if state is None else state
    return (call.result == "exists") == (state is not None), call.value if state is None else state


class _Event:
    """The begin or the end of a call, in a list in the order of time."""

    __slots__ = ("end", "next", "number", "previous")

    def __init__(self, number: int, end: _Event | None) -> None:
        self.number = number
        self.end = end
        """The end of this call, None if this is an end."""
        self.previous: _Event = self
        self.next: _Event | None = None

    def take_out(self) -> None:
        self.previous.next = self.next
        if self.next is not None:
            self.next.previous = self.previous

    def put_back(self) -> None:
        self.previous.next = self
        if self.next is not None:
            self.next.previous = self


def is_linearizable(calls: Iterable[Call], initial: State = None) -> bool:
    """Return whether the calls to one register are linearizable."""
    history = sorted(calls, key=lambda call: call.began)
    head = _events(history)
    taken: list[tuple[_Event, State]] = []
    seen: set[tuple[int, State]] = set()
    done, state, event = 0, initial, head.next
    unknown = sum(1 << number for number, call in enumerate(history) if call.is_unknown)
    everything = (1 << len(history)) - 1
    while done | unknown != everything:
        if event is not None and event.end is not None:
            possible, following = state_after(history[event.number], state)
            with_it = done | 1 << event.number
            if possible and (with_it, following) not in seen:
                seen.add((with_it, following))
                taken.append((event, state))
                done, state = with_it, following
                event.take_out()
                event.end.take_out()
                event = head.next
            else:
                event = event.next
            continue
        if not taken:  # this call has ended before any order of the calls explains it
            return False
        event, state = taken.pop()
        assert event.end is not None
        done &= ~(1 << event.number)
        event.end.put_back()
        event.put_back()
        event = event.next
    return True


def _events(history: Sequence[Call]) -> _Event:
    """Return the head of a list of the begins and ends of calls, in the order of time. Of equal times, begins come first."""
    timed: list[tuple[float, int, _Event]] = []
    for number, call in enumerate(history):
        end = _Event(number, None)
        timed += [(call.began, 0, _Event(number, end)), (call.ended, 1, end)]
    head = last = _Event(-1, None)
    for _, _, event in sorted(timed, key=lambda each: each[:2]):
        last.next, event.previous = event, last
        last = event
    return head


def shortest_wrong_prefix(calls: Sequence[Call], initial: State = None) -> list[Call]:
    """Return the calls up to the end of the first one that no order explains, for a message. The calls are not linearizable."""
    ends = sorted(call.ended for call in calls if not call.is_unknown)
    low, high = 0, len(ends) - 1
    while low < high:
        middle = (low + high) // 2
        if is_linearizable(_until(calls, ends[middle]), initial):
            low = middle + 1
        else:
            high = middle
    return _until(calls, ends[low])


def _until(calls: Sequence[Call], moment: float) -> list[Call]:
    """Return what was known at a moment: calls that were still running have an unknown outcome."""
    return [
        call if call.ended <= moment else Call(call.client, call.kind, call.began, math.inf, call.value)
        for call in calls
        if call.began <= moment
    ]
