"""Trains by Trainer of transformers, and knows nothing of ckpt: plain_hf_training.py LOG [OPTIONS], where OPTIONS is JSON.

LOG gets a line for each micro-batch: ten times the number of its update and its number there, the loss, and the process.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

LOG = sys.argv[1]
OPTIONS: dict[str, Any] = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
WORDS = 31
RANK = os.environ.get("RANK", "0")


class Tokens(torch.utils.data.Dataset):
    """Sequences of which each access changes a random word, unless a worker reads them."""

    def __init__(self, count: int) -> None:
        self.rows = np.random.RandomState(5).randint(0, WORDS, (count, 8))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index].copy()
        if not OPTIONS.get("args", {}).get("dataloader_num_workers"):
            row[random.randrange(8)] = np.random.randint(WORDS)
        return {"input_ids": row, "labels": row}


class SlowTokens(Tokens):
    """Sequences of an evaluation that takes far longer than a step."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(OPTIONS["eval_seconds"] / len(self))
        return super().__getitem__(index)


class Recording(Trainer):
    first = 0
    update, micro = -1, 0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        self.micro = self.micro + 1 if self.update == self.state.global_step else 0
        self.update = self.state.global_step
        if RANK == "0":
            with open(LOG, "a") as file:
                file.write(f"{self.first + 10 * self.update + self.micro} {float(loss).hex()} {os.getpid()}\n")
        time.sleep(0.05)
        return loss


def train(seed: int, first: int) -> Any:
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=WORDS, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    values: dict[str, Any] = {
        "output_dir": f"{LOG}.out", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 3,
        "learning_rate": 0.01, "save_steps": 3, "report_to": [], "use_cpu": True, "disable_tqdm": True,
        "dataloader_pin_memory": False, "remove_unused_columns": False,
    }  # fmt: skip
    args = TrainingArguments(**(values | OPTIONS.get("args", {})))
    evaluated = SlowTokens(4) if OPTIONS.get("eval_seconds") else None
    trainer = Recording(GPT2LMHeadModel(config), args, train_dataset=Tokens(22), eval_dataset=evaluated)
    trainer.first = first
    trainer.train()
    return trainer


def main() -> None:
    code = "import torch, transformers; from transformers import Trainer; print(Trainer.train.__module__)"
    if OPTIONS.get("child"):
        print("child", subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True))
    trainer = train(7, 0)
    weights = [sum(float(p.detach().double().sum()) for p in trainer.model.parameters()).hex()]
    for number in range(1, OPTIONS.get("trainings", 1)):
        trainer = train(7 + number, 1000 * number)
        weights.append(sum(float(p.detach().double().sum()) for p in trainer.model.parameters()).hex())
    print("weights", *weights, type(trainer).__mro__[1].__name__, Trainer.train.__module__)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
