"""Search for the fastest way to read a device: hill climbing, as a pure function of measurements.

A search measures its best choice, then tries the neighbours of it one by one. A neighbour that is clearly faster becomes
the best, and so does one that is as fast with fewer bytes in flight; the search continues in the same direction. When no
neighbour is faster, the search rests: it uses the best choice, and tries one neighbour from time to time, less and less often.
Two measurements in a row with another rate than expected mean that the device has changed (a burst budget is used up, or
others use it too); then the search climbs again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckpt.storage.tuning.choice import Choice, ChoiceSpace

GAIN = 1.08
"""How many times faster a neighbour must be to become the best. Less is noise on most devices."""

TIE = 0.99
"""A neighbour with fewer bytes in flight becomes the best from this part of the rate on: it costs less memory and fewer
threads, and a disk that seeks between several readers shows no gain until there is one reader."""

CHANGE = 1.5
"""A device counts as changed if two measurements in a row differ from the expected rate by this factor."""

FIRST_REST_BYTES, LAST_REST_BYTES = 256 << 20, 8 << 30
"""Bytes that are read with the best choice before a neighbour is tried. The number doubles after each try without a gain, from
the first to the last."""

_SMOOTHING = 0.3
"""The weight of a new measurement of the best choice in its expected rate."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measurement: bytes that arrived in some seconds, all requested in the same way."""

    choice: Choice
    nbytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.seconds


@dataclass(frozen=True, slots=True)
class Search:
    """The state of a search. `current` is the choice to use now."""

    space: ChoiceSpace
    best: Choice
    best_rate: float | None = None
    """The expected rate of `best` in bytes a second; None before its first measurement."""
    waiting: tuple[Choice, ...] = ()
    """The neighbours of `best` that are not tried yet."""
    trial: Choice | None = None
    """The neighbour that is tried now."""
    is_resting: bool = False
    """Whether no neighbour is tried now: the best choice was found, or was learned earlier."""
    rest_bytes: int = FIRST_REST_BYTES
    """Bytes that a resting search reads between two tries."""
    rested_bytes: int = 0
    """Bytes that were read since the last try."""
    odd_measurements: int = 0
    """Measurements in a row whose rate was far from the expected one."""

    @property
    def current(self) -> Choice:
        return self.trial or self.best


def start(space: ChoiceSpace, learned: Choice | None = None) -> Search:
    """Return a search that begins at a choice. learned: the best of an earlier search; the new one then begins at rest."""
    if learned is None or learned not in space:
        return Search(space, space.first)
    return Search(space, learned, is_resting=True)


def observe(search: Search, measurement: Measurement) -> Search:
    """Return the search after a measurement."""
    if measurement.choice != search.current:  # of a choice that was given up meanwhile
        return search
    if not measurement.nbytes:  # all requests failed, which says nothing about the speed
        return search
    if search.trial is not None:
        return _after_trial(search, measurement)
    if search.best_rate is None:
        search = replace(search, best_rate=measurement.rate)
        return search if search.is_resting else _try_next(replace(search, waiting=search.space.neighbours(search.best)))
    return _after_rest(search, measurement)


def _after_trial(search: Search, measurement: Measurement) -> Search:
    assert search.trial is not None
    assert search.best_rate is not None
    costs_less = search.trial.bytes_in_flight < search.best.bytes_in_flight
    if measurement.rate < search.best_rate * (TIE if costs_less else GAIN):
        return _try_next(replace(search, trial=None))
    further = search.space.beyond(search.best, search.trial)
    others = tuple(n for n in search.space.neighbours(search.trial) if n not in (search.best, further))
    # A tie may be 1 % slower: the higher rate stays the expected one, so that ties in a row can't lower it.
    moved = replace(
        search, best=search.trial, best_rate=max(measurement.rate, search.best_rate), trial=None, is_resting=False,
        rest_bytes=FIRST_REST_BYTES,
        waiting=((further,) if further else ()) + others,
    )  # fmt: skip
    return _try_next(moved)


def _try_next(search: Search) -> Search:
    """Try the next waiting neighbour; rest if there is none, or if this was the one try of a resting search."""
    if search.is_resting:
        rest = min(2 * search.rest_bytes, LAST_REST_BYTES)
        return replace(search, trial=None, rest_bytes=rest, rested_bytes=0, odd_measurements=0)
    if not search.waiting:
        return replace(search, trial=None, is_resting=True, rested_bytes=0, odd_measurements=0)
    return replace(search, trial=search.waiting[0], waiting=search.waiting[1:])


def _after_rest(search: Search, measurement: Measurement) -> Search:
    """Return a resting search after a measurement of its best choice."""
    assert search.best_rate is not None
    ratio = measurement.rate / search.best_rate
    if not 1 / CHANGE < ratio < CHANGE:
        if search.odd_measurements:
            climbing = replace(
                search, best_rate=measurement.rate, is_resting=False, rest_bytes=FIRST_REST_BYTES, rested_bytes=0,
                odd_measurements=0, waiting=search.space.neighbours(search.best),
            )  # fmt: skip
            return _try_next(climbing)
        return replace(search, odd_measurements=1)
    expected = search.best_rate + _SMOOTHING * (measurement.rate - search.best_rate)
    rested = search.rested_bytes + measurement.nbytes
    search = replace(search, best_rate=expected, rested_bytes=rested, odd_measurements=0)
    if rested < search.rest_bytes:
        return search
    waiting = search.waiting or search.space.neighbours(search.best)
    return replace(search, trial=waiting[0] if waiting else None, waiting=waiting[1:], rested_bytes=0)
