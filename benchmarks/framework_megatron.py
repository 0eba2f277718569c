"""The training of framework_trainings.py with Megatron-Core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from framework_trainings import BATCH, EVERY, STEPS, Begin, Way, rows, torch_model

import ckpt


def train(way: Way, folder: Path, mib: int, begin: Begin) -> None:
    """A loop with sharded state dicts of Megatron-Core, whose own way is dist_checkpointing, in the background."""
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, optim_state_to_sharding_state

    from ckpt.adapters import megatron as adapter

    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    torch.cuda.current_device, torch.cuda.synchronize = lambda: "cpu", lambda: None  # the queue of its saves calls them
    model = torch_model(mib)
    optimizer = torch.optim.Adam(model.parameters())

    def state_dict() -> dict[str, Any]:
        weights = {
            name: ShardedTensor.from_rank_offsets(name, value) for name, value in model.state_dict(keep_vars=True).items()
        }
        packed = optimizer.state_dict()
        optim_state_to_sharding_state(
            packed, get_param_id_to_sharded_param_map(weights, model.parameters()), exclude_keys=("step",)
        )
        return {"model": weights, "optimizer": packed}

    queue = adapter.AsyncCallsQueue()
    begin.finish = lambda: queue.maybe_finalize_async_calls(blocking=True)
    saver = ckpt.Checkpointer(folder / "run", every=EVERY) if way == "bare" else None
    save = dist_checkpointing.save if way == "own" else adapter.save
    data = torch.from_numpy(rows(BATCH))
    for step in range(STEPS):
        begin()
        queue.maybe_finalize_async_calls(blocking=False)
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if saver is not None:
            saver.step(step, {"model": model, "optimizer": optimizer})
        elif step % EVERY == EVERY - 1:
            target = folder / f"iter_{step:07}"
            target.mkdir()
            queue.schedule_async_request(save(state_dict(), str(target), async_sharded_save=True))
    queue.close()
    if saver is not None:
        saver.close()
    dist.destroy_process_group()
