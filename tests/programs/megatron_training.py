"""A training run of a small GPT of Megatron-Core on the CPU, which saves each step and may kill itself.

torchrun megatron_training.py FOLDER LOSSES [--tp=N] [--pp=N] [--steps=N] [--kill-at=N] [--torch-dist] [--compare=STEP]
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, optim_state_to_sharding_state

from programs.megatron_loop import equal, loaded_in_both_formats, parser_of, resume, start, train
from programs.megatron_on_cpu import gpt_model, loss_of, transformer_config

parser = parser_of(steps=8)
parser.add_argument("--pp", type=int, default=1)
options = parser.parse_args()


def model_and_optimizer() -> tuple[Any, Any]:
    model = gpt_model(transformer_config(options.tp, options.pp), options.seed)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def sharded_state_dict(model: Any, optimizer: Any, step: int) -> dict[str, Any]:
    """Return what Megatron's training runs save: the model, the optimizer, a random state for each rank, and plain values."""
    for parameter in model.parameters():  # so that a new optimizer has a state to fill
        if parameter not in optimizer.state:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0), "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)
            }  # fmt: skip
    state = model.sharded_state_dict()
    names = get_param_id_to_sharded_param_map(state, model.parameters())
    packed = optimizer.state_dict()
    count = float(packed["state"][0]["step"])
    optim_state_to_sharding_state(packed, names, exclude_keys=("step",))
    rank = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    random = ShardedObject("rng_state", [{"torch": torch.get_rng_state()}], (options.tp, options.pp), rank)
    return {
        "model": state, "optimizer": packed, "rng_state": random, "iteration": step, "count": count,
        "args": argparse.Namespace(params_dtype=torch.float32, layers=4, loss=print),
    }  # fmt: skip


def set_state(model: Any, optimizer: Any, state: dict[str, Any]) -> int:
    model.load_state_dict(state["model"])
    packed = state["optimizer"]
    for values in packed["state"].values():
        values["step"] = torch.tensor(state["count"])
    optimizer.load_state_dict(packed)
    torch.set_rng_state(state["rng_state"][0]["torch"])
    assert state["args"].params_dtype is torch.float32
    return int(state["iteration"])


def loss_after(model: Any, optimizer: Any, step: int) -> Any:
    loss = loss_of(model, step)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def compare() -> None:
    """Load a step of another parallelism from ckpt and from Megatron's own format, and require equal tensors."""
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # for the arguments in common.pt

    def load_into(load: Any) -> Any:
        state = sharded_state_dict(*model_and_optimizer(), step=0)
        del state["rng_state"]  # Megatron does not load it on another parallelism
        return flat(load(state))

    ours, theirs = loaded_in_both_formats(options, load_into)
    assert ours.keys() == theirs.keys()
    assert sum(value.numel() for value in ours.values() if isinstance(value, torch.Tensor)) > 10_000
    for name, value in ours.items():
        assert equal(value, theirs[name]) or isinstance(value, argparse.Namespace), name


def flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {name: leaf for key, each in items for name, leaf in flat(each, f"{path}.{key}").items()}
    return {path: value}


def main() -> None:
    start(options.tp, options.pp)
    if options.compare:
        compare()
    else:
        both = model_and_optimizer()
        newest = resume(options, lambda: sharded_state_dict(*both, 0), lambda state: set_state(*both, state))
        train(options, newest, lambda step: loss_after(*both, step), lambda step: sharded_state_dict(*both, step))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
