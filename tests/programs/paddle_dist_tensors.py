"""A training run with Paddle's distributed tensors over gloo.

Usage:

    paddle_dist_tensors.py DIVISION REPOSITORY LOSSES [STEP]       killed after STEP, if it is given

DIVISION is rows or sharded (2 ranks), grid (4 ranks), or whole (one process, with plain tensors). The state with which it
begins is also saved to REPOSITORY-DIVISION. Each loss is one line of LOSSES: the step and the bits of this rank's part.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

import ckpt
from programs.paddle_loop import train

MESHES = {"rows": [0, 1], "sharded": [0, 1], "grid": [[0, 1], [2, 3]]}


def make(division: str) -> dict[str, Any]:
    """Return a state, also with tensors of lengths that the ranks do not divide; its values do not depend on the division."""
    draw = np.random.default_rng(1)
    model = paddle.nn.Sequential(paddle.nn.Linear(6, 4), paddle.nn.Tanh(), paddle.nn.Linear(4, 3))
    for parameter in model.parameters():
        parameter.set_value(draw.standard_normal(parameter.shape).astype("float32"))
    extra = {f"{shape}": paddle.to_tensor(draw.integers(0, 99, shape)) for shape in ((7, 4), (5,), (2, 3, 6), (1, 4))}
    model[0].bias.stop_gradient = True
    if division == "whole":
        return {"model": model, "optimizer": paddle.optimizer.AdamW(0.1, parameters=model.parameters()), "extra": extra}
    mesh = dist.ProcessMesh(MESHES[division])
    shard, copy = dist.Shard, dist.Replicate()
    of_model, of_extra = {  # by tensor: the placement on each dimension of the mesh
        "rows": ([[shard(1)], [shard(0)], [shard(0)], [copy]], [[shard(0)], [shard(0)], [shard(2)], [shard(0)]]),
        "sharded": ([[copy]] * 4, [[shard(1)], [copy], [shard(1)], [copy]]),
        "grid": (
            [[shard(1), copy], [shard(0), copy], [shard(0), copy], [copy, copy]],
            [[shard(0), shard(1)], [shard(0), shard(0)], [copy, shard(2)], [shard(0), copy]],
        ),
    }[division]
    layers = [(layer, name) for layer in (model[0], model[2]) for name in ("weight", "bias")]
    for (layer, name), where in zip(layers, of_model, strict=True):
        tensor = getattr(layer, name)
        setattr(layer, name, dist.shard_tensor(tensor, mesh, where, stop_gradient=tensor.stop_gradient))
    optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
    stage1 = dist.ShardingStage1(0, mesh) if division == "sharded" else None
    placed = {
        name: dist.shard_tensor(tensor, mesh, where) for (name, tensor), where in zip(extra.items(), of_extra, strict=True)
    }
    return {"model": model, "optimizer": dist.shard_optimizer(optimizer, stage1), "extra": placed}


def require_refusal(division: str, url: str) -> None:
    """Fail unless a sum that is still to be reduced is refused."""
    mesh = dist.ProcessMesh(MESHES[division])
    tensor = dist.shard_tensor(paddle.ones([4]), mesh, [dist.Partial()] * len(mesh.shape))
    try:
        ckpt.save({"sum": tensor}, url, 0)
    except ckpt.UnsupportedLeaf as error:
        assert "leaf sum" in str(error), error
        assert "paddle.distributed.reshard" in str(error), error
    else:
        raise AssertionError("a Partial tensor was saved")


def addresses_of(model: Any) -> list[int]:
    return [parameter._local_value().data_ptr() for parameter in model.parameters() if parameter.is_dist()]


def main() -> None:
    division, url, losses = sys.argv[1:4]
    kill = int(sys.argv[4]) if len(sys.argv) > 4 else -1
    if division != "whole":
        dist.init_parallel_env()
    state = make(division)
    model, optimizer = state["model"], state["optimizer"]
    addresses = addresses_of(model)

    def restored(state: Any, start: int) -> None:
        ckpt.save(state, f"{url}-{division}", start)
        assert addresses == addresses_of(model)

    def update(step: int) -> Any:
        x = paddle.to_tensor(np.random.default_rng(step).standard_normal((4, 6), np.float32))
        if division != "whole":
            mesh = dist.ProcessMesh(MESHES[division])
            x = dist.shard_tensor(x, mesh, [dist.Replicate()] * len(mesh.shape))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return loss._local_value() if loss.is_dist() else loss

    train(state, url, losses, kill, update, restored)
    if division != "whole":
        require_refusal(division, f"{url}-refused")


if __name__ == "__main__":
    main()
