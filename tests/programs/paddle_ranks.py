"""A training run of two processes with Paddle's fleet over gloo: sharding stage 1 and data of each rank.

Usage:

    paddle_ranks.py SHARDING_DEGREE REPOSITORY LOSSES [STEP]       killed after STEP, if it is given

Each loss is one line of LOSSES: the step and the bits of the loss.
"""

from __future__ import annotations

import os
import sys

import paddle
from paddle.distributed import fleet

import ckpt
from ckpt.adapters.paddle import ModelState
from programs.paddle_loop import minimize, train


def main() -> None:
    degree, url, losses = int(sys.argv[1]), *sys.argv[2:4]
    kill = int(sys.argv[4]) if len(sys.argv) > 4 else -1
    strategy = fleet.DistributedStrategy()
    size = int(os.environ["PADDLE_TRAINERS_NUM"])
    strategy.hybrid_configs = {"dp_degree": size // degree, "mp_degree": 1, "pp_degree": 1, "sharding_degree": degree}
    fleet.init(is_collective=True, strategy=strategy)
    hcg = fleet.get_hybrid_communicate_group()
    paddle.seed(3)
    model = paddle.nn.Sequential(paddle.nn.Linear(8, 16), paddle.nn.Dropout(0.2), paddle.nn.Linear(16, 3))
    optimizer = fleet.distributed_optimizer(paddle.optimizer.AdamW(0.01, parameters=model.parameters()))
    paddle.seed(50 + hcg.get_global_rank())
    state = {"train": ModelState(model, optimizer, hcg), "random": ckpt.RandomState()}
    train(state, url, losses, kill, lambda step: minimize(model, optimizer, step))


if __name__ == "__main__":
    main()
