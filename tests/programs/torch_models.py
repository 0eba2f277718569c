"""A model, its optimizer and its training, sharded by torch in each layout, for programs/torch_rank.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.adapters.torch import ModelState

WIDTH = 12


class Block(nn.Module):
    """Two layers, uneven on four ranks, with a buffer and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH + 2), nn.Linear(2 * WIDTH + 2, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.down(torch.relu(self.up(x)))) * self.scale


def make_model(layers: range = range(4), seed: int = 0) -> nn.Module:
    """Return some blocks of one model, by their names in it."""
    torch.manual_seed(seed)
    blocks = [Block() for _ in range(4)]
    return nn.ModuleDict({f"layer{i}": blocks[i] for i in layers})


def forward(model: Any, x: Tensor) -> Tensor:
    for block in getattr(model, "module", model).values():
        x = block(x)
    return x


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with two groups, so that parameters are not numbered in the order of the model."""
    parameters = list(model.parameters())
    matrices, vectors = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() < 2]
    return torch.optim.AdamW([{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "lr": 0.01}])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        torch.manual_seed(100 + step)
        forward(model, torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for block in getattr(model, "module", model).values():
            block.scale += 0.5


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return all tensors of a model and its optimizer, whole, by name. Collective."""
    bare = getattr(model, "module", model)
    found = {f"model.{name}": full(value.detach()) for name, value in bare.state_dict().items()}
    for name, parameter in bare.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"optimizer.{name}.{key}"] = full(value)
    return {name: value.clone() for name, value in found.items()}


def sharded(layout: str, seed: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model in a layout over all ranks, with other values than the reference, and a fresh optimizer."""
    model = make_model(seed=seed)
    size = dist.get_world_size() if dist.is_initialized() else 1
    if layout == "ddp":
        model = DistributedDataParallel(model)
    elif layout == "fsdp":
        shard(model, init_device_mesh("cpu", (size,)))
    elif layout == "hsdp":
        shard(model, init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")))
    elif layout == "tp":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        for block in model.values():
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        shard(model, mesh["dp"])
    else:
        assert layout == "plain"
    return model, make_optimizer(model)


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    for block in model.values():
        fully_shard(block, mesh=mesh)


def same(got: dict[str, Tensor], want: dict[str, Tensor], what: str) -> None:
    assert got.keys() == want.keys(), f"{what}: {sorted(got.keys() ^ want.keys())}"
    wrong = [name for name, value in want.items() if not torch.equal(got[name], value)]
    assert not wrong, f"{what}: {wrong}"


def whole(url: Path, group: Any = None) -> dict[str, Tensor]:
    """Return all tensors of the newest step, loaded into a plain model by this process alone."""
    model, optimizer = sharded("plain")
    ckpt.load(url, {"train": ModelState(model, optimizer), "step": 0}, group=group)
    return everything(model, optimizer)
