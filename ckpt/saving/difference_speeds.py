"""The class DifferenceSpeeds, which measures differences during saves, so that `codec="auto"` can choose them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from ckpt.format.difference_choice import DifferenceSpeed

_TRIAL_SECONDS = 60.0
"""After this time, one difference is tried again where none are stored, since the data of training change."""

_BLOCK_WEIGHT = 0.1
"""The weight of one block in the averages."""

_TRIAL_WEIGHT = 0.5
"""The weight of the first block after a pause of `_TRIAL_SECONDS`."""


@dataclass(frozen=True, slots=True)
class DifferenceMeasurement:
    """One difference that was computed."""

    nbytes: int
    """Raw bytes of the block."""
    stored: int
    """Bytes of the encoded difference."""
    processor_seconds: float
    """Processor time of reading and verifying the base, and of computing and encoding the difference."""
    base_seconds: float | None
    """Seconds that the base took to read; None if the process read it for the first time, so that no cache had it."""


class DifferenceSpeeds:
    """Measurements of differences by type of elements, for one store. Safe to use from many threads.

    clock: returns the seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        """Guards the following attributes."""
        self._speeds: dict[str, DifferenceSpeed] = {}
        self._tried_at: dict[str, float] = {}
        self._noted_at: dict[str, float] = {}

    def speed(self, dtype: str) -> DifferenceSpeed | None:
        """Return the measurements for elements of this type, None if there are none."""
        with self._lock:
            return self._speeds.get(dtype)

    def takes_trial(self, dtype: str) -> bool:
        """Return whether the caller is to try one difference: True for one caller in each minute."""
        now = self._clock()
        with self._lock:
            if now - self._tried_at.get(dtype, -_TRIAL_SECONDS) < _TRIAL_SECONDS:
                return False
            self._tried_at[dtype] = now
            return True

    def renew_trial(self, dtype: str) -> None:
        """Let another caller try a difference: the block of the last one had no base."""
        with self._lock:
            self._tried_at.pop(dtype, None)

    def note(self, dtype: str, measured: DifferenceMeasurement) -> None:
        """Take a difference of elements of this type into the averages."""
        now = self._clock()
        ratio = measured.stored / max(1, measured.nbytes)
        speed = measured.nbytes / max(measured.processor_seconds, 1e-9)
        base = None if measured.base_seconds is None else measured.nbytes / max(measured.base_seconds, 1e-9)
        with self._lock:
            before = self._speeds.get(dtype, DifferenceSpeed(ratio, speed, base))
            weight = _BLOCK_WEIGHT if now - self._noted_at.get(dtype, now) < _TRIAL_SECONDS else _TRIAL_WEIGHT
            self._noted_at[dtype] = now
            self._speeds[dtype] = DifferenceSpeed(
                _averaged(before.ratio, ratio, weight),
                _averaged(before.bytes_per_second, speed, weight),
                _averaged_if_known(before.base_bytes_per_second, base, weight),
            )


def _averaged(before: float, new: float, weight: float) -> float:
    return before + weight * (new - before)


def _averaged_if_known(before: float | None, new: float | None, weight: float) -> float | None:
    if before is None or new is None:
        return new if before is None else before
    return _averaged(before, new, weight)
