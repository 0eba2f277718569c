"""`auto` chooses differences by predicted time: a table of machines and data."""

from __future__ import annotations

import pytest

from ckpt.format.codec_choice import FASTER, OVER_BUDGET, Resources
from ckpt.format.difference_choice import NOT_HALF, DifferenceSpeed, automatic_range, choose_differences

GB = 10**9
SPARSE, DENSE = DifferenceSpeed(0.03, 1.0e9, 3e9), DifferenceSpeed(0.8, 0.4e9, 3e9)


@pytest.mark.parametrize(
    ("speed", "in_full", "store", "encoders", "budget", "reason"),
    [
        (SPARSE, 100.0, 0.1e9, 2, None, FASTER),  # 3 s for writing, 5 s for encoding, 1.7 s for the bases
        (SPARSE, 10.0, 1.0e9, 2, None, NOT_HALF),  # 5 s for encoding, 1.7 s for the bases
        (SPARSE, 10.0, 1.0e9, 8, None, FASTER),
        (DENSE, 100.0, 0.1e9, 8, None, NOT_HALF),  # 80 s for writing
        (DifferenceSpeed(0.03, 1.0e9, 0.1e9), 100.0, 0.1e9, 1, None, NOT_HALF),  # the bases come from the same slow disk
        (DifferenceSpeed(0.03, 1.0e9, None), 100.0, 0.1e9, 1, None, FASTER),  # nothing is known of bases that were read before
        (SPARSE, 100.0, 0.1e9, 2, 20.0, FASTER),  # the training can spare 20 processor seconds, and they take 10
        (SPARSE, 100.0, 0.1e9, 2, 5.0, OVER_BUDGET),
    ],
)
def test_the_choice_for_each_machine(speed, in_full, store, encoders, budget, reason) -> None:
    choice = choose_differences("bfloat16", 10 * GB, speed, in_full, Resources(store, encoders, 0.0, budget))
    assert (choice.reason, choice.stores_differences) == (reason, reason == FASTER)
    assert (choice.seconds_in_full, choice.ratio) == (in_full, speed.ratio)
    assert (choice.seconds <= in_full / 2) == (reason != NOT_HALF)
    assert (choice.stolen_seconds == 0) == (budget is None)


@pytest.mark.parametrize(
    ("step", "previous", "keep_every", "numbers"),
    [
        (100, 99, None, 16),
        (300, 200, None, 1600),
        (300, 200, 1000, 1000),
        (300, 200, 10_000, 1250),  # the longest range that begins at each step that is kept
        (300, 200, 200, 200),
        (300, 200, 100, None),  # every step is kept permanently
        (299, 199, 300, None),  # it is kept as the 300th step of a loop that counts from 0
        (299, 298, 300, 15),  # the next step is 300, and is kept in its place
        (300, 200, 1, None),
        (300, None, None, None),
        (300, 300, None, None),
        (300, 301, None, None),  # after a roll-back
        (7, 5, 997, None),  # a prime number: no range of at most 16 saves begins at each step that is kept
    ],
)
def test_a_range_has_16_saves_and_begins_at_each_step_that_is_kept(step, previous, keep_every, numbers) -> None:
    assert automatic_range(step, previous, keep_every) == numbers
    if numbers is not None and keep_every is not None:
        assert keep_every % numbers == 0
