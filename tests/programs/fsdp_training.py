"""One rank under torchrun, for test_fsdp_resume.py: a model sharded by fully_shard resumes as if never stopped."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckpt

URL = Path()  # set by `main`


def make(kind: str, seed: int) -> tuple[Any, Any]:
    """Return a model sharded over all ranks, and an optimizer that has made no step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.LayerNorm(9), nn.Linear(9, 3))
    for part in (model[0], model[3], model):
        fully_shard(part)
    made = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "groups": lambda p: torch.optim.Adam([{"params": p[:3]}, {"params": p[3:], "lr": 0.3}]),
    }
    return model, made[kind](list(model.parameters()))


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        torch.manual_seed(100 * step + dist.get_rank())
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def local(value: Any) -> Any:
    """Return a state with the shards of this rank in place of DTensors."""
    if isinstance(value, dict):
        return {key: local(item) for key, item in value.items()}
    if isinstance(value, DTensor):
        return [str(value.placements), value.to_local().clone()]
    return value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def require_same(got: Any, want: Any, path: str = "") -> None:
    assert type(got) is type(want), path
    if isinstance(want, dict):
        assert got.keys() == want.keys(), path
    if isinstance(want, (dict, list)):
        for key in want if isinstance(want, dict) else range(len(want)):
            require_same(got[key], want[key], f"{path}.{key}")
    elif isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype, path
        assert torch.equal(got, want), path
    else:
        assert got == want, path


def check_continuation(kind: str, how: str) -> None:
    """Make two steps, a save and two more steps; then load into a fresh model and optimizer, and repeat the last two steps."""
    url = URL / f"{kind}-{how}"
    model, optimizer = make(kind, 0)
    train(model, optimizer, range(2))
    state = {"model": model, "optimizer": optimizer}
    ckpt.save(state, url, 2)
    saved = local({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, range(2, 4))
    want = local({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    model, optimizer = make(kind, 1)
    if how == "used":  # already has moments of some parameters
        train(model, optimizer, range(7, 8))
        optimizer.state.pop(next(iter(optimizer.state)))
    state = {"model": model, "optimizer": optimizer}
    if how == "restore":
        with ckpt.Checkpointer(url, every=None) as checkpointer:
            state, step = checkpointer.restore(state)
        assert step == 3  # the step to continue with
    else:
        ckpt.load(url, like=state)
    require_same(local({"model": model.state_dict(), "optimizer": optimizer.state_dict()}), saved)
    train(model, optimizer, range(2, 4))
    require_same(local({"model": model.state_dict(), "optimizer": optimizer.state_dict()}), want)


def main() -> None:
    global URL
    URL = Path(sys.argv[1])
    dist.init_process_group("gloo")
    for kind, how in (item.split("-") for item in sys.argv[2:]):
        check_continuation(kind, how)
        print(json.dumps({"rank": dist.get_rank(), "check": f"{kind}-{how}"}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
