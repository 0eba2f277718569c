"""The tuner: how many requests are in flight, and what counts as a measurement."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest

from ckpt.storage.tuning.choice import Choice
from ckpt.storage.tuning.device_kinds import DISK, NETWORK
from ckpt.storage.tuning.measured_reads import MIN_MEASURED_BYTES, Request, Tuner
from ckpt.storage.tuning.request_search import start

MIB = 1 << 20
FOUR = Choice(4, 4 * MIB)


class ManualClock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Load:
    """Requests that a test begins and ends by hand, with `workers` threads counted."""

    def __init__(self, choice: Choice, workers: int) -> None:
        self.clock = ManualClock()
        self.tuner = Tuner(replace(start(DISK), best=choice), self.clock)
        self._stacks: dict[Request, ExitStack] = {}
        self._workers = ExitStack()
        self.start_workers(workers)

    def start_workers(self, count: int) -> None:
        for _ in range(count):
            self._workers.enter_context(self.tuner.worker())

    def end_workers(self) -> None:
        self._workers.close()

    def begin(self) -> Request:
        stack = ExitStack()
        request = stack.enter_context(self.tuner.request())
        self._stacks[request] = stack
        return request

    def end(self, request: Request, nbytes: int = 4 * MIB) -> None:
        request.nbytes = nbytes
        self._stacks.pop(request).close()

    def run_rounds(self, rounds: int, seconds: float) -> None:
        """Make four requests that arrive together after some seconds, several times."""
        for _ in range(rounds):
            requests = [self.begin() for _ in range(4)]
            self.clock.seconds += seconds
            for request in requests:
                self.end(request)


def test_requests_that_arrive_together_are_measured_at_the_rate_of_the_device() -> None:
    load = Load(FOUR, workers=4)
    load.run_rounds(3, seconds=0.01)
    rate = load.tuner.search.best_rate
    assert rate is not None
    assert rate == pytest.approx(16 * MIB / 0.01, rel=0.35)  # and not many times as much, as the time between two arrivals says


def test_requests_that_arrive_one_by_one_are_measured_at_the_rate_of_the_device() -> None:
    load = Load(FOUR, workers=4)
    running = []
    for _ in range(4):
        running.append(load.begin())
        load.clock.seconds += 0.01
    while load.tuner.search.best_rate is None:
        load.end(running.pop(0))
        running.append(load.begin())
        load.clock.seconds += 0.01
    assert load.tuner.search.best_rate == pytest.approx(4 * MIB / 0.01, rel=0.1)


def test_a_load_with_fewer_threads_than_requests_measures_nothing() -> None:
    load = Load(FOUR, workers=3)
    load.run_rounds(20, seconds=0.01)
    assert load.tuner.search.best_rate is None


def test_the_time_between_two_loads_is_not_measured() -> None:
    """In the second one, the device would seem slow."""
    load = Load(FOUR, workers=4)
    load.run_rounds(1, seconds=0.01)
    load.end_workers()
    load.clock.seconds += 60
    load.start_workers(4)
    load.run_rounds(3, seconds=0.01)
    rate = load.tuner.search.best_rate
    assert rate is not None
    assert rate == pytest.approx(16 * MIB / 0.01, rel=0.35)


def test_a_failed_request_gives_its_place_back() -> None:
    load = Load(replace(FOUR, requests=1), workers=1)
    for _ in range(3):
        with suppress(OSError), load.tuner.request():
            raise OSError("the disk")
    began: list[Request] = []
    thread = threading.Thread(target=lambda: began.append(load.begin()), daemon=True)
    thread.start()
    thread.join(600)
    assert len(began) == 1, "the next request waits for the place of a failed one"
    load.end(began[0])


def test_never_more_requests_are_in_flight_than_chosen() -> None:
    tuner = Tuner(replace(start(NETWORK), best=Choice(8, MIB)))
    lock, everybody, in_flight, most, chosen = threading.Lock(), threading.Barrier(24), 0, [], []

    def read() -> None:
        nonlocal in_flight
        with tuner.worker():
            everybody.wait()
            for _ in range(50):
                with tuner.request() as request:
                    with lock:
                        in_flight += 1
                        most.append(in_flight)
                        chosen.append(request.choice)
                    time.sleep(0.001)
                    request.nbytes = MIB
                    with lock:
                        in_flight -= 1

    threads = [threading.Thread(target=read) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 24 * 50
    assert max(most) <= max(choice.requests for choice in chosen)
    assert tuner.search.best_rate is not None  # 50 MiB of each thread are several measurements


def test_a_measurement_has_at_least_as_many_bytes_as_are_in_flight() -> None:
    assert 4 * FOUR.bytes_in_flight >= MIN_MEASURED_BYTES
    load = Load(FOUR, workers=4)
    load.run_rounds(1, seconds=0.01)
    assert load.tuner.search.best_rate is None  # the first arrival only begins the measurement
