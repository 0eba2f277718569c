"""`codec="auto"` chooses by predicted time: a table of machines and data."""

from __future__ import annotations

import dataclasses

import pytest

from ckpt.format.codec_choice import (
    FAST_STORE,
    FASTER,
    NOT_FASTER,
    OVER_BUDGET,
    SHORT_SAVE,
    CodecSpeed,
    Resources,
    choose_codec,
    predict,
    reason_against_any,
)

PLANES, LZ4 = CodecSpeed("planes", 0.67, 1.1e9), CodecSpeed("lz4", 0.76, 2.0e9)
NOISE = [CodecSpeed("planes", 1.0, 2.5e9), CodecSpeed("lz4", 0.99, 2.0e9)]
GB = 10**9


@pytest.mark.parametrize(
    ("store", "encoders", "idle", "budget", "candidates", "chosen", "reason"),
    [
        # The training waits for the save.
        (0.1e9, 2, 0, None, [PLANES, LZ4], "planes", FASTER),  # a slow cloud disk
        (0.1e9, 1, 0, None, [PLANES, LZ4], "planes", FASTER),  # … with one core
        (0.5e9, 2, 0, None, [PLANES, LZ4], "planes", FASTER),
        (2.0e9, 1, 0, None, [PLANES, LZ4], None, NOT_FASTER),  # a fast NVMe disk, one core
        (2.0e9, 2, 0, None, [PLANES, LZ4], "lz4", FASTER),  # planes would be the limit on two cores
        (2.0e9, 16, 0, None, [PLANES, LZ4], "planes", FASTER),  # many cores
        (1.6e9, 1, 0, None, [PLANES, LZ4], "lz4", FASTER),
        (1.95e9, 1, 0, None, [PLANES, LZ4], None, NOT_FASTER),  # it would save 2.5 %, which is too little
        (12e9, 2, 0, None, [PLANES, LZ4], None, FAST_STORE),
        (0.1e9, 2, 0, None, NOISE, None, NOT_FASTER),  # incompressible data
        # A save in the background.
        (0.1e9, 1, 1, 0.0, [PLANES, LZ4], "planes", FASTER),  # one idle core is enough for a slow disk
        (0.1e9, 1, 0, 0.0, [PLANES, LZ4], None, OVER_BUDGET),  # the training uses all cores, and nothing is known of its steps
        (0.1e9, 1, 0, 12.0, [PLANES, LZ4], "planes", FASTER),  # 9.1 s of 12 s that the training does not feel
        (0.1e9, 1, 0, 6.0, [PLANES, LZ4], "lz4", FASTER),  # 5 s
        (0.1e9, 1, 0, 4.0, [PLANES, LZ4], None, OVER_BUDGET),
        (2.0e9, 8, 8, 0.0, [PLANES, LZ4], "planes", FASTER),  # idle cores
        (2.0e9, 8, 2, 0.0, [PLANES, LZ4], "lz4", FASTER),  # 1.3 cores encode with lz4, and 2.7 with planes
        (2.0e9, 8, 1, 0.0, [PLANES, LZ4], None, OVER_BUDGET),
    ],
)
def test_the_choice_for_each_machine(store, encoders, idle, budget, candidates, chosen, reason) -> None:
    choice = choose_codec("bfloat16", 10 * GB, candidates, Resources(store, encoders, idle, budget))
    assert (choice.codec, choice.reason) == (chosen, reason)
    assert choice.seconds_without == pytest.approx(10 * GB / store, abs=1e-3)
    if chosen is not None:
        assert choice.candidate == chosen
        assert choice.seconds <= 0.95 * choice.seconds_without + 1e-3
        assert budget is None or choice.stolen_seconds <= budget
    elif reason == OVER_BUDGET:
        assert choice.stolen_seconds > budget


def test_encoding_and_writing_overlap_in_a_prediction() -> None:
    resources = Resources(0.5e9, 2, 0, None)
    assert predict(None, 10 * GB, resources).durable_seconds == pytest.approx(20)
    assert predict(PLANES, 10 * GB, resources).durable_seconds == pytest.approx(0.67 * 20)
    one_core = dataclasses.replace(resources, encoders=1, store_bytes_per_second=2e9)
    assert predict(PLANES, 10 * GB, one_core).durable_seconds == pytest.approx(10 / 1.1)
    assert predict(PLANES, 10 * GB, one_core).stolen_seconds == 0  # nobody is robbed while the training waits
    background = dataclasses.replace(resources, budget_seconds=0.0, idle_processors=0.25)
    assert predict(PLANES, 10 * GB, background).stolen_seconds == pytest.approx(10 / 1.1 - 0.25 * 13.4)


def test_codecs_that_are_equally_fast_are_chosen_by_size() -> None:
    slow = Resources(0.01e9, 4, 4, None)
    small, smaller = CodecSpeed("small", 0.67, 1e9), CodecSpeed("smaller", 0.66, 0.5e9)
    assert choose_codec("float32", GB, [small, smaller], slow).codec == "smaller"
    assert choose_codec("float32", GB, [smaller, small], slow).codec == "smaller"


def test_no_codec_is_measured_where_none_can_pay() -> None:
    assert reason_against_any(100 * GB, Resources(7e9, 2, 2, None)) == FAST_STORE
    assert reason_against_any(100 * GB, Resources(7e9, 16, 16, None)) is None
    assert reason_against_any(GB, Resources(2e9, 16, 16, None)) == SHORT_SAVE
    assert choose_codec("float32", GB, [], Resources(2e9, 16, 16, None)).reason == SHORT_SAVE
