"""What decides between codecs and none: the rate of whole saves, measured, tried again, and forgotten when it changes."""

from __future__ import annotations

import pytest

from ckpt.saving.codec_tuner import CodecTuner, SaveConditions
from ckpt.saving.save_rates import IS_SLOWER, IS_TRIAL, RETRY_SAVES, SaveRates, SaveTimer

GB = 10**9


class Clock:
    seconds = 100.0

    def now(self) -> float:
        return self.seconds


def run(rates: SaveRates, saves: int, with_codecs: float, without: float) -> tuple[SaveRates, str]:
    """Let saves follow the decisions. Return the rates after them, and a letter for each save: `c` with codecs, `-` without."""
    letters = ""
    for _ in range(saves):
        encodes = rates.reason_against() is None
        letters += "c" if encodes else "-"
        rates = rates.observed(encodes, with_codecs if encodes else without)
    return rates, letters


def test_a_codec_that_makes_saves_slower_is_used_once_and_then_rarely() -> None:
    _, letters = run(SaveRates(), 400, 1 * GB, 2 * GB)
    assert letters.startswith("c-" + "-" * (RETRY_SAVES - 1) + "c")
    assert letters.count("c") <= 6  # after 16, 32, 64, 128 … saves


def test_a_codec_that_makes_saves_faster_stays_and_none_is_tried_rarely() -> None:
    _, letters = run(SaveRates(), 400, 2 * GB, 1 * GB)
    assert letters.startswith("c-" + "c" * RETRY_SAVES + "-c")
    assert letters.count("-") <= 6


def test_a_gain_of_less_than_a_twentieth_is_none() -> None:
    rates, _ = run(SaveRates(), 2, 1.04 * GB, 1 * GB)
    assert rates.reason_against() == IS_SLOWER
    rates, _ = run(SaveRates(), 2, 1.06 * GB, 1 * GB)
    assert rates.reason_against() is None


@pytest.mark.parametrize("saves", [2, 20, 300])
def test_a_store_that_becomes_slow_gets_codecs_after_few_saves(saves: int) -> None:
    rates, _ = run(SaveRates(), saves, 1 * GB, 2 * GB)
    _, letters = run(rates, 8, 0.5 * GB, 0.2 * GB)
    assert letters.endswith("ccc")


def test_a_store_that_becomes_fast_gets_none_after_the_next_trial() -> None:
    rates, _ = run(SaveRates(), 10, 0.5 * GB, 0.2 * GB)
    _, letters = run(rates, 2 * RETRY_SAVES, 1 * GB, 4 * GB)
    assert letters[RETRY_SAVES:].count("c") <= 1


def test_one_slow_save_is_forgotten() -> None:
    rates, _ = run(SaveRates(), 2, 0.1 * GB, 1 * GB)  # another job used the processors during the only save with codecs
    rates, letters = run(rates, 3 * RETRY_SAVES, 3 * GB, 1 * GB)
    assert letters.endswith("ccc")
    assert rates.encoding_is_faster


def timed(*blocks: tuple[float, int, bool | None], gap: float = 0.0, could_encode_all: bool = True) -> SaveTimer:
    clock = Clock()
    timer = SaveTimer(could_encode_all, clock.now)
    for seconds, nbytes, has_encoded in blocks:
        timer.began()
        clock.seconds += seconds
        timer.ended(nbytes, has_encoded)
        clock.seconds += gap
    timer.began()
    clock.seconds += 1.0  # until all is durable
    timer.ended()
    return timer


def test_the_time_counts_while_a_thread_works_and_until_all_is_durable() -> None:
    rates = timed((1.0, GB, False), (2.0, GB, False), gap=100.0).update(SaveRates())
    assert rates == SaveRates(without=pytest.approx(0.5 * GB), saves_since_with=1)


def test_threads_that_work_at_the_same_time_count_once() -> None:
    clock = Clock()
    timer = SaveTimer(True, clock.now)
    timer.began()
    timer.began()
    clock.seconds += 1.0
    timer.ended(GB, True)
    timer.ended(GB, True)
    assert timer.update(SaveRates()).with_codecs == pytest.approx(2 * GB)


@pytest.mark.parametrize(
    ("blocks", "could_encode_all", "counts"),
    [
        ([(1.0, 6 * GB, True), (1.0, 4 * GB, False)], False, True),  # the speed was unknown during the first blocks
        ([(1.0, 4 * GB, True), (1.0, 6 * GB, False)], False, False),
        ([(1.0, 4 * GB, True), (1.0, 6 * GB, False)], True, True),  # blocks of one type are not encoded
        ([(1.0, 8 * GB, True), (1.0, 2 * GB, None)], True, False),  # as differences, or with the codec of an option
        ([(1.0, 2 * GB, None)], True, False),
        ([(1.0, 0, None)], True, False),  # all blocks are stored already, and the save only waits for the store
        ([(1.0, 0, None)], False, False),
    ],
)
def test_saves_that_say_nothing_are_not_counted(
    blocks: list[tuple[float, int, bool | None]], could_encode_all: bool, counts: bool
) -> None:
    assert (timed(*blocks, could_encode_all=could_encode_all).update(SaveRates()) != SaveRates()) is counts


def test_a_short_save_is_not_counted() -> None:
    clock = Clock()
    timer = SaveTimer(True, clock.now)
    timer.began()
    clock.seconds += 0.2
    timer.ended(GB, True)
    assert timer.update(SaveRates()) == SaveRates()


def test_a_failed_save_is_not_counted() -> None:
    clock = Clock()
    tuner = CodecTuner(lambda: None, clock.now)
    for fails in (True, False):
        save = tuner.begin_save(SaveConditions(GB, 4, True, 1))
        save.block_began()
        clock.seconds += 100.0 if fails else 1.0
        save.block_ended(GB, False)
        if not fails:
            with save.waiting_for_store():
                pass
        save.end()
    assert tuner.rates(caller_waits=True).without == pytest.approx(GB)
    assert tuner.rates(caller_waits=False) == SaveRates()  # saves in the background get less of the processors


def test_a_trial_says_why_in_the_record() -> None:
    rates, _ = run(SaveRates(), 1, GB, GB)
    assert rates.reason_against() == IS_TRIAL
