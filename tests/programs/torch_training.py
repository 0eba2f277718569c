"""A training run of a small torch model with dropout for `ResumeContract`: torch_training.py URL LOG."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import ckpt

STEPS, EVERY = 24, 4


def main() -> None:
    url, log = sys.argv[1:]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with ckpt.Checkpointer(url, every=EVERY, keep=2) as ck:
        state, start = ck.restore({"model": model, "optimizer": optimizer, "random": ckpt.RandomState()})
        for step in range(start, STEPS):
            optimizer.zero_grad()
            batch = torch.randn(32, 8)
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            with Path(log).open("a") as file:
                file.write(f"{step} {loss.item().hex()}\n")
            ck.step(step, state)
            time.sleep(0.03)  # so that the first save is durable before the first kill


if __name__ == "__main__":
    main()
