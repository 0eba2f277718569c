"""A training with the distributed optimizer of Megatron-Core on the CPU, which saves each step and may kill itself.

torchrun megatron_distributed_optimizer.py FOLDER LOSSES FORMAT [--tp=N] [--bf16] [--steps=N] [--kill-at=N] [--torch-dist]
    [--compare=STEP]

FORMAT: the distrib_optim_sharding_type.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing as torch_dist
from megatron.core import parallel_state

from ckpt.adapters import megatron as ckpt_dist
from programs.megatron_on_cpu import distributed_optimizer, gpt_model, loss_of, transformer_config, without_cuda

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("losses", type=Path)
parser.add_argument("format")
parser.add_argument("--tp", type=int, default=1)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--kill-at", type=int, default=-1)
parser.add_argument("--torch-dist", action="store_true", help="save in Megatron's own format, too")
parser.add_argument("--compare", type=int, default=0, help="load this step in both formats and require equal tensors")
options = parser.parse_args()


def build() -> tuple[Any, Any]:
    config = transformer_config(options.tp, 1, options.bf16)
    model = gpt_model(config, options.seed)
    return distributed_optimizer(config, model.bfloat16() if options.bf16 else model)


def state_dict(model: Any, optimizer: Any, step: int, loading: bool = False) -> dict[str, Any]:
    """Return what Megatron's trainings save."""
    metadata = {"distrib_optim_sharding_type": options.format}
    sharded = model.module.sharded_state_dict(metadata=metadata)
    return {
        "model": sharded, "optimizer": optimizer.sharded_state_dict(sharded, is_loading=loading, metadata=metadata),
        "iteration": step,
    }  # fmt: skip


def set_state(model: Any, optimizer: Any, state: dict[str, Any]) -> int:
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for each in optimizer.chained_optimizers:  # Megatron-Core sets one tensor for all, in which Adam of torch counts each
        for values in each.optimizer.state.values():
            values["step"] = values["step"].clone()
    return int(state["iteration"])


def train(model: Any, optimizer: Any, start: int) -> None:
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    for step in range(start + 1, options.steps + 1):
        torch.manual_seed(1000 * step + rank)  # of the dropout
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = loss_of(model, step * ranks + rank)
        loss.backward()
        model.finish_grad_sync()
        optimizer.step()
        with options.losses.with_name(f"{options.losses.name}.{dist.get_rank()}").open("a") as file:
            file.write(f"{step} {loss.item().hex()}\n")
        if step == options.kill_at and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        ckpt_dist.save(state_dict(model, optimizer, step), str(folder_of(step)))
        if options.torch_dist:
            folder_of(step).mkdir(exist_ok=True, parents=True)
            torch_dist.save(state_dict(model, optimizer, step), str(folder_of(step)))


def folder_of(step: int) -> Path:
    return options.folder / f"iter_{step:07}"


def parts(optimizer: Any) -> list[torch.Tensor]:
    """Return the main parameters and moments that this rank has."""
    found = []
    for each in optimizer.chained_optimizers:
        for group in each.optimizer.param_groups:
            for parameter in group["params"]:
                state = each.optimizer.state[parameter]
                found += [parameter.detach().clone(), state["exp_avg"].clone(), state["exp_avg_sq"].clone()]
                found.append(torch.as_tensor(float(group.get("step", state.get("step", 0)))))
    return found


def compare(step: int) -> None:
    """Load a step of another parallelism from ckpt and from Megatron's own format, and require equal tensors."""
    loaded = []
    for load in (ckpt_dist.load, torch_dist.load):
        model, optimizer = build()
        set_state(model, optimizer, load(state_dict(model, optimizer, 0, True), str(folder_of(step))))
        loaded.append([*(value.detach().clone() for value in model.parameters()), *parts(optimizer)])
    assert sum(value.numel() for value in loaded[0]) > 10_000
    assert all(map(torch.equal, *loaded))


def main() -> None:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(options.tp, 1)
    without_cuda()
    if options.compare:
        compare(options.compare)
    else:
        model, optimizer = build()
        newest = max((int(path.name) for path in (options.folder / "ckpt" / "steps").glob("*/")), default=0)
        if newest:
            state = ckpt_dist.load(state_dict(model, optimizer, 0, True), str(folder_of(newest)))
            newest = set_state(model, optimizer, state)
        train(model, optimizer, newest)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
