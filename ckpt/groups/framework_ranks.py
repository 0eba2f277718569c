"""Rank and size from Ray Train, Paddle and MindSpore, whose ranks exchange bytes through the store.

ckpt uses none of their collectives: these would need the same order relative to the training's on every rank.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from ckpt.groups.launchers import EnvRank, job_id, mindspore_job, paddle_job
from ckpt.storage.base.errors import is_transient


def framework_rank() -> EnvRank | None:
    """Return rank, size and job as the first of these libraries that is initialised in this process describes them."""
    return _ray_rank() or _paddle_rank() or _mindspore_rank()


def _ray_rank() -> EnvRank | None:
    """Return the rank of a worker of Ray Train; it has no variables unless the trainer is that of torch or TensorFlow."""
    train: Any = sys.modules.get("ray.train")
    if "RAY_RAYLET_PID" not in os.environ or not hasattr(train, "get_context"):
        return None
    try:
        context = train.get_context()
        rank, size, run = context.get_world_rank(), context.get_world_size(), context.get_experiment_name()
    except Exception as error:  # a worker of Ray outside of Ray Train; the type of the error depends on the version
        if is_transient(error):
            raise
        return None
    if not isinstance(rank, int) or not isinstance(size, int):
        return None
    return EnvRank("ray.train", rank, size, job_id(os.environ, run or "", os.environ.get("RAY_JOB_ID", "")))


def _paddle_rank() -> EnvRank | None:
    dist: Any = sys.modules.get("paddle.distributed")
    if not hasattr(dist, "get_world_size") or not dist.is_initialized():
        return None
    return EnvRank("paddle.distributed", dist.get_rank(), dist.get_world_size(), paddle_job(os.environ))


def _mindspore_rank() -> EnvRank | None:
    communication: Any = sys.modules.get("mindspore.communication")
    if not getattr(getattr(communication, "GlobalComm", None), "INITED", False):
        return None
    rank, size = communication.get_rank(), communication.get_group_size()
    return EnvRank("mindspore.communication", rank, size, mindspore_job(os.environ))
