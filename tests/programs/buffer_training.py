"""A run on several ranks whose BatchNorm nobody synchronises: torchrun … buffer_training.py URL LOG KIND [--kill-at N].

Each rank appends the losses of training and of validation of each step, with all their bits, to LOG.<rank>. The validation uses
the running statistics of the rank. At step N, rank 1 kills itself.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.adapters.torch import ModelState

STEPS, EVERY = 16, 3


class SharedStatistics(nn.Module):
    """A normalisation whose statistics are views of one buffer. One has a second name, and one is equal on all ranks."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("statistics", torch.stack([torch.zeros(features), torch.ones(features), torch.zeros(features)]))
        self.register_buffer("mean", self.statistics[0])
        self.register_buffer("variance", self.statistics[1])
        self.register_buffer("offset", self.statistics[2])
        self.register_buffer("second_name", self.variance)

    def forward(self, batch: Any) -> Any:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(batch.mean(0), 0.1)
                self.variance.lerp_(batch.var(0), 0.1)
        return (batch - self.mean) / (self.second_name + 1e-5).sqrt() + self.statistics[2]


def make_state(kind: str) -> tuple[Any, Any, dict[str, Any]]:
    """Return a model, its optimizer and the state to save."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.BatchNorm1d(32, momentum=None), nn.Linear(32, 1)
    )
    if kind in ("views", "wrapped"):
        model[1] = SharedStatistics(32)
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    elif kind == "ddp":
        model = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if kind == "ddp":
        return model, optimizer, {"model": model, "optimizer": optimizer}
    if kind == "wrapped":  # a part of a buffer comes before the module, another one after it
        mean, rest = ckpt.PerRank(model[1].mean), ckpt.PerRank(model[1].statistics[1:])
        return model, optimizer, {"mean": mean, "train": ModelState(model, optimizer), "rest": rest}
    return model, optimizer, {"train": ModelState(model, optimizer)}


def train_step(kind: str, model: Any, optimizer: Any, step: int) -> Any:
    """Train on this rank's batch of the step, and return the loss."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    batch = torch.randn(8, 6, generator=generator) * (1 + dist.get_rank())
    model.train()
    optimizer.zero_grad()
    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    loss.backward()
    if kind in ("plain", "views", "wrapped"):  # a loop that averages the gradients by hand
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    optimizer.step()
    return loss


def validate(model: Any) -> Any:
    """Return the loss on a fixed batch, with the running statistics of this rank."""
    batch = torch.randn(16, 6, generator=torch.Generator().manual_seed(7))
    model.eval()
    with torch.no_grad():
        return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("log")
    parser.add_argument("kind", choices=["fsdp2", "ddp", "plain", "views", "wrapped"])
    parser.add_argument("--kill-at", type=int)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    model, optimizer, state = make_state(options.kind)
    with (
        Path(f"{options.log}.{dist.get_rank()}").open("a") as log,
        ckpt.Checkpointer(options.url, every=EVERY, keep=2) as checkpointer,
    ):
        checkpointer.attach(optimizer)
        state, start = checkpointer.restore(state)
        statistics = model[1].statistics.tolist() if options.kind == "wrapped" else None
        print(f"started at {start}", json.dumps(statistics), flush=True)
        for step in range(start, STEPS):
            loss = train_step(options.kind, model, optimizer, step)
            log.write(f"{step} {loss.item().hex()} {validate(model).item().hex()}\n")
            log.flush()
            checkpointer.step(step, state)
            if step == options.kill_at and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
