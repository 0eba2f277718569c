"""A training run of DeepSpeed on the CPU that saves and resumes: torchrun … deepspeed_training.py URL LOG [options].

Each rank appends the loss of each step, with all its bits, to LOG.<rank>.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import deepspeed
import torch
from helpers.deepspeed_cpu import use_gloo, zero_options

from ckpt.adapters.deepspeed import attach

STEPS = 24
use_gloo()
SAMPLES = 8
"""In the batch of each step, over all ranks."""


class Model(torch.nn.Module):
    """Layers with dropout, a tied weight, a frozen parameter, a buffer, and sizes that no number of ranks divides."""

    def __init__(self, hidden: int = 13, more: bool = False, fewer: bool = False, batch_norm: bool = False) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(17, hidden)
        self.first = torch.nn.Linear(hidden, 31)
        self.drop = torch.nn.Dropout(0.1)
        self.second = None if fewer else torch.nn.Linear(31, hidden)
        self.scale = torch.nn.Parameter(torch.tensor([1.5]), requires_grad=False)
        self.norm = torch.nn.LayerNorm(hidden)
        self.head = torch.nn.Linear(hidden, 17, bias=False)
        self.head.weight = self.embed.weight
        if more:
            self.more = torch.nn.Linear(3, 3)
        self.batch_norm = torch.nn.BatchNorm1d(hidden) if batch_norm else None
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))

    def forward(self, tokens: Any) -> Any:
        self.seen += 1
        x = self.embed(tokens[:, :-1])
        if self.batch_norm is not None:
            x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        inner = self.drop(torch.relu(self.first(x)))
        x = self.norm(x + (inner[..., : x.shape[-1]] if self.second is None else self.second(inner)) * self.scale)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens[:, 1:].flatten())


def config(stage: int, precision: str, accumulate: int, world: int, **zero: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "train_batch_size": SAMPLES * accumulate, "gradient_accumulation_steps": accumulate,
        "train_micro_batch_size_per_gpu": SAMPLES // world, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True, "weight_decay": 0.05}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-2, "warmup_num_steps": 40}},
        "zero_optimization": {**zero_options(stage), **zero}, "steps_per_print": 10**9, "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    if precision == "fp16":
        found["fp16"] = {"enabled": True, "initial_scale_power": 22, "loss_scale_window": 5, "hysteresis": 1}
    elif precision != "fp32":
        found["bf16"] = {"enabled": True}
    if precision == "bf16-fp32-grads":
        found["data_types"] = {"grad_accum_dtype": "fp32"}
    return found


def parameter_groups(model: Any) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    others = [p for p in trained if p.dim() <= 1]
    return [{"params": [p for p in trained if p.dim() > 1]}, {"params": others, "weight_decay": 0.0}]


def make_engine(
    stage: int, precision: str = "fp32", *, accumulate: int = 1, seed: int = 0, zero: dict[str, Any] | None = None, **model: Any
) -> Any:
    torch.manual_seed(seed)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    made = Model(**model)
    engine, _, _, _ = deepspeed.initialize(
        model=made, model_parameters=parameter_groups(made), config=config(stage, precision, accumulate, world, **(zero or {}))
    )
    return engine


def tokens_of(step: int, rank: int, world: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 17, (SAMPLES, 6), generator=generator)[rank * (SAMPLES // world) : (rank + 1) * (SAMPLES // world)]


def train_step(engine: Any, micro_step: int) -> float:
    loss = engine(tokens_of(micro_step, engine.global_rank, engine.world_size))
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def validation_loss(engine: Any) -> float:
    """Return the loss on a fixed batch, for which a BatchNorm uses the statistics of this rank."""
    engine.eval()
    with torch.no_grad():
        loss = float(engine(tokens_of(10**6, 0, engine.world_size)))
    engine.train()
    return loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("log")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--batch-norm", action="store_true")
    options = parser.parse_args()

    engine = make_engine(options.stage, options.precision, accumulate=options.accumulate, batch_norm=options.batch_norm)
    attach(engine, options.url)
    torch.manual_seed(100 + engine.global_rank)
    path, client_state = engine.load_checkpoint("unused")
    start = 0 if path is None else client_state["step"] + 1
    print(f"resumed from {path} {client_state}", flush=True)
    with Path(f"{options.log}.{engine.global_rank}").open("a") as log:
        for step in range(start, STEPS):
            losses = [train_step(engine, step * options.accumulate + i) for i in range(options.accumulate)]
            losses.append(validation_loss(engine))
            log.write(f"{step} {' '.join(map(float.hex, losses))} {engine.get_lr()[0].hex()} {engine.skipped_steps}\n")
            log.flush()
            if step == options.kill_at and engine.global_rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if step % options.every == options.every - 1:
                engine.save_checkpoint("unused", client_state={"step": step, "note": "of rank 0"})


if __name__ == "__main__":
    main()
