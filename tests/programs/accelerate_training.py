"""A training loop with accelerate, for tests/integration/transformers. It may kill itself.

usage: accelerate_training.py FOLDER NAME OPTIONS    (OPTIONS is JSON)

Each rank appends the loss of each batch to FOLDER/NAME-RANK.jsonl, as [epoch, batch, loss]. At each save and load, it appends a
digest of the model to FOLDER/NAME-RANK.digests.jsonl, as [step, digest].
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DataLoaderConfiguration

import ckpt
from ckpt.adapters.accelerate import attach
from programs import fsdp2_on_cpu

FOLDER, NAME = Path(sys.argv[1]), sys.argv[2]
OPTIONS: dict[str, Any] = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
RANK = int(os.environ.get("RANK", "0"))


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return OPTIONS.get("samples", 14)

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = random.random() if OPTIONS.get("random_data", True) else 0.0
        return torch.full((4,), float(index)) + noise


class OwnSampler(torch.utils.data.Sampler):
    """Another order in each epoch, from a generator that continues from epoch to epoch."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(5)

    def __len__(self) -> int:
        return len(Rows())

    def __iter__(self) -> Any:
        return iter(self.random.permutation(len(self)).tolist())


class Stream(torch.utils.data.IterableDataset):
    """Samples without a length, each with noise of the generator that the model uses, too.

    The option `stream` is "permuted" for an order that is drawn at the start of the epoch, "own" for one of a generator of its
    own, or "buffered" for a shuffle buffer.
    """

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(17) if OPTIONS["stream"] == "own" else None

    def __iter__(self) -> Any:
        count, kind = OPTIONS.get("samples", 14), OPTIONS["stream"]
        buffer: list[int] = []
        for index in torch.randperm(count, generator=self.generator).tolist():
            buffer.append(index)
            if kind != "buffered" or len(buffer) == 5:
                chosen = buffer.pop(int(torch.randint(len(buffer), ())) if len(buffer) > 1 else 0)
                yield torch.full((4,), float(chosen)) + torch.rand(())
        yield from (torch.full((4,), float(index)) for index in buffer)


class Progress:
    """Where the loop is; registered for checkpointing."""

    def __init__(self) -> None:
        self.epoch, self.batch, self.step = 0, 0, 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def write(suffix: str, row: list[Any]) -> None:
    with open(FOLDER / f"{NAME}-{RANK}.{suffix}", "a") as file:
        file.write(json.dumps(row) + "\n")


def newest_step() -> int:
    try:
        return max(ckpt.open(FOLDER / "run").steps(), default=-1)
    except ckpt.StepNotFound:
        return -1


def deepspeed_plugin(stage: int) -> Any:
    from accelerate import DeepSpeedPlugin
    from helpers.deepspeed_cpu import use_gloo, zero_config

    use_gloo()
    config = zero_config(stage, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=2, bf16={"enabled": stage > 1})
    return DeepSpeedPlugin(hf_ds_config=config)


def register_hooks(accelerator: Accelerator) -> None:
    """Let each rank add two files to a checkpoint, one of them under a name that all ranks use, and read those of all ranks."""
    rank, ranks = accelerator.process_index, accelerator.num_processes

    def save(models: Any, weights: Any, folder: str) -> None:
        Path(folder, f"rank_{rank}.txt").write_text(str(rank))
        Path(folder, "common.txt").write_text(f"of rank {rank}")

    def load(models: Any, folder: str) -> None:
        texts = [Path(folder, f"rank_{other}.txt").read_text() for other in range(ranks)]
        assert texts == [str(other) for other in range(ranks)]
        assert Path(folder, "common.txt").read_text() == "of rank 0"

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def main() -> None:
    fsdp2_on_cpu.choose_fsdp()
    seedable = OPTIONS.get("seedable", False)
    loaders = DataLoaderConfiguration(use_seedable_sampler=seedable, dispatch_batches=OPTIONS.get("dispatch"))
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, dataloader_config=loaders,
        **({"deepspeed_plugin": deepspeed_plugin(OPTIONS["stage"])} if "stage" in OPTIONS else {}),
    )  # fmt: skip
    torch.manual_seed(OPTIONS.get("seed_of_resume", 3) if OPTIONS.get("resume") else 3)
    random.seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    options: dict[str, Any]
    rows, options = (Stream(), {}) if "stream" in OPTIONS else (Rows(), {"shuffle": True})
    if OPTIONS.get("own") == "generator":
        options["generator"] = torch.Generator().manual_seed(9)
    elif OPTIONS.get("own"):
        options = {"sampler": OwnSampler()}
    data = torch.utils.data.DataLoader(rows, batch_size=2, **options)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    if accelerator.is_fsdp2:
        fsdp2_on_cpu.require_fsdp2(accelerator, model)
    attach(accelerator, FOLDER / "run", keep=2)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if OPTIONS.get("hooks"):
        register_hooks(accelerator)
    if OPTIONS.get("resume"):
        accelerator.load_state()
        write("digests.jsonl", [progress.step, fsdp2_on_cpu.digest(model, [optimizer])])
    for epoch in range(progress.epoch, 3):
        rest = accelerator.skip_first_batches(data, progress.batch) if progress.batch else data
        for batch in rest:
            with accelerator.accumulate(model):
                loss = model(batch.to(next(model.parameters()).dtype)).float().square().mean()
                write("jsonl", [epoch, progress.batch, float(loss.detach()).hex()])
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            progress.batch, progress.step = progress.batch + 1, progress.step + 1
            if progress.step == OPTIONS.get("kill_at"):
                while newest_step() < OPTIONS["saved"]:
                    time.sleep(0.05)
                os.kill(os.getpid(), signal.SIGKILL)
            if progress.step in OPTIONS.get("saves", [4, 9, 16]):
                accelerator.save_state(f"step_{progress.step}")
                write("digests.jsonl", [progress.step, fsdp2_on_cpu.digest(model, [optimizer])])
        progress.epoch, progress.batch = epoch + 1, 0
        if progress.step in OPTIONS.get("saves_after_epoch", []):
            accelerator.save_state(f"step_{progress.step}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
