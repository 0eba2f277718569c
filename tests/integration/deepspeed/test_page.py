"""The lines of the page docs/howto/deepspeed.md run, and resume."""

from __future__ import annotations

from pathlib import Path

from helpers.docs_pages import DOCS, blocks
from helpers.torchrun import torchrun

import ckpt

_BEFORE = """
import deepspeed
import torch
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # so that it compiles nothing

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x):
        return self.layer(x).square().mean()

def batch_of(step):
    print("step", step, flush=True)
    return torch.full((2, 8), float(step))

model = Model()
config = {"train_batch_size": 2, "zero_optimization": {"stage": 1}, "steps_per_print": 1000,
          "optimizer": {"type": "Adam", "params": {"torch_adam": True}}}
"""


def test_lines_of_the_page(tmp_path: Path) -> None:
    block = next(block for block in blocks(DOCS / "howto" / "deepspeed.md") if block.kind == "diff")
    lines = block.text.replace("/data/run", str(tmp_path / "run")).splitlines()
    assert len([line for line in lines if line.startswith(("+", "-"))]) <= 3
    script = tmp_path / "train.py"
    script.write_text(_BEFORE + "\n".join(line[1:] for line in lines) + "\n")
    for steps in (range(20), range(0)):
        done = torchrun(1, script)
        assert done.returncode == 0, done.stdout + done.stderr
        assert [line for line in done.stdout.splitlines() if line.startswith("step")] == [f"step {step}" for step in steps]
    assert ckpt.open(tmp_path / "run").step_numbers()[-3:] == [10, 15, 20]
