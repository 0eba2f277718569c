"""Stores that `codec="auto"` takes for slow, so that it has something to choose in a save of a few bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.saving import codec_tuner as tuner_module
from ckpt.saving.codec_tuner import CodecTuner, codec_tuner
from ckpt.saving.store_speed import StoreSpeed

_LEAST_WINDOW_BYTES = 8 << 20


def take_for_slow(folder: Path, monkeypatch: pytest.MonkeyPatch, bytes_per_second: float) -> CodecTuner:
    """Let `auto` take the file system of a folder for so slow, whatever the saves of the test measure. Return its tuner."""
    monkeypatch.setattr(tuner_module, "_tuners", {})
    tuner = codec_tuner(f"file://{folder}")
    seconds = 0.0
    tuner.store = StoreSpeed(lambda: seconds)
    nbytes = max(_LEAST_WINDOW_BYTES, round(bytes_per_second))
    tuner.store.write_began()
    seconds += nbytes / bytes_per_second
    tuner.store.write_ended(nbytes, 1)
    assert tuner.store.bytes_per_second() == pytest.approx(bytes_per_second)
    return tuner
