"""A training run with a data loader that is killed equals a training run without the kill."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
from helpers.folders import PROGRAMS, REPOSITORY

PROGRAM = str(PROGRAMS / "data_training.py")


def test_the_import_of_the_data_loader_is_light() -> None:
    code = "import ckpt, sys; ckpt.data.Loader; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


DOCS = [file.read_text() for file in [*(REPOSITORY / "docs").rglob("*.md"), REPOSITORY / "README.md"]]


def test_the_loop_of_the_documentation_runs_as_written(tmp_path: Path) -> None:
    before = f"""
import ckpt, torch
dataset, total, url = torch.randn(1024, 8), 6, {str(tmp_path)!r}
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)

def train_step(model, batch):
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
"""
    (loop,) = re.findall(r"```python\n(data = ckpt.*?)```", (REPOSITORY / "docs/reference/loop.md").read_text(), re.DOTALL)
    after = "assert (step, data.batch, len(batch)) == (5, 5, 256)"
    subprocess.run([sys.executable, "-c", before + loop + after], check=True, timeout=600)


def test_names_in_the_documentation_need_no_further_import() -> None:
    calls = {call for text in DOCS for call in re.findall(r"\bckpt(?:\.[a-zA-Z_]+)+(?=\()", text)}
    assert {"ckpt.data.Loader", "ckpt.pulse.compute", "ckpt.pulse.phase", "ckpt.tiers.drain"} <= calls
    subprocess.run([sys.executable, "-c", "\n".join(["import ckpt", *sorted(calls)])], check=True, timeout=600)


def run(folder: Path, repo: str, name: str, world_size: int, *fault: object) -> dict[int, int]:
    """Run a training program in processes, and return the exit statuses by rank."""
    ranks = {}
    for rank in range(world_size):
        command = [sys.executable, PROGRAM, str(folder / repo), str(folder / f"{name}-{rank}"), *map(str, fault)]
        environ = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "TORCHELASTIC_RUN_ID": name, "OMP_NUM_THREADS": "1"}
        ranks[rank] = subprocess.Popen(command, env=os.environ | environ)
    return {rank: process.wait(timeout=600) for rank, process in ranks.items()}


def test_a_killed_and_restored_training_equals_the_undisturbed_one(tmp_path: Path) -> None:
    """Weights, samples and random transforms in workers are equal, bit for bit; then with another number of ranks."""
    assert run(tmp_path, "quiet", "quiet", 2) == {0: 0, 1: 0}
    killed = run(tmp_path, "repo", "killed", 2, 7)
    assert killed == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
    shutil.copytree(tmp_path / "repo", tmp_path / "other")
    assert run(tmp_path, "repo", "again", 2) == {0: 0, 1: 0}
    seen = {}
    for rank in range(2):
        quiet = np.load(tmp_path / f"quiet-{rank}.npz")
        again = np.load(tmp_path / f"again-{rank}.npz")
        assert np.array_equal(quiet["weights"], again["weights"])
        assert 0 < len(again["seen"]) < len(quiet["seen"])
        assert np.array_equal(quiet["seen"][-len(again["seen"]) :], again["seen"])
        seen[rank] = quiet["seen"]
    assert run(tmp_path, "other", "one", 1) == {0: 0}
    one = np.load(tmp_path / "one-0.npz")["seen"]
    steps = len(one) // 4  # a step has four samples, two for each of the earlier ranks
    assert np.array_equal(one.reshape(steps, 4, -1)[:, :2].reshape(2 * steps, -1), seen[0][-2 * steps :])
    assert np.array_equal(one.reshape(steps, 4, -1)[:, 2:].reshape(2 * steps, -1), seen[1][-2 * steps :])
