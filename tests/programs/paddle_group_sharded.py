"""A training run of processes with Paddle's group_sharded_parallel over gloo.

Usage:

    paddle_group_sharded.py LEVEL REPOSITORY LOSSES [STEP]       killed after STEP, if it is given

LEVEL is os_g (stage 2), p_g_os (stage 3), or none for one process with the same model. All ranks have the same data, so that
the losses of each number of ranks are equal. Each loss is one line of LOSSES: the step and the bits of the loss.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import paddle
from paddle.distributed.fleet.meta_parallel.sharding import group_sharded_optimizer_stage2 as stage2
from paddle.distributed.fleet.meta_parallel.sharding import group_sharded_stage3 as stage3
from paddle.distributed.fleet.meta_parallel.sharding import group_sharded_storage as storage
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage2 import GroupShardedStage2

import ckpt
from ckpt.adapters.paddle import ModelState
from programs.paddle_loop import minimize, train


def make() -> tuple[Any, Any]:
    """Return a model with frozen, large and small parameters, of which some are of bfloat16, and its optimizer."""
    paddle.seed(3)

    class Short(paddle.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.weight = self.create_parameter([15, 15], dtype="bfloat16")

        def forward(self, x: Any) -> Any:
            return x + paddle.matmul(x, self.weight.astype("float32"))

    class Model(paddle.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.up = paddle.nn.Linear(8, 15)
            self.frozen = paddle.nn.Linear(15, 15)
            self.short = Short()
            self.down = paddle.nn.Linear(15, 3)

        def forward(self, x: Any) -> Any:
            x = paddle.nn.functional.dropout(paddle.tanh(self.frozen(self.up(x))), 0.2)
            return self.down(self.short(x))

    model = Model()
    for parameter in (model.frozen.weight, model.short.weight):  # the optimizers of a CPU have no bfloat16
        parameter.stop_gradient = True
    schedule = paddle.optimizer.lr.StepDecay(0.01, 3)
    return model, paddle.optimizer.AdamW(schedule, parameters=model.parameters())


def shard(level: str, model: Any, optimizer: Any) -> tuple[Any, Any]:
    """Return what group_sharded_parallel returns for a level.

    Its classes compute on a CPU, too, but their constructors assert an accelerator, name its number, and copy to it.
    """
    add = storage.ParamStorage.add_rank_params
    storage.ParamStorage.add_rank_params = lambda self, params, align, _=True: add(self, params, align, False)
    for module in (stage2, stage3):
        module.alignment["cpu"] = module.alignment["gpu"]
    known = {"device": "cpu", "group": paddle.distributed.get_group()}
    with mock.patch.object(paddle.framework.core, "is_compiled_with_cuda", return_value=True):
        if level == "p_g_os":
            return stage3.GroupShardedStage3(model, optimizer, segment_size=32, **known), optimizer
        with mock.patch.object(paddle, "get_device", return_value="cpu:0"):
            optimizer = stage2.GroupShardedOptimizerStage2(optimizer._parameter_list, optimizer, **known)
        return GroupShardedStage2(model, optimizer, **known), optimizer


def require_refusals(model: Any, optimizer: Any, url: str) -> None:
    """Fail unless a wrong use of stage 3 is refused with the advice to use ModelState."""
    for state in ({"model": model}, {"optimizer": optimizer}):
        try:
            ckpt.save(state, url, 0, group=None)
        except ckpt.UnsupportedLeaf as error:
            assert "ckpt.adapters.paddle.ModelState" in str(error), error
        else:
            raise AssertionError("a part of a model was saved as if it were the whole one")
    try:
        ModelState(model._layer, optimizer)
    except ckpt.InvalidArgument as error:
        assert "give the layer of group_sharded_parallel" in str(error), error
    else:
        raise AssertionError("the layer inside of the wrapper was accepted")


def main() -> None:
    level, url, losses = sys.argv[1:4]
    kill = int(sys.argv[4]) if len(sys.argv) > 4 else -1
    model, optimizer = make()
    schedule = optimizer._learning_rate
    if level != "none":
        paddle.distributed.init_parallel_env()
        model, optimizer = shard(level, model, optimizer)
    if level == "p_g_os":
        require_refusals(model, optimizer, f"{url}-refused")
    state = {"train": ModelState(model, optimizer)}

    def update(step: int) -> Any:
        paddle.seed(step)
        loss = minimize(model, optimizer, step)
        schedule.step()
        return loss

    train(state, url, losses, kill, update)


if __name__ == "__main__":
    main()
