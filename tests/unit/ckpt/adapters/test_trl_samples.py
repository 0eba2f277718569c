"""The generated samples of a trainer of TRL are restored as a whole or not at all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")


def trainer(step: int, device: str) -> SimpleNamespace:
    """Return the attributes of a trainer that has generated samples."""
    return SimpleNamespace(
        _step=step, _buffered_inputs=[{"ids": torch.full((2,), step)}], args=SimpleNamespace(world_size=1),
        accelerator=SimpleNamespace(device=device),
    )  # fmt: skip


def test_samples_that_fit_on_no_device_leave_the_trainer_as_it_was() -> None:
    from ckpt.adapters.trl_samples import GeneratedSamples

    saved = {"step": 7, "ranks": 1, "samples": [{"ids": torch.full((2,), 7)}]}
    missing_device = trainer(3, "cuda:99")
    with pytest.raises((RuntimeError, AssertionError)):
        GeneratedSamples(missing_device).load_state_dict(saved)
    assert (missing_device._step, missing_device._buffered_inputs[0]["ids"].tolist()) == (3, [3, 3])
    on_cpu = trainer(3, "cpu")
    GeneratedSamples(on_cpu).load_state_dict(saved)
    assert (on_cpu._step, on_cpu._buffered_inputs[0]["ids"].tolist()) == (7, [7, 7])


def test_samples_of_an_earlier_attempt_are_not_used_after_a_step_without_samples() -> None:
    """An attempt that ran out of memory leaves samples of a larger batch, and TRL generates others only where it has none."""
    from ckpt.adapters.trl_samples import GeneratedSamples

    for state in (None, {"step": 7, "ranks": 1}, {"step": 7, "ranks": 2, "samples": [{"ids": torch.full((2,), 7)}]}):
        again = trainer(3, "cpu")
        GeneratedSamples(again).load_state_dict(state)
        assert again._buffered_inputs is None
