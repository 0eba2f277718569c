"""The program of README.md runs as written, and continues when it is started again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from helpers.docs_pages import ROOT, blocks

import ckpt

BEFORE = """
import torch

torch.manual_seed(0)
total = 250
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
losses = []


def train_step():
    loss = model(torch.randn(16, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item().hex())
    return loss


"""


def test_the_program_runs_and_continues_with_the_same_losses(tmp_path: Path) -> None:
    (program,) = [block.text for block in blocks(ROOT / "README.md") if block.kind == "python"]
    here = program.replace("/data/run", str(tmp_path / "run"))
    assert here != program
    after = f"\nwith open({str(tmp_path / 'losses')!r}, 'w') as file:\n    file.write(' '.join([str(start), *losses]))\n"
    found = []
    for _ in range(2):
        subprocess.run([sys.executable, "-c", BEFORE + here + after], check=True, timeout=600)
        found.append((tmp_path / "losses").read_text().split())
        assert ckpt.open(tmp_path / "run").steps() == [99, 199]
    (first, *unbroken), (second, *continued) = found
    assert (first, len(unbroken)) == ("0", 250)
    assert second == "200"
    assert continued == unbroken[200:]
