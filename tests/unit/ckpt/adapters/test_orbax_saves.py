"""Which steps the CheckpointManager of ckpt.adapters.orbax saves after a restore. Orbax itself is not needed here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.failing_store import failing

import ckpt
from ckpt.adapters.orbax import CheckpointManager


def weights(value: float) -> Any:
    return SimpleNamespace(item={"w": np.full(3, value)})


def manager_of_three_steps(folder: Path) -> CheckpointManager:
    manager = CheckpointManager(folder, SimpleNamespace(save_interval_steps=100))
    for step in (100, 200, 300):
        assert manager.save(step, weights(step))
        manager.wait_until_finished()
    return manager


@pytest.mark.parametrize("waits", [True, False])
def test_steps_after_a_restored_one_are_saved_again(tmp_path: Path, waits: bool) -> None:
    with manager_of_three_steps(tmp_path) as manager, failing("save.commit=sleep:0.3@*"):
        manager.restore(100)
        for step in (150, 200, 250, 300, 350, 400):
            assert manager.save(step, weights(step + 0.5)) == (step % 100 == 0)
            assert step < 200 or manager.latest_step() == step // 100 * 100
            if waits:
                manager.wait_until_finished()
        manager.wait_until_finished()
        assert manager.all_steps() == [100, 200, 300, 400]
        for step in (200, 300, 400):
            assert manager.restore(step)["w"].tolist() == [step + 0.5] * 3


def test_a_step_that_is_in_the_history_is_not_saved_again(tmp_path: Path) -> None:
    with manager_of_three_steps(tmp_path) as manager:
        manager.restore(200)
        for step in (100, 200):
            with pytest.raises(ckpt.InvalidArgument, match=f"step {step} exists"):
                manager.save(step, weights(0), force=True)
        assert manager.save(300, weights(300.5))
        for step in (100, 200, 300):
            with pytest.raises(ckpt.InvalidArgument, match=f"step {step} exists"):
                manager.save(step, weights(0), force=True)
        assert manager.restore(300)["w"].tolist() == [300.5] * 3
