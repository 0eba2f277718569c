"""Trains the GPT of train.py on several ranks, sharded by FSDP2. Kill it, and restart it on any number of ranks.

    torchrun --nproc-per-node=2 examples/fsdp.py fsdp-run/checkpoints

Only the lines marked `# ckpt` are about checkpoints. Each rank copies its own shards, and continues to train while they are
written. Parameters that several ranks have are written once. Ranks make no collective call for that.
"""

from __future__ import annotations

import argparse
import json

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from train import GPT, Windows, python_source

import ckpt  # ckpt
from ckpt.adapters.torch import ModelState  # ckpt


def main() -> None:
    """Train, and save every few steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="where the checkpoints go: a folder, s3://…")
    parser.add_argument("--losses", help="append the loss of each step to this file, as lines of JSON")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=30, help="steps from one checkpoint to the next")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="batch size of all ranks together")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same parameters on every rank

    model = GPT(args.width, args.layers, args.context).to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    torch.manual_seed(1 + rank)  # different dropout on each rank
    data = Windows(python_source(), args.context, args.batch)

    def train_step() -> float:
        inputs, targets = data.next()
        loss = model(inputs[rank::size].to(device), targets[rank::size].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / size

    log = open(args.losses, "a", buffering=1) if args.losses and rank == 0 else None

    def report(step: int, loss: float) -> None:
        if log is not None:
            log.write(json.dumps({"step": step, "loss": loss, "bits": loss.hex()}) + "\n")
        elif rank == 0 and step % 10 == 0:
            print(f"step {step:4d}  loss {loss:.4f}")

    state = {
        "train": ModelState(model, optimizer),  # ckpt: by name, so that any number of ranks can load it
        "data": data,
        "random": ckpt.RandomState(),  # ckpt: the random generators of each rank
    }
    with ckpt.Checkpointer(args.url, every=args.every, keep=3) as ck:  # ckpt: all ranks of torch.distributed
        ck.attach(optimizer)  # ckpt: copy parameters and moments while the next forward and backward run
        state, start = ck.restore(state)  # ckpt: the newest complete step, the same one on every rank
        for step in range(start, args.steps):
            loss = train_step()
            report(step, loss)
            ck.step(step, state, loss=loss)  # ckpt: saves in the background when it is due
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
