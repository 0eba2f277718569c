"""Saves by torch.distributed.checkpoint to a repository: a typical DCP script, in which three lines are changed.

    torchrun --nproc-per-node=2 examples/dcp_swap.py dcp-run/checkpoints

Its checkpoints are verified on every read and are steps of a repository: `ckpt-inspect dcp-run/checkpoints`, and `ckpt.load`
without torch.distributed.
"""

from __future__ import annotations

import argparse
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from train import GPT, Windows, python_source

from ckpt.adapters.dcp import Reader, Writer


def main() -> None:
    """Train, and save every few steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="where the checkpoints go")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=3)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    background = dist.new_group(backend="gloo")  # async_save communicates during the training, so it needs its own group
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(args.width, args.layers, context=32)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data = Windows(python_source(), 32, 4)
    start = 0

    if (Path(args.folder) / "steps").exists():
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "next": 0, "cursor": 0}
        dcp.load(state, storage_reader=Reader(args.folder))  # was: FileSystemReader(newest(args.folder))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        start, data.cursor = state["next"], state["cursor"]

    saving: Future[object] | None = None
    for step in range(start, args.steps):
        loss = model(*data.next())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
        if (step + 1) % args.every == 0:
            if saving is not None:
                saving.result()
            model_state, optimizer_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state, "next": step + 1, "cursor": data.cursor}
            writer = Writer(args.folder, step=step, keep=2)  # was: FileSystemWriter(f"{args.folder}/step-{step}")
            saving = dcp.async_save(state, storage_writer=writer, process_group=background)
    if saving is not None:
        saving.result()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
