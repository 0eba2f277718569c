"""Writes a folder of torch.distributed.checkpoint on several ranks: DTensors cut along rows and columns, and whole tensors."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,))
state = {
    "model": {
        "rows": distribute_tensor(torch.arange(7.0 * 6).reshape(7, 6), mesh, [Shard(0)]),
        "columns": distribute_tensor(torch.arange(8.0 * 5).reshape(8, 5).bfloat16(), mesh, [Shard(1)]),
        "replicated": distribute_tensor(torch.arange(4), mesh, [Replicate()]),
        "plain": torch.ones(3),
    },
    "groups": [{"lr": 0.5, "moments": torch.full((2, 2), 3.0)}],
    "step": 7,
}
dcp.save(state, checkpoint_id=sys.argv[1])
print(json.dumps({"rank": rank}))
dist.destroy_process_group()
