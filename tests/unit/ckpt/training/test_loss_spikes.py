"""Loss spikes by their definition, and the mean time to failure."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt.storage.base.errors import InvalidArgument
from ckpt.training import loss_spikes
from ckpt.training.loss_spikes import SpikeDetector
from ckpt.training.save_interval import (
    DEFAULT_MTBF_SECONDS,
    MTBF_VARIABLE,
    daly_interval_seconds,
    mtbf_seconds_from_env,
    posterior_mtbf_seconds,
)


@given(st.lists(st.floats(-1e3, 1e3), max_size=200), st.floats(2, 30))
def test_spikes_agree_with_their_definition(losses: list[float], factor: float) -> None:
    """The reference computes the limit from the whole window at each step."""
    detector, window = SpikeDetector(factor), []
    for loss in losses:
        limit = math.inf
        if len(window) >= 16:
            found = sorted(window)
            middle, low, high = (found[len(found) * part // 4] for part in (2, 1, 3))
            spread = max((high - low) / 1.349, 0.01 * abs(middle))
            limit = middle + factor * spread if spread else math.inf
        assert detector.limit() == limit
        assert detector.observe(loss) == (loss > limit)
        if loss <= limit:
            window = [*window, loss][-64:]


def test_noise_is_no_spike_and_a_multiple_of_the_loss_is() -> None:
    """Noise of 5 % on a falling curve is not a spike; four times the loss is one, however long it lasts."""
    noise = np.random.default_rng(0)
    detector = SpikeDetector(10)
    for step in range(5000):
        assert not detector.observe(8 / (1 + step / 100) ** 0.5 * (1 + 0.05 * noise.standard_normal()))
    assert all(detector.observe(4.0 + 0.01 * step) for step in range(200))
    assert not detector.observe(1.1)


@pytest.mark.parametrize("value", [0.0, 5e-324])
def test_after_losses_without_a_spread_no_loss_is_a_spike(value: float) -> None:
    """One percent of the median is 0, too, so that there is no measure of a change."""
    detector = SpikeDetector(10)
    for _ in range(16):
        detector.observe(value)
    assert not detector.observe(1e-9)


@pytest.mark.parametrize(
    "environ",
    [
        {loss_spikes.FACTOR_VARIABLE: "x"},
        {loss_spikes.FACTOR_VARIABLE: "-1"},
        {loss_spikes.FACTOR_VARIABLE: "9", loss_spikes.LIMIT_VARIABLE: "y"},
    ],
)
def test_malformed_spike_variables_are_refused(environ: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument):
        loss_spikes.spike_detector_from_env(environ)


def test_spikes_are_detected_only_on_request() -> None:
    assert loss_spikes.spike_detector_from_env({}) is None


@given(st.floats(0, 1e7), st.integers(0, 1000))
def test_the_estimated_mtbf_follows_uptime_and_failures(uptime: float, failures: int) -> None:
    found = posterior_mtbf_seconds(uptime, failures)
    assert posterior_mtbf_seconds(uptime, failures + 1) < found
    assert posterior_mtbf_seconds(uptime + 1, failures) > found
    assert posterior_mtbf_seconds(0, 0, 77) == 77
    if failures > 100:
        assert found == pytest.approx(uptime / failures, rel=0.02, abs=DEFAULT_MTBF_SECONDS / failures)


def test_the_mtbf_variable_sets_the_automatic_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mtbf_seconds_from_env({}) == DEFAULT_MTBF_SECONDS
    assert mtbf_seconds_from_env({MTBF_VARIABLE: "60"}) == 60
    for text in ("x", "-1", "nan", "inf", "0"):
        with pytest.raises(InvalidArgument, match=text):
            mtbf_seconds_from_env({MTBF_VARIABLE: text})
    intervals = []
    for seconds in ("100000", "100", "1"):
        monkeypatch.setenv(MTBF_VARIABLE, seconds)
        with ckpt.Checkpointer(tmp_path / "repo", every="auto", group=None) as ck:
            intervals.append(ck._interval())
            assert intervals[-1] == daly_interval_seconds(ck._cost_seconds, float(seconds))
    assert intervals == sorted(intervals, reverse=True)
    assert len(set(intervals)) == 3
