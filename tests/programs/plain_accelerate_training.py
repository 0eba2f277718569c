"""Trains by a loop that calls save_state and load_state of accelerate, and knows nothing of ckpt.

usage: plain_accelerate_training.py LOG OPTIONS

LOG gets a line of rank 0 for each batch: its number, the loss, and the process. OPTIONS is JSON.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

LOG, OPTIONS = Path(sys.argv[1]), json.loads(sys.argv[2])
FOLDERS = LOG.parent / "out"
BATCHES, EPOCHS = 7, 4


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return BATCHES * 2 * int(os.environ.get("WORLD_SIZE", "1"))

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index)) + random.random()


def saved_folders() -> list[Path]:
    found = FOLDERS.glob("checkpoints/checkpoint_*" if OPTIONS.get("automatic") else "step_*")
    return sorted(found, key=lambda path: int(path.name.rpartition("_")[2]))


def save(accelerator: Any, done: int) -> None:
    if OPTIONS.get("automatic"):
        accelerator.save_state()
        return
    folder = FOLDERS / f"step_{done}"
    if OPTIONS.get("makes_folders") and accelerator.is_main_process:
        time.sleep(0.5)  # the other ranks are in save_state already
        folder.mkdir(parents=True)
    accelerator.save_state(str(folder))
    if accelerator.is_main_process:
        (folder / "notes.txt").write_text("of the script")
        for old in saved_folders()[:-2]:
            shutil.rmtree(old)


def load(accelerator: Any) -> int:
    """Load the newest folder, and return how many batches were done."""
    folders = saved_folders()
    if not folders:
        return 0
    accelerator.load_state(None if OPTIONS.get("automatic") else str(folders[-1]))
    number = int(folders[-1].name.rpartition("_")[2])
    return 3 * (number + 1) if OPTIONS.get("automatic") else number


def main() -> None:
    automatic, limit = bool(OPTIONS.get("automatic")), OPTIONS.get("total_limit", 2)
    project = ProjectConfiguration(str(FOLDERS), automatic_checkpoint_naming=automatic, total_limit=limit)
    accelerator = Accelerator(cpu=True, project_config=project)
    torch.manual_seed(5)
    random.seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)
    data = torch.utils.data.DataLoader(Rows(), batch_size=2, shuffle=True)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    done = 0 if OPTIONS.get("never_saves") else load(accelerator)
    for epoch in range(done // BATCHES, EPOCHS):
        skipped = done - epoch * BATCHES
        for x in accelerator.skip_first_batches(data, skipped) if skipped else data:
            loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if accelerator.is_main_process:
                with LOG.open("a") as file:
                    file.write(f"{done} {loss.item().hex()} {os.getpid()}\n")
            done += 1
            time.sleep(0.02)
            if done % 3 == 0 and not OPTIONS.get("never_saves"):
                save(accelerator, done)
    accelerator.end_training()


if __name__ == "__main__":
    main()
