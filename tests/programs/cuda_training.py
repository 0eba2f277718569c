"""A training run on a CUDA device with autocast, a loss scale, dropout and a fused optimizer: cuda_training.py URL LOG."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS may give other sums in a second run

import torch

import ckpt

STEPS, EVERY = 24, 4


def main() -> None:
    url, log = sys.argv[1:]
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.Linear(256, 1)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    scaler = torch.amp.GradScaler("cuda", growth_interval=3)
    with ckpt.Checkpointer(url, every=EVERY, keep=2) as ck:
        ck.attach(optimizer)
        state, start = ck.restore(
            {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler, "random": ckpt.RandomState()}
        )
        for step in range(start, STEPS):
            optimizer.zero_grad()
            batch = torch.randn(32, 64, device="cuda")
            with torch.autocast("cuda", torch.float16):
                loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            with Path(log).open("a") as file:
                file.write(f"{step} {loss.item().hex()}\n")
            ck.step(step, state, loss=loss)
            time.sleep(0.03)  # so that the first save is durable before the first kill


if __name__ == "__main__":
    main()
