"""Trains a small GPT on the source code of Python. Kill it at any time: when it is started again, it continues.

    python examples/train.py demo-run/checkpoints

Only the lines marked `# ckpt` are about checkpoints; most of them are at the end of `main`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ckpt  # ckpt


class Block(nn.Module):
    """A residual block: causal self-attention, and then a network with two layers."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(x.shape)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """A GPT over bytes. It returns the loss of predicting the next byte at each position."""

    def __init__(self, width: int, layers: int, context: int, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.token(inputs) + self.position.weight[: inputs.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Windows:
    """Parts of the text, in a scattered order, each once before any repeats. Its state is `cursor`, the number of the next."""

    STRIDE = 1_000_003  # a prime, so that its multiples reach every position of the text

    def __init__(self, text: bytes, context: int, batch: int) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context, self.batch, self.cursor = context, batch, 0

    def next(self) -> tuple[Tensor, Tensor]:
        """Return a batch of inputs, and the targets, which are the inputs shifted by one byte."""
        numbers = range(self.cursor, self.cursor + self.batch)
        self.cursor += self.batch
        starts = [number * self.STRIDE % (len(self.bytes) - self.context - 1) for number in numbers]
        windows = torch.stack([self.bytes[at : at + self.context + 1] for at in starts]).long()
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"cursor": self.cursor}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.cursor = state["cursor"]


def python_source() -> bytes:
    """Return the text to learn: the top modules of the standard library, about 5 MB."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return b"\n".join(file.read_bytes() for file in files)


def main() -> None:
    """Train, and save every few steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="where the checkpoints go: a folder, s3://…")
    parser.add_argument("--log", help="append the loss of each step to this file, as lines of JSON")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=30, help="steps from one checkpoint to the next")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()

    # One thread and deterministic algorithms sum in a fixed order, so that every run gives the same bits.
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)

    model = GPT(args.width, args.layers, args.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=args.steps)
    data = Windows(python_source(), args.context, args.batch)

    def train_step() -> float:
        loss = model(*data.next())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    log = open(args.log, "a", buffering=1) if args.log else None

    def report(step: int, loss: float) -> None:
        if log is not None:
            log.write(json.dumps({"step": step, "loss": loss, "bits": loss.hex()}) + "\n")
        elif step % 10 == 0:
            print(f"step {step:4d}  loss {loss:.4f}")

    state = {
        "model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data,
        "random": ckpt.RandomState(),  # ckpt: the random generators; dropout uses that of torch
    }  # fmt: skip
    with ckpt.Checkpointer(args.url, every=args.every, keep=3) as ck:  # ckpt
        ck.attach(optimizer)  # ckpt: copy parameters and moments while the next forward and backward run
        state, start = ck.restore(state)  # ckpt: the newest complete step, if there is one
        for step in range(start, args.steps):
            loss = train_step()
            report(step, loss)
            ck.step(step, state, loss=loss)  # ckpt: saves in the background when it is due


if __name__ == "__main__":
    main()
