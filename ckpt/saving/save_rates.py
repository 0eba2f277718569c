"""How fast saves to one store were, with codecs and without, and which of the two the next save uses.

A prediction adds what was measured of the store and of a codec one by one. In a save, encoding competes with staging, digests
and the writing itself, and a store seems slow while few threads write to it. So the prediction only proposes a codec. What
decides is the rate of whole saves: raw bytes for each second until they were durable.

On a disk that takes 2 GB/s, a save of 2 GB was predicted to take 1.3 s with a codec and 1.6 s without. It took 2.2 s with
it and 1.1 s without.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ckpt.format.codec_choice import MIN_GAIN
from ckpt.saving.busy_time import BusyTime

MIN_MEASURED_SECONDS = 0.3
"""The rate of a shorter save says more about its start and end than about the store."""

RETRY_SAVES = 16
"""After as many saves, the way that was slower is tried once. The number doubles each time that it was slower again."""

_MAX_RETRY_SAVES = 256
_SAVE_WEIGHT = 0.5

_FEW, _MOST = 0.1, 0.5
"""Shares of the bytes of a save. A save that encoded fewer than `_FEW` is one without codecs. If codecs could be chosen only
after some blocks, because the speed of the store was unknown, a save is one with codecs if it encoded at least `_MOST`."""

IS_SLOWER = "saves with it took longer than without it"
IS_TRIAL = "this save measures the rate without it"
"""The reasons against a codec that is predicted to be faster, as the commit record has them."""


@dataclass(frozen=True, slots=True)
class SaveRates:
    """Rates in raw bytes a second, None until a save was measured. Pure: `observed` returns the next value."""

    with_codecs: float | None = None
    without: float | None = None
    saves_since_with: int = 0
    saves_since_without: int = 0
    retry_saves: int = RETRY_SAVES
    """The number of saves after which the slower way is tried again."""

    @property
    def encoding_is_faster(self) -> bool:
        """Whether saves with codecs are clearly faster; also if one of the two was never measured."""
        if self.with_codecs is None or self.without is None:
            return True
        return self.with_codecs * (1 - MIN_GAIN) >= self.without

    def reason_against(self) -> str | None:
        """Return why the next save must not encode, None if it may."""
        if self.with_codecs is None:
            return None
        if self.without is None:
            return IS_TRIAL
        if self.encoding_is_faster:
            return IS_TRIAL if self.saves_since_without >= self.retry_saves else None
        return None if self.saves_since_with >= self.retry_saves else IS_SLOWER

    def observed(self, has_encoded: bool, bytes_per_second: float) -> SaveRates:
        """Return the rates after one more save."""
        was_faster = self.encoding_is_faster
        if has_encoded:
            rates = replace(
                self, with_codecs=_average(self.with_codecs, bytes_per_second), saves_since_with=0,
                saves_since_without=self.saves_since_without + 1,
            )  # fmt: skip
        else:
            rates = replace(
                self, without=_average(self.without, bytes_per_second), saves_since_without=0,
                saves_since_with=self.saves_since_with + 1,
            )  # fmt: skip
        if rates.encoding_is_faster != was_faster:
            return replace(rates, retry_saves=RETRY_SAVES)
        was_retry = (self.saves_since_with if has_encoded else self.saves_since_without) >= self.retry_saves
        return replace(rates, retry_saves=min(_MAX_RETRY_SAVES, 2 * self.retry_saves)) if was_retry else rates


def _average(known: float | None, measured: float) -> float:
    return measured if known is None else known + _SAVE_WEIGHT * (measured - known)


class SaveTimer:
    """Measures the rate of one save. Safe to use from many threads; a lock guards all attributes.

    Only the time counts in which a thread encodes or writes a block, or waits until all are durable: between them, a save may
    wait for the training.

    could_encode_all: whether codecs were chosen from the first block on.
    clock: returns the seconds of a monotonic clock.
    """

    def __init__(self, could_encode_all: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._could_encode_all = could_encode_all
        self._lock = threading.Lock()
        """Guards `_working` and `_raw_bytes`."""
        self._working = BusyTime(clock)
        self._raw_bytes: dict[bool | None, int] = {True: 0, False: 0, None: 0}
        """By whether a codec that was chosen automatically encoded the blocks; None where nothing was chosen."""

    def began(self) -> None:
        """Record that a thread begins with a block, or waits until all are durable."""
        with self._lock:
            self._working.add_threads(1)

    def ended(self, nbytes: int = 0, has_encoded: bool | None = None) -> None:
        """Record that a thread has written a block of `nbytes` raw bytes.

        has_encoded: whether a codec that was chosen automatically encoded it; None if nothing was chosen for it.
        """
        with self._lock:
            self._working.add_threads(-1)
            self._raw_bytes[has_encoded] += nbytes

    def update(self, rates: SaveRates) -> SaveRates:
        """Return the rates after this save; the same where it says nothing about them."""
        with self._lock:
            encoded, total = self._raw_bytes[True], self._raw_bytes[True] + self._raw_bytes[False]
            if not total or self._working.seconds < MIN_MEASURED_SECONDS or self._raw_bytes[None] > _FEW * total:
                return rates
            has_encoded = encoded >= _FEW * total
            if has_encoded and not self._could_encode_all and encoded < _MOST * total:
                return rates
            return rates.observed(has_encoded, total / self._working.seconds)
