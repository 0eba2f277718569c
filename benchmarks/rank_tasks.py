"""What each rank of ranks.py does: it saves a sharded state, or loads it, and measures that."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

READER = "read"
"""Not a peer: the same number of processes that only read and copy the files of ckpt, as the limit of the disk at that time."""
STALL_ROUNDS = 7
"""The number of rounds, because the slowest of four ranks on few cores varies by a third from round to round."""

Result = dict[str, Any]


def gpt(gib: float) -> dict[str, Any]:
    """Return the leaves of states.gpt with values that are computed fast."""
    import states
    import torch

    parameters = int(gib * 2**30 / states.BYTES_PER_PARAMETER)
    layers = max(1, (parameters - states.VOCABULARY * states.WIDTH) // (12 * states.WIDTH**2))
    shapes = states.gpt_shapes(layers)
    base = torch.arange(max(a * (rest[0] if rest else 1) for a, *rest in shapes.values()), dtype=torch.float32) / 3
    found = {}
    for i, (name, shape) in enumerate(shapes.items()):
        values = base[: torch.Size(shape).numel()].view(shape)
        found[f"model.{name}"] = (values + i).to(torch.bfloat16)
        for j, part in enumerate(("master", "exp_avg", "exp_avg_sq")):
            found[f"optim.{part}.{name}"] = values + (i + j)
    return found


def state_of(gib: float, kind: str, fill: bool) -> dict[str, Any]:
    """Return the part of this rank of the state. fill: whether it has its values; otherwise zeros."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    whole = gpt(gib)
    if kind == "replicated":
        return whole if fill else {name: torch.zeros_like(value) for name, value in whole.items()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {}
    for name, value in whole.items():
        is_sharded = value.shape[0] >= mesh.size()
        local = value.chunk(mesh.size())[mesh.get_local_rank()] if is_sharded else value
        local = local.clone() if fill else torch.zeros_like(local)
        placements = [Shard(0)] if is_sharded else [Replicate()]
        found[name] = DTensor.from_local(local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())
    return found


def local(value: Any) -> Any:
    """Return the tensor of this rank."""
    return value.to_local() if hasattr(value, "to_local") else value


def raw_reads(folder: Path, rank: int, ranks: int, timed: Any) -> float:
    """Return the seconds in which the ranks read the files below a folder once, in equal shares, and copy the bytes.

    They read by O_DIRECT with sixteen threads each, 512 KiB at a time, into memory on huge pages.
    """
    from limits import in_threads

    from ckpt.storage.base.huge_pages import map_huge_pages

    workers, piece = 16, 512 << 10
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    pieces = [(file, at) for file in files for at in range(0, file.stat().st_size, piece)]
    share = -(-len(pieces) // (ranks * workers))
    buffers = [np.frombuffer(map_huge_pages(2 << 20), np.uint8)[:piece] for _ in range(workers)]  # a huge page has 2 MiB
    for buffer in buffers:
        buffer[:] = 1
    into = [np.ones((share, piece), np.uint8) for _ in range(workers)]
    descriptors = {file: os.open(file, os.O_RDONLY | os.O_DIRECT) for file in files}

    def read(worker: int) -> None:
        mine = pieces[(rank * workers + worker) * share :][:share]
        for target, (file, at) in zip(into[worker], mine, strict=False):
            count = os.preadv(descriptors[file], [buffers[worker]], at)
            target[:count] = buffers[worker][:count]

    taken = float(timed(lambda: in_threads(workers, read)))
    for descriptor in descriptors.values():
        os.close(descriptor)
    return taken


class Rank:
    """One rank of a task."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        torch.set_num_threads(1)
        self._args, self._dist = args, dist

    def timed(self, work: Callable[[], object]) -> float:
        """Return the seconds until all ranks have done some work."""
        self._dist.barrier()
        began = time.perf_counter()
        work()
        self._dist.barrier()
        return time.perf_counter() - began

    def slowest(self, seconds: float) -> float:
        """Return the most seconds of all ranks."""
        import torch

        value = torch.tensor([seconds], dtype=torch.float64)
        self._dist.all_reduce(value, self._dist.ReduceOp.MAX)
        return float(value)

    def save(self) -> Result:
        """Save one state several times, each time into a new folder; the last one stays."""
        args = self._args
        state = state_of(args.gib, args.kind, True)
        times, stored = [], 0
        for number in range(args.repeat + 1):
            target = args.data / str(number)
            os.sync()
            times.append(self.timed(lambda target=target: self._save(state, target)))
            stored = sum(f.stat().st_size for f in target.rglob("*") if f.is_file())
            self._dist.barrier()
            if self._dist.get_rank() == 0 and number < args.repeat:
                shutil.rmtree(target)
            self._dist.barrier()
        return {"stored": stored, "first": times[0], "again": times[1:]}

    def _save(self, state: dict[str, Any], target: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from probes import fsync_files

        import ckpt

        if self._args.peer == "ckpt":
            ckpt.save(state, target, 1, codec="none")
        else:
            dcp.save(state, checkpoint_id=target)
        self._dist.barrier()
        if self._dist.get_rank() == 0:
            fsync_files(target)

    def stall(self) -> Result:
        """Save in the background. Measure the duration of the call, and that of a copy of the same state."""
        import ckpt

        state = state_of(self._args.gib, self._args.kind, True)
        found: Result = {"stall": [], "copy": []}
        with ckpt.Checkpointer(self._args.data / "stall", every=None, keep=1, codec="none") as saver:
            targets = [local(v).clone() for v in state.values()]
            for number in range(STALL_ROUNDS + 1):
                copy = self.timed(lambda: [t.copy_(local(v)) for t, v in zip(targets, state.values(), strict=True)])
                self._dist.barrier()
                began = time.perf_counter()
                handle = saver.save(number, state)
                stall = self.slowest(time.perf_counter() - began)
                handle.result()
                if number:
                    found["stall"].append(stall)
                    found["copy"].append(copy)
        return found

    def load(self) -> Result:
        """Load the state that a task has saved, and compare it with the saved one."""
        import torch
        import torch.distributed.checkpoint as dcp

        import ckpt

        args = self._args
        source = args.data / str(args.repeat)
        if args.peer == READER:
            return {"load": raw_reads(source, self._dist.get_rank(), self._dist.get_world_size(), self.timed)}
        like = state_of(args.gib, args.kind, False)
        load = (lambda: ckpt.load(source, like)) if args.peer == "ckpt" else (lambda: dcp.load(like, checkpoint_id=source))
        seconds = self.timed(load)
        for name, value in state_of(args.gib, args.kind, True).items():
            if not torch.equal(local(value), local(like[name])):
                raise AssertionError(f"the loaded values of {name} differ from the saved ones")
        return {"load": seconds}

    def end(self, found: Result) -> None:
        """Write the result, if this is rank 0, and leave the group."""
        self._dist.barrier()
        if self._dist.get_rank() == 0:
            self._args.result.write_text(json.dumps(found))
        self._dist.destroy_process_group()


def run_rank(args: argparse.Namespace) -> None:
    """Run one task as one rank. Rank 0 writes the result as JSON."""
    rank = Rank(args)
    rank.end({"save": rank.save, "stall": rank.stall, "load": rank.load}[args.task]())
