"""Ranks of Paddle over gloo save distributed tensors by paddle.distributed.save_state_dict, and the same values by ckpt.

Usage:

    paddle_distributed_saves.py DIVISION FOLDER LOSSES

DIVISION is that of paddle_dist_tensors.py. FOLDER gets the folders training, extra, and slices (where Paddle has slices of
flattened tensors), and the repository `ckpt` with the model and the optimizer of training. In the grid, extra lacks the tensor
that two dimensions of the mesh divide along one axis, because Paddle 3.3 cannot save it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

import ckpt
from ckpt.adapters.paddle import ModelState
from programs.paddle_dist_tensors import MESHES, make


def tensors(state: Any) -> dict[str, Any]:
    """Return the entries that save_state_dict takes."""
    return {name: value for name, value in state.items() if isinstance(value, paddle.Tensor)}


def slices(rank: int) -> dict[str, Any] | None:
    """Return slices of the flattened halves of a tensor of shape (5, 6); None where Paddle has none."""
    try:
        from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight
    except ImportError:
        return None
    whole, found = np.arange(30, dtype=np.float32).reshape(5, 6), {}
    cuts = {"uneven": [(0, 11), (11, 30)], "rows": [(0, 12), (12, 30)], "one": [(0, 30), (30, 30)]}
    for name, ranges in cuts.items():
        start, stop = ranges[rank]
        local = paddle.to_tensor(whole.reshape(-1)[start:stop])
        found[name] = ShardedWeight(name, local, (5, 6), (5, 6), (0, 0), True, slice(start, stop))
    left, right = whole[:, :4], whole[:, 4:]
    local, offset = ((left, 0), (right, 4))[rank]
    found["columns"] = ShardedWeight("columns", paddle.to_tensor(local), local.shape, (5, 6), (0, offset))
    return found


def main() -> None:
    division, folder, losses = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if division != "whole":
        dist.init_parallel_env()
    state = make(division)
    model, optimizer = state["model"], state["optimizer"]
    x = paddle.to_tensor(np.random.default_rng(1).standard_normal((4, 6), np.float32))
    if division != "whole":
        mesh = dist.ProcessMesh(MESHES[division])
        x = dist.shard_tensor(x, mesh, [dist.Replicate()] * len(mesh.shape))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.clear_grad()
    dist.save_state_dict({"model": model.state_dict(), "optimizer": tensors(optimizer.state_dict())}, str(folder / "training"))
    extra = {name: tensor for name, tensor in state["extra"].items() if (division, name) != ("grid", "(5,)")}
    narrow = {"bfloat16": paddle.arange(6).astype("bfloat16"), "float8": paddle.arange(6).astype("float8_e4m3fn")}
    dist.save_state_dict(extra | {"plain": {**narrow, "scalar": paddle.to_tensor(2.5)}}, str(folder / "extra"))
    if len(MESHES.get(division, [])) == 2 and division != "grid" and (parts := slices(dist.get_rank())) is not None:
        dist.save_state_dict(parts, str(folder / "slices"))
    ckpt.save({"train": ModelState(model, optimizer)}, folder / "ckpt", 0)
    losses.write_text("0 0\n")


if __name__ == "__main__":
    main()
