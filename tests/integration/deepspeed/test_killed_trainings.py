"""A DeepSpeed training run that is killed and started again gives the losses of an unbroken one, bit for bit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.folders import PROGRAMS
from helpers.torchrun import torchrun

import ckpt


class Training:
    """Runs of programs/deepspeed_training.py with the same options."""

    def __init__(self, folder: Path, ranks: int, *options: str) -> None:
        self.folder, self.ranks, self.options = folder, ranks, options

    def run(self, name: str, *more: str, killed: bool = False) -> str:
        """Run it once, with a repository and losses of that name; return what it printed."""
        program, url = PROGRAMS / "deepspeed_training.py", self.folder / name
        done = torchrun(self.ranks, program, str(url), f"{url}.losses", *self.options, *more)
        assert ("Signal 9 (SIGKILL)" in done.stderr) if killed else done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def losses(self, name: str, rank: int) -> dict[str, str]:
        """Return the line of each step; one that a restart repeated counts once, as it was last."""
        lines = (self.folder / f"{name}.losses.{rank}").read_text().splitlines()
        return {line.split()[0]: line for line in lines}


@pytest.mark.parametrize(
    ("kill_at", "options"),
    [
        pytest.param(10, ["--stage=1", "--precision=bf16-fp32-grads"], id="stage 1, the BF16_Optimizer"),
        pytest.param(14, ["--stage=2", "--precision=fp16"], id="stage 2, fp16 with skipped steps"),
        pytest.param(10, ["--stage=3", "--precision=bf16", "--accumulate=2"], id="stage 3, accumulated gradients"),
        pytest.param(10, ["--stage=2", "--precision=fp32", "--batch-norm"], id="statistics of a BatchNorm of each rank"),
    ],
)
def test_losses_after_a_kill(tmp_path: Path, kill_at: int, options: list[str]) -> None:
    training = Training(tmp_path, 2, *options)
    training.run("whole")
    training.run("cut", f"--kill-at={kill_at}", killed=True)
    printed = training.run("cut")
    resumed = re.findall(r"resumed from .*?/cut/global_step(\d+) \{'step': (\d+), 'note': 'of rank 0'\}", printed)
    assert len(resumed) == 2  # the newest save may have been cut, too
    assert resumed[0] == resumed[1]
    assert 3 <= int(resumed[0][0]) == int(resumed[0][1]) + 1 <= kill_at
    for rank in range(2):
        whole = training.losses("whole", rank)
        assert training.losses("cut", rank) == whole
        assert len(whole) == 24
    assert ("fp16" in options[1]) == (training.losses("whole", 0)["23"].split()[-1] != "0")  # steps that were skipped
    if "--batch-norm" in options:  # each rank validates with its own statistics
        assert training.losses("whole", 0)["23"].split()[2] != training.losses("whole", 1)["23"].split()[2]
    assert ckpt.open(tmp_path / "cut").latest().step == 24
