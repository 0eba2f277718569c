"""The search for the fastest way to read a device, on simulated devices."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from helpers.simulated_devices import GIB, MIB, SimulatedDevice, queue, read, spinning

from ckpt.storage.tuning.choice import Choice, ChoiceSpace
from ckpt.storage.tuning.device_kinds import DISK, NETWORK
from ckpt.storage.tuning.request_search import LAST_REST_BYTES, Measurement, Search, observe, start

ONE_QUEUE = SimulatedDevice("one fast queue", queue(2.0e9, 0.0001, 2.0e9))
DEEP = SimulatedDevice("deep queue", queue(6.0e9, 0.002, 0.6e9))
SPINNING = SimulatedDevice("spinning disk", spinning(0.2e9))
NOISY = SimulatedDevice("noisy neighbour", queue(3.0e9, 0.001, 0.8e9), noise=0.15)
FAR = SimulatedDevice("bucket, 50 ms away", queue(2.5e9, 0.05, 90e6))
NEAR = SimulatedDevice("bucket in the same rack", queue(1.2e9, 0.002, 0.4e9))
STEADY = [
    (ONE_QUEUE, DISK),
    (DEEP, DISK),
    (SPINNING, DISK),
    (NOISY, DISK),
    (FAR, NETWORK),
    (NEAR, NETWORK),
]
BURST = SimulatedDevice(
    "burst budget", queue(3.0e9, 0.001, 0.5e9), queue(0.3e9, 0.02, 0.3e9), changes_after=2 * GIB
)  # fmt: skip

steady = pytest.mark.parametrize(("device", "space"), STEADY, ids=[device.name for device, _ in STEADY])


def share_of_best(device: SimulatedDevice, search: Search, delivered: int = 0) -> float:
    return device.rate_at(search.best, delivered) / device.rate_at(device.best(search.space, delivered), delivered)


@steady
@pytest.mark.parametrize("seed", range(5))
def test_a_search_finds_a_way_close_to_the_best_within_a_gigabyte(
    device: SimulatedDevice, space: ChoiceSpace, seed: int
) -> None:
    found = read(device, start(space), GIB, random.Random(seed))
    assert share_of_best(device, found.search) >= (0.9 if device.noise else 0.95), found.search


@steady
def test_a_search_is_close_to_the_best_after_its_first_reads(device: SimulatedDevice, space: ChoiceSpace) -> None:
    # A distant bucket needs 250 MB in flight, so one measurement takes that many bytes.
    found = read(device, start(space), (512 if device is FAR else 256) * MIB, random.Random(1))
    assert share_of_best(device, found.search) >= 0.75, found.search


@steady
def test_a_search_of_a_known_device_costs_at_most_five_percent(device: SimulatedDevice, space: ChoiceSpace) -> None:
    learned = read(device, start(space), 4 * GIB, random.Random(2)).search.best
    nbytes = 16 * GIB
    quiet = replace(device, noise=0.0)
    found = read(quiet, start(space, learned), nbytes, random.Random(3))
    assert found.seconds <= 1.05 * nbytes / device.rate_at(device.best(space), 0), found.search


def test_a_search_follows_a_device_that_has_changed_within_a_second() -> None:
    rng = random.Random(4)
    before = read(BURST, start(DISK), 2 * GIB, rng).search
    assert share_of_best(BURST, before) >= 0.9
    after = read(BURST, before, 192 * MIB, rng, delivered=2 * GIB)
    assert share_of_best(BURST, after.search, 2 * GIB) >= 0.9, after.search
    assert after.seconds <= 1.0


def test_a_resting_search_tries_less_and_less_often() -> None:
    found = read(ONE_QUEUE, start(DISK), 64 * GIB, random.Random(5)).search
    assert found.is_resting
    assert found.rest_bytes == LAST_REST_BYTES


def test_one_odd_window_changes_nothing_and_two_make_the_search_climb() -> None:
    search = read(ONE_QUEUE, start(DISK), GIB, random.Random(6)).search
    while search.trial is not None:
        search = observe(search, Measurement(search.current, MIB, 1.0))
    assert search.best_rate is not None
    slow = Measurement(search.best, MIB, MIB / search.best_rate * 4)
    once = observe(search, slow)
    assert once.is_resting
    assert once.best_rate == search.best_rate
    assert not observe(once, slow).is_resting


def test_a_window_of_a_choice_that_was_given_up_is_ignored() -> None:
    search = start(DISK)
    assert observe(search, Measurement(replace(search.current, requests=1), MIB, 1.0)) is search


def test_a_choice_outside_of_the_space_is_not_used() -> None:
    assert start(DISK, Choice(7, 12345)).best == DISK.first


@pytest.mark.parametrize("space", [DISK, NETWORK], ids=["disk", "network"])
def test_every_choice_of_a_space_is_reached_by_neighbours_and_none_uses_more_memory_than_allowed(space: ChoiceSpace) -> None:
    reached, waiting = {space.first}, [space.first]
    while waiting:
        for other in space.neighbours(waiting.pop()):
            if other not in reached:
                reached.add(other)
                waiting.append(other)
    every = {
        Choice(requests, length) for requests in space.requests for length in space.request_bytes
    }  # fmt: skip
    assert reached == {choice for choice in every if choice.bytes_in_flight <= space.max_bytes_in_flight}


@pytest.mark.parametrize("learned", [None, Choice(4, 1 << 20)])
def test_requests_that_all_fail_say_nothing_about_the_speed(learned: Choice | None) -> None:
    search = start(DISK, learned)
    for _ in range(3):
        assert observe(search, Measurement(search.current, 0, 1.0)) == search
