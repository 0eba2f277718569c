"""A training run with the distributed optimizer of Megatron-Core on the CPU, which saves each step and may kill itself.

torchrun megatron_distributed_optimizer.py FOLDER LOSSES FORMAT [--tp=N] [--bf16] [--steps=N] [--kill-at=N] [--torch-dist]
    [--compare=STEP]

FORMAT: the distrib_optim_sharding_type.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from programs.megatron_loop import loaded_in_both_formats, parser_of, resume, start, train
from programs.megatron_on_cpu import distributed_optimizer, gpt_model, loss_of, transformer_config

parser = parser_of(steps=6)
parser.add_argument("format")
parser.add_argument("--bf16", action="store_true")
options = parser.parse_args()


def build() -> tuple[Any, Any]:
    config = transformer_config(options.tp, 1, options.bf16)
    model = gpt_model(config, options.seed)
    return distributed_optimizer(config, model.bfloat16() if options.bf16 else model)


def state_dict(model: Any, optimizer: Any, step: int, loading: bool = False) -> dict[str, Any]:
    """Return what Megatron's training runs save."""
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


def loss_after(model: Any, optimizer: Any, step: int) -> Any:
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    torch.manual_seed(1000 * step + rank)  # of the dropout
    model.zero_grad_buffer()
    optimizer.zero_grad()
    loss = loss_of(model, step * ranks + rank)
    loss.backward()
    model.finish_grad_sync()
    optimizer.step()
    return loss


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


def compare() -> None:
    """Load a step of another parallelism from ckpt and from Megatron's own format, and require equal tensors."""

    def load_into(load: Any) -> list[torch.Tensor]:
        model, optimizer = build()
        set_state(model, optimizer, load(state_dict(model, optimizer, 0, True)))
        return [*(value.detach().clone() for value in model.parameters()), *parts(optimizer)]

    ours, theirs = loaded_in_both_formats(options, load_into)
    assert sum(value.numel() for value in ours) > 10_000
    assert all(map(torch.equal, ours, theirs))


def main() -> None:
    start(options.tp)
    if options.compare:
        compare()
    else:
        both = build()
        newest = resume(options, lambda: state_dict(*both, 0, True), lambda state: set_state(*both, state))
        train(options, newest, lambda step: loss_after(*both, step), lambda step: state_dict(*both, step))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
