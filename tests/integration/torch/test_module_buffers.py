"""Buffers of torch modules differ between ranks under DDP: a saved step has those of one rank."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt.groups.threads import ThreadGroup

torch = pytest.importorskip("torch")
from ckpt.adapters.torch import ModelState  # noqa: E402


def model(rank: int, features: int) -> Any:
    """Return a model with equal parameters on each rank, and with statistics of the batches of this rank."""
    made = torch.nn.Sequential(torch.nn.Linear(4, features), torch.nn.BatchNorm1d(features))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(0.5)
    made[1].running_mean.fill_(rank + 1)
    made[1].running_var.fill_(rank + 1)
    made[1].num_batches_tracked.fill_(rank + 1)
    return made


@pytest.mark.parametrize("wrap", [lambda m: m, ModelState, lambda m: [m, {"b": 1}]], ids=["plain", "ModelState", "nested"])
@pytest.mark.parametrize("features", [3, 20_000])
def test_all_buffers_of_a_step_come_from_rank_0(tmp_path: Path, features: int, wrap: Any) -> None:
    groups = ThreadGroup.make(4)
    save = lambda g: ckpt.save({"model": wrap(model(g.rank, features))}, tmp_path, 1, group=g)  # noqa: E731
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save, groups))
    loaded = model(9, features)
    ckpt.load(tmp_path, like={"model": wrap(loaded)})
    for buffer in loaded.buffers():
        assert np.unique(buffer.numpy()).tolist() == [1]
    assert all(bool((parameter == 0.5).all()) for parameter in loaded.parameters())
