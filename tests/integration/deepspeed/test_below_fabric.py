"""DeepSpeed below Fabric of Lightning, which saves by the engine and ignores plugins for checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.deepspeed_cpu import use_gloo, zero_config
from helpers.refusal import refused
from lightning.fabric import Fabric
from lightning.fabric.strategies import DeepSpeedStrategy

import ckpt
from ckpt.adapters.deepspeed import attach
from ckpt.adapters.lightning import CkptIO


class OnCpu(DeepSpeedStrategy):
    """DeepSpeedStrategy without its checks that the devices are those of CUDA."""

    def setup_environment(self) -> None:
        self._set_world_ranks()
        self._init_deepspeed_distributed()

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)  # DeepSpeed needs a number


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """One for all tests: DeepSpeed does not forget a group that is destroyed."""
    use_gloo()
    with pytest.MonkeyPatch.context() as environment:
        for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK"):
            environment.setenv(name, "")  # so that what the launch sets is removed at the end
            environment.delenv(name)
        yield
        dist.destroy_process_group()


@pytest.fixture
def strategy(process_group: None) -> DeepSpeedStrategy:
    return OnCpu(config=zero_config(1, train_micro_batch_size_per_gpu=2))


def set_up(strategy: Any, **options: Any) -> tuple[Fabric, Any]:
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy, **options)
    fabric.launch()
    model = torch.nn.Linear(4, 2)
    model, _ = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    return fabric, model


def test_a_plugin_that_the_strategy_would_ignore_is_refused(strategy: Any, tmp_path: Path) -> None:
    with refused(ckpt.InvalidArgument, "ignores plugins=[CkptIO(url)]", "ckpt.adapters.deepspeed.attach("):
        fabric, model = set_up(strategy, plugins=[CkptIO(tmp_path / "io")])
        fabric.save(tmp_path / "saved", {"model": model})
    assert os.listdir(tmp_path) == []


def test_an_attached_engine_is_saved_and_loaded(strategy: Any, tmp_path: Path) -> None:
    """So does the error advise. `fabric.load` itself looks for files of DeepSpeed."""
    fabric, model = set_up(strategy)
    engine = model._forward_module
    attached = attach(engine, tmp_path / "run")
    weight = model.weight.detach().clone()
    fabric.save(tmp_path / "saved", {"model": model, "epoch": 3})
    with torch.no_grad():
        model.weight.zero_()
    _, state = engine.load_checkpoint(tmp_path / "saved")
    assert torch.equal(model.weight, weight)
    assert state["epoch"] == 3
    with pytest.raises(FileNotFoundError):
        fabric.load(tmp_path / "saved", {"model": model, "epoch": 0})
    attached.close()
    assert ckpt.open(tmp_path / "run").steps() == [0]
