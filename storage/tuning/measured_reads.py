"""Threads that read one device at the same time, limited and measured as a search decides.

A measurement counts only if there were enough threads all the time to keep the chosen number of requests in flight, and only
while no request of another choice is under way. So a small load and the end of a load are not measured, because there the
device is not the limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckpt.storage.tuning.choice import Choice
from ckpt.storage.tuning.request_search import Measurement, Search, observe

MIN_MEASURED_BYTES = 16 << 20
"""A shorter measurement measures the scheduler more than the device."""

MAX_MEASURED_SECONDS = 0.2
"""A measurement of a slow device ends after this time, once as many requests have ended as are in flight at most."""


class Request:
    """One request to the device. The reader sets `nbytes` to what arrived."""

    __slots__ = ("begin", "choice", "nbytes")

    def __init__(self, choice: Choice, begin: float) -> None:
        self.choice = choice
        self.begin = begin
        self.nbytes = 0


class Tuner:
    """Shares the requests to one device among threads. It may be used by several loads at once."""

    def __init__(self, search: Search, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: returns seconds."""
        self._changed = threading.Condition()
        """Guards `_workers`, `_in_flight` and `_open`. Guards changes of `_search`. Notified when a request ends."""
        self._search = search
        self._clock = clock
        self._workers = 0
        self._in_flight: set[Request] = set()
        self._open: _OpenMeasurement | None = None

    @property
    def choice(self) -> Choice:
        """The choice to use for the next request."""
        return self._search.current

    @property
    def search(self) -> Search:
        """What was found until now."""
        return self._search

    @contextmanager
    def worker(self) -> Iterator[None]:
        """Count this thread as one that has requests to make."""
        with self._changed:
            self._workers += 1
        try:
            yield
        finally:
            with self._changed:
                self._workers -= 1
                if self._workers < self._search.current.requests:  # the time until the next load says nothing of the device
                    self._open = None

    @contextmanager
    def request(self) -> Iterator[Request]:
        """Wait until the device may get one more request, and count it as in flight until the context ends."""
        with self._changed:
            while len(self._in_flight) >= self._search.current.requests:
                self._changed.wait()
            request = Request(self._search.current, self._clock())
            self._in_flight.add(request)
        try:
            yield request
        finally:
            with self._changed:
                self._in_flight.discard(request)
                self._count(request)
                self._changed.notify()

    def _count(self, request: Request) -> None:
        """Count a request that has ended, and let the search decide if it completes a measurement. Needs `_changed`."""
        current, now = self._search.current, self._clock()
        if self._workers < current.requests or request.choice is not current or self._has_others(current):
            self._open = None
        elif self._open is None:
            self._open = _OpenMeasurement(now, self._ages(now))
        else:
            self._open.add(request, now)
            if self._open.is_complete(current, now):
                self._search = observe(self._search, self._open.close(current, now, self._ages(now)))
                self._open = _OpenMeasurement(now, self._ages(now)) if self._search.current == current else None
                self._changed.notify_all()

    def _has_others(self, current: Choice) -> bool:
        """Return whether requests of another choice are in flight. Needs `_changed`."""
        return any(other.choice is not current for other in self._in_flight)

    def _ages(self, now: float) -> list[float]:
        """Return for how many seconds each request has been in flight. Needs `_changed`."""
        return [now - request.begin for request in self._in_flight]


class _OpenMeasurement:
    """A measurement that is not complete yet.

    Requests that were sent together arrive together, so the bytes that arrive between two moments are a poor measure. What
    the requests in flight have done at the beginning and at the end is estimated from their ages and the mean duration.
    """

    def __init__(self, begin: float, ages: list[float]) -> None:
        self._begin = begin
        self._ages_at_begin = ages
        self._requests = 0
        self._nbytes = 0
        self._request_seconds = 0.0

    def add(self, request: Request, now: float) -> None:
        self._requests += 1
        self._nbytes += request.nbytes
        self._request_seconds += now - request.begin

    def is_complete(self, choice: Choice, now: float) -> bool:
        if self._requests < choice.requests or now <= self._begin or not self._request_seconds:
            return False
        return self._nbytes >= max(MIN_MEASURED_BYTES, choice.bytes_in_flight) or now - self._begin >= MAX_MEASURED_SECONDS

    def close(self, choice: Choice, now: float, ages: list[float]) -> Measurement:
        mean_seconds = self._request_seconds / self._requests
        done_before = sum(min(1.0, age / mean_seconds) for age in self._ages_at_begin)
        done_of_next = sum(min(1.0, age / mean_seconds) for age in ages)
        requests = max(1.0, self._requests - done_before + done_of_next)
        return Measurement(choice, int(self._nbytes / self._requests * requests), now - self._begin)
