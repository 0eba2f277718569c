"""Devices whose rates are formulas, for the search for the fastest way to read one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from ckpt.storage.tuning.choice import Choice, ChoiceSpace
from ckpt.storage.tuning.measured_reads import MIN_MEASURED_BYTES
from ckpt.storage.tuning.request_search import Measurement, Search, observe

MIB, GIB = 1 << 20, 1 << 30

Rate = Callable[[Choice], float]
"""Bytes a second that a device delivers for a choice."""


@dataclass(frozen=True)
class SimulatedDevice:
    """A device whose rate may change with the bytes that it has delivered."""

    name: str
    rate: Rate
    rate_later: Rate | None = None
    changes_after: int = 0
    """Bytes after which `rate_later` applies."""
    noise: float = 0.0
    """A measurement's rate is divided by 1 to 1 + 2 * noise, at random."""

    def rate_at(self, choice: Choice, nbytes: int) -> float:
        return self.rate_later(choice) if self.rate_later and nbytes >= self.changes_after else self.rate(choice)

    def best(self, space: ChoiceSpace, nbytes: int = 0) -> Choice:
        """Return the fastest fixed choice after some bytes."""
        every = (
            Choice(requests, length) for requests in space.requests for length in space.request_bytes
        )  # fmt: skip
        return max((choice for choice in every if choice in space), key=lambda choice: self.rate_at(choice, nbytes))


def queue(limit: float, latency: float, stream: float) -> Rate:
    """Return the rate of requests that wait `latency` seconds, and then transfer at `stream` bytes a second.

    limit: of all requests together.
    """

    def rate(choice: Choice) -> float:
        each = choice.request_bytes / (latency + choice.request_bytes / stream)
        return min(limit, choice.requests * each)

    return rate


def spinning(limit: float) -> Rate:
    """Return the rate of a disk that seeks between several readers, unless its requests are long."""

    def rate(choice: Choice) -> float:
        seek = 0.008 if choice.requests > 1 else 0.001
        return choice.request_bytes / (seek + choice.request_bytes / limit)

    return rate


@dataclass(frozen=True)
class SimulatedRead:
    """What a search did while it read from a simulated device."""

    search: Search
    seconds: float


def read(device: SimulatedDevice, search: Search, nbytes: int, rng: random.Random, delivered: int = 0) -> SimulatedRead:
    """Read bytes from a device as a tuner does. delivered: bytes that it has delivered before."""
    seconds = 0.0
    end = delivered + nbytes
    while delivered < end:
        choice = search.current
        size = min(max(MIN_MEASURED_BYTES, choice.bytes_in_flight), end - delivered)
        took = size / device.rate_at(choice, delivered) * (1 + 2 * device.noise * rng.random())
        seconds += took
        delivered += size
        search = observe(search, Measurement(choice, size, took))
    return SimulatedRead(search, seconds)
