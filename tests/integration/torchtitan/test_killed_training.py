"""A torchtitan training run that is killed and started again gives the losses of an unbroken one, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.docs_pages import DOCS
from helpers.folders import PROGRAMS
from helpers.torchrun import torchrun

import ckpt

OVERRIDE = "--override.imports=ckpt.adapters.torchtitan.use_ckpt"
ON_OTHER_RANKS = "--checkpoint.exclude_from_loading=dataloader"


class Training:
    """Runs of programs/torchtitan_training.py on the same data."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.ranks = folder, ranks

    def run(self, name: str, *options: str, status: int = 0, ranks: int = 0) -> str:
        """Run it once, with a dump folder and losses of that name; return what it printed."""
        program = PROGRAMS / "torchtitan_training.py"
        arguments = [str(self.folder / name), str(self.folder / f"{name}.losses"), *options]
        offline = {"HF_DATASETS_CACHE": str(self.folder / "cache"), "HF_HUB_OFFLINE": "1"}
        done = torchrun(ranks or self.ranks, program, *arguments, **offline)
        assert done.returncode == status, done.stdout + done.stderr[-6000:]
        return done.stdout + done.stderr

    def losses(self, name: str, rank: int = 0) -> dict[str, str]:
        """Return the loss of each step; of one that a restart repeated, the last one. It fails if both differ."""
        found: dict[str, str] = {}
        for line in (self.folder / f"{name}.losses.{rank}").read_text().splitlines():
            step, loss = line.split()
            assert found.setdefault(step, loss) == loss, f"step {step} was repeated with another loss"
        return found

    def steps(self, name: str) -> list[int]:
        return ckpt.open(self.folder / name / "checkpoint").steps()

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(self.folder / f"{name}.tensors" / "0.pt")
        return found


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """An unbroken training of two ranks with FSDP, which keeps two steps."""
    training = Training(tmp_path_factory.mktemp("torchtitan"), 2)
    (training.folder / "whole.tensors").mkdir()
    training.run("whole", f"--tensors={training.folder / 'whole.tensors'}", "--checkpoint.keep_latest_k=2")
    yield training
    shutil.rmtree(training.folder)


def test_killed_ranks_resume(sharded: Training) -> None:
    assert sharded.steps("whole") == [10, 12]
    sharded.run("cut", "--kill-at=7", "--checkpoint.async_mode=async_with_pinned_mem", status=1)
    assert sharded.steps("cut") in ([2, 4], [2, 4, 6])  # the save of step 6 may have been cut off
    sharded.run("cut", "--checkpoint.async_mode=disabled")
    for rank in range(2):
        assert sharded.losses("cut", rank) == sharded.losses("whole", rank)
    assert len(sharded.losses("whole")) == 12


def test_position_in_the_data_of_other_ranks_is_refused(sharded: Training) -> None:
    printed = sharded.run("whole", ranks=1, status=1)
    assert "that of 2 data-parallel ranks, and this run has 1; with checkpoint.exclude_from_loading=['dataloader']" in printed


def test_other_ranks_get_the_same_parameters(sharded: Training) -> None:
    """Two ranks with tensor parallelism load what two ranks with FSDP saved."""
    shutil.copytree(sharded.folder / "whole", sharded.folder / "split")
    (sharded.folder / "split.tensors").mkdir()
    folder = f"--tensors={sharded.folder / 'split.tensors'}"
    sharded.run("split", ON_OTHER_RANKS, folder, "--parallelism.tensor_parallel_degree=2")
    whole, split = sharded.tensors("whole"), sharded.tensors("split")
    assert whole.keys() == split.keys()
    assert all(torch.equal(whole[name], split[name]) for name in whole)


def test_training_that_torchtitan_saved_continues(tmp_path: Path) -> None:
    """An option of the command line selects ckpt, which continues from a step of torchtitan's own manager."""
    assert OVERRIDE.replace("=", " ") in (DOCS / "howto" / "torchtitan.md").read_text()
    training = Training(tmp_path, 1)
    training.run("whole", "--manager=dcp")
    training.run("cut", "--manager=dcp", "--kill-at=5", status=1)
    training.run("cut", "--manager=dcp", OVERRIDE, "--checkpoint.last_save_model_only")
    assert training.losses("cut") == training.losses("whole")
    repository = ckpt.open(tmp_path / "cut" / "checkpoint" / "ckpt")
    assert repository.steps() == [6, 8, 10, 12]
    leaves = repository[12].leaves()
    assert all(leaf.name.startswith("model.") for leaf in leaves)
    printed = training.run("cut", "--training.steps=14", status=1)
    assert "has only the model: set checkpoint.load_step to an earlier one" in printed
