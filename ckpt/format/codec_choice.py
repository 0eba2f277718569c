"""Choose a codec by time: predict the seconds until a save is durable, and the processor time that it takes from the training.

Pure functions of measurements. `ckpt/saving/codec_tuner.py` measures; the commit record keeps the choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_STOLEN_SHARE = 0.02
"""The largest share of its processor time that a training run may lose to compression."""

MIN_GAIN = 0.05
"""The least share of the seconds to durable that a codec must save. Less does not justify decoding on every load."""

_MIN_SECONDS = 1.0
"""A save that takes less without a codec uses none. The first import of codecs takes 0.1 s in each rank."""

_SAME_SPEED = 0.03
"""Codecs whose seconds differ by less than this share count as equally fast: the one that shrinks most is chosen."""

_MAX_CODEC_BYTES_PER_SECOND = 3e9
"""No codec encodes faster on one core."""

# The reasons of a choice, as the commit record has them.
FASTER = "faster"
NOT_FASTER = "not faster"
OVER_BUDGET = "takes too much processor time"
FAST_STORE = "the store is faster than any codec"
SHORT_SAVE = "the save takes less than a second"


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """One codec on one kind of data."""

    config: str
    ratio: float
    """Stored bytes divided by raw bytes."""
    bytes_per_second: float
    """Raw bytes that one core encodes."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a save can use."""

    store_bytes_per_second: float
    encoders: float
    """The number of processors on which blocks are encoded at the same time."""
    idle_processors: float
    """The number of processors that this process may use and that are idle while the training runs."""
    budget_seconds: float | None
    """Processor time that the save may take from the training. None if the training waits for the save anyway."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a save costs."""

    durable_seconds: float
    stolen_seconds: float
    """Processor time that the training loses to encoding."""


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """What `codec="auto"` chose for the elements of one type, and the prediction for all bytes of the rank. In commit.json."""

    dtype: str
    codec: str | None
    """The configuration of the chosen codec, None for no codec."""
    reason: str
    candidate: str | None
    """The configuration of the codec that was compared with no codec: the chosen one, or the best of the refused ones."""
    ratio: float
    """Of the candidate, as measured; 1 if there is none."""
    core_bytes_per_second: float
    """Raw bytes that one core encodes with the candidate."""
    store_bytes_per_second: float
    encoders: float
    seconds: float
    """Seconds to durable with the candidate."""
    seconds_without: float
    """Seconds to durable without a codec."""
    stolen_seconds: float


def reason_against_any(nbytes: int, resources: Resources) -> str | None:
    """Return why no codec can make a save of `nbytes` raw bytes faster, so that none needs to be measured; else None."""
    if resources.store_bytes_per_second >= _MAX_CODEC_BYTES_PER_SECOND * resources.encoders:
        return FAST_STORE
    return SHORT_SAVE if nbytes < _MIN_SECONDS * resources.store_bytes_per_second else None


def predict(codec: CodecSpeed | None, nbytes: int, resources: Resources) -> Prediction:
    """Return what it costs to save `nbytes` raw bytes. Encoding and writing overlap, so the slower of both counts."""
    if codec is None:
        return Prediction(nbytes / resources.store_bytes_per_second, 0.0)
    processor_seconds = nbytes / codec.bytes_per_second
    write_seconds = codec.ratio * nbytes / resources.store_bytes_per_second
    seconds = max(write_seconds, processor_seconds / resources.encoders)
    if resources.budget_seconds is None:
        return Prediction(seconds, 0.0)
    return Prediction(seconds, max(0.0, processor_seconds - resources.idle_processors * seconds))


def choose_codec(dtype: str, nbytes: int, candidates: Sequence[CodecSpeed], resources: Resources) -> CodecChoice:
    """Return the codec with the fewest seconds to durable within the budget; no codec if none is clearly faster.

    nbytes: the raw bytes of the save.
    candidates: at least one, unless `reason_against_any` returns a reason.
    """
    without = predict(None, nbytes, resources)
    against = reason_against_any(nbytes, resources)
    if against is not None:
        return _choice(dtype, None, None, against, without, without, resources)
    predictions = {codec: predict(codec, nbytes, resources) for codec in candidates}
    faster = [c for c in candidates if predictions[c].durable_seconds <= (1 - MIN_GAIN) * without.durable_seconds]
    fit = [c for c in faster if is_within_budget(predictions[c], resources)]
    best = _fastest(fit or faster or candidates, predictions)
    reason = FASTER if fit else OVER_BUDGET if faster else NOT_FASTER
    return _choice(dtype, best.config if fit else None, best, reason, predictions[best], without, resources)


def is_within_budget(prediction: Prediction, resources: Resources) -> bool:
    """Return whether the training can spare the processor time."""
    return resources.budget_seconds is None or prediction.stolen_seconds <= resources.budget_seconds


def _fastest(codecs: Sequence[CodecSpeed], predictions: dict[CodecSpeed, Prediction]) -> CodecSpeed:
    least = min(predictions[c].durable_seconds for c in codecs)
    return min((c for c in codecs if predictions[c].durable_seconds <= (1 + _SAME_SPEED) * least), key=lambda c: c.ratio)


def _choice(
    dtype: str, codec: str | None, candidate: CodecSpeed | None, reason: str, prediction: Prediction, without: Prediction,
    resources: Resources,
) -> CodecChoice:  # fmt: skip
    return CodecChoice(
        dtype, codec, reason,
        candidate=None if candidate is None else candidate.config,
        ratio=1.0 if candidate is None else round(candidate.ratio, 4),
        core_bytes_per_second=0.0 if candidate is None else round(candidate.bytes_per_second),
        store_bytes_per_second=round(resources.store_bytes_per_second),
        encoders=round(resources.encoders, 2),
        seconds=round(prediction.durable_seconds, 3),
        seconds_without=round(without.durable_seconds, 3),
        stolen_seconds=round(prediction.stolen_seconds, 3),
    )  # fmt: skip
