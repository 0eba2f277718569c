"""Choose between differences and full blocks by predicted time, for `codec="auto"`.

Pure functions of measurements. `ckpt/saving/difference_speeds.py` measures; the commit record keeps the choices.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.format.codec_choice import (
    FASTER,
    OVER_BUDGET,
    CodecChoice,
    CodecSpeed,
    Prediction,
    Resources,
    is_within_budget,
    predict,
)  # fmt: skip

MAX_AUTOMATIC_FRACTION = 0.5
"""The largest fraction of a full block, and of the seconds of a save in full, at which `auto` stores the difference. A larger
one does not justify that a load reads two blocks for one, and that several steps need the same bytes."""

SAVES_PER_BASE = 16
"""The most saves that share one base."""

NOT_HALF = "not faster by half"
"""The reason against differences if they save too little time."""


@dataclass(frozen=True, slots=True)
class DifferenceSpeed:
    """Measurements of differences of one kind of data."""

    ratio: float
    """Stored bytes of a difference divided by the raw bytes of the block."""
    bytes_per_second: float
    """Raw bytes for which one core verifies the base, and computes and encodes the difference, in a second."""
    base_bytes_per_second: float | None
    """Raw bytes of bases that one thread reads in a second, once the host has read them before. None until it is measured."""


@dataclass(frozen=True, slots=True)
class DifferenceChoice:
    """Whether `auto` stored differences for elements of one type, and the prediction for all bytes of the rank."""

    dtype: str
    stores_differences: bool
    reason: str
    ratio: float
    core_bytes_per_second: float
    base_bytes_per_second: float | None
    seconds: float
    """Seconds to durable with differences."""
    seconds_in_full: float
    """Seconds to durable with full blocks, encoded as `auto` chose for them."""
    stolen_seconds: float
    """Processor time that the training loses to differences."""


@dataclass(frozen=True, slots=True)
class AutomaticChoices:
    """All that `auto` chose in one save on one rank, one choice for each type of elements."""

    codecs: tuple[CodecChoice, ...]
    differences: tuple[DifferenceChoice, ...]


def choose_differences(
    dtype: str, nbytes: int, speed: DifferenceSpeed, seconds_in_full: float, resources: Resources
) -> DifferenceChoice:
    """Return whether differences halve the seconds to durable, within the budget of processor time.

    nbytes: the raw bytes of the save.
    seconds_in_full: the predicted seconds of a save in full.
    """
    written = predict(CodecSpeed("", speed.ratio, speed.bytes_per_second), nbytes, resources)
    rate = speed.base_bytes_per_second
    reading = 0.0 if rate is None else nbytes / (rate * max(1.0, resources.encoders))
    prediction = Prediction(written.durable_seconds + reading, written.stolen_seconds)
    is_faster = prediction.durable_seconds <= MAX_AUTOMATIC_FRACTION * seconds_in_full
    fits = is_within_budget(prediction, resources)
    return DifferenceChoice(
        dtype,
        is_faster and fits,
        NOT_HALF if not is_faster else FASTER if fits else OVER_BUDGET,
        ratio=round(speed.ratio, 4),
        core_bytes_per_second=round(speed.bytes_per_second),
        base_bytes_per_second=None if rate is None else round(rate),
        seconds=round(prediction.durable_seconds, 3),
        seconds_in_full=round(seconds_in_full, 3),
        stolen_seconds=round(prediction.stolen_seconds, 3),
    )


def automatic_range(step: int, previous_step: int | None, keep_every: int | None) -> int | None:
    """Return how many step numbers share one base; None if this step is stored in full, whatever its number.

    A step is stored in full if there is no earlier step, or if no range has room for two saves. Each interval between saves is
    taken to be as long as the one from the previous step to this one.

    keep_every: `Keep.every`, by which the first step of each so many numbers is kept permanently. A range begins at each
        multiple of it, so that such a step is stored in full and keeps no files of an earlier step on the disk. The step one
        below a multiple is kept instead if the next save is not the multiple, so it is stored in full, too.
    """
    if previous_step is None or previous_step >= step:
        return None
    interval = step - previous_step
    longest = SAVES_PER_BASE * interval
    if keep_every is None:
        return longest
    if interval > 1 and (step + 1) % keep_every == 0:
        return None
    found = next(keep_every // n for n in range(1, keep_every + 1) if keep_every % n == 0 and keep_every // n <= longest)
    return found if found > interval else None
