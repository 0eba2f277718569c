"""One rank under torchrun, for tests/integration/transformers: `trainer_checks.py FOLDER CHECK…` runs the checks in turn."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.torchrun import run_checks
from transformers import Trainer, TrainingArguments

import ckpt
from ckpt.adapters.transformers import CkptTrainer

ROOT = Path()  # set by `run_checks`


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).pow(2).mean()}


def trainer(kind: Any, steps: int, **options: Any) -> Any:
    """Return a Trainer that saves its last step. Each rank has an output folder of its own, as on hosts with local disks."""
    arguments = TrainingArguments(
        output_dir=str(ROOT / f"host-{dist.get_rank()}"), max_steps=steps, save_steps=2, per_device_train_batch_size=2,
        use_cpu=True, report_to=[], disable_tqdm=True, save_on_each_node=True,
    )  # fmt: skip
    data = [{"x": torch.full((2,), float(i))} for i in range(32)]
    return kind(Model(), arguments, train_dataset=data, **options)


def a_new_host_lacks_the_folder_of_trainer() -> None:
    trainer(Trainer, 2).train()
    dist.barrier()
    if dist.get_rank() == 1:
        shutil.rmtree(ROOT / "host-1")
    with pytest.raises(ckpt.CkptError, match=r"rank 1 .*host-1/checkpoint-2"):
        trainer(CkptTrainer, 4, ckpt=ROOT / "run").train(resume_from_checkpoint=True)


if __name__ == "__main__":
    run_checks(globals())
