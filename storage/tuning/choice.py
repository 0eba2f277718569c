"""`Choice`, a way to read a device, and `ChoiceSpace`, the ways to choose from. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Choice:
    """A way to read a device."""

    requests: int
    """How many requests are in flight at most."""
    request_bytes: int
    """The length of a request, in bytes."""

    @property
    def bytes_in_flight(self) -> int:
        """The most bytes that are requested at a time."""
        return self.requests * self.request_bytes


@dataclass(frozen=True, slots=True)
class ChoiceSpace:
    """The ways in which a kind of device can be read, each list in ascending order."""

    requests: tuple[int, ...]
    request_bytes: tuple[int, ...]
    first: Choice
    """The choice for a device of which nothing is known."""
    max_bytes_in_flight: int
    """A limit of memory: no choice requests more bytes at a time than this."""

    def __contains__(self, choice: object) -> bool:
        """Return whether the space has this choice. A file may have one of an older version."""
        return (
            isinstance(choice, Choice)
            and choice.requests in self.requests
            and choice.request_bytes in self.request_bytes
            and choice.bytes_in_flight <= self.max_bytes_in_flight
        )

    def neighbours(self, choice: Choice) -> tuple[Choice, ...]:
        """Return the choices that differ in one thing, by one step. Those that can gain the most come first."""
        found = [
            self._with_requests(choice, 1),
            self._with_requests(choice, -1),
            self._with_length(choice, 1),
            self._with_length(choice, -1),
        ]
        return tuple(other for other in found if other is not None and other in self)

    def beyond(self, previous: Choice, choice: Choice) -> Choice | None:
        """Return the choice one step further in the direction from `previous` to `choice`; None at the end of a list."""
        if choice.requests != previous.requests:
            further = self._with_requests(choice, 1 if choice.requests > previous.requests else -1)
        elif choice.request_bytes != previous.request_bytes:
            further = self._with_length(choice, 1 if choice.request_bytes > previous.request_bytes else -1)
        else:
            return None
        return further if further in self else None

    def _with_requests(self, choice: Choice, steps: int) -> Choice | None:
        requests = _stepped(self.requests, choice.requests, steps)
        return replace(choice, requests=requests) if requests else None

    def _with_length(self, choice: Choice, steps: int) -> Choice | None:
        request_bytes = _stepped(self.request_bytes, choice.request_bytes, steps)
        return replace(choice, request_bytes=request_bytes) if request_bytes else None


def _stepped(values: Sequence[int], value: int, steps: int) -> int | None:
    index = values.index(value) + steps
    return values[index] if 0 <= index < len(values) else None
