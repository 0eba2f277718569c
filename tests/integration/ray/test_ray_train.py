"""Ray Train on two workers with all its files in a namespace: a worker that is killed changes no loss."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.folders import PROGRAMS
from helpers.nodes import three_nodes

import ckpt

STEPS, LAST_SAVED = 14, 11


@dataclass(frozen=True)
class Trainings:
    """The folder with what the workers have logged, the addresses of the nodes, and what the driver has printed."""

    folder: Path
    members: str
    printed: str

    def losses(self, name: str, rank: int) -> list[tuple[int, str]]:
        lines = (self.folder / name / f"{rank}.log").read_text().splitlines()
        return [(int(step), loss) for step, loss in map(str.split, lines)]


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainings]:
    folder = tmp_path_factory.mktemp("ray")
    (folder / "logs").mkdir()
    with three_nodes(folder) as members:
        process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "ray_training.py"), str(folder / "logs"), members],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
        try:
            printed, _ = process.communicate(timeout=580)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, printed[-6000:]
        yield Trainings(folder / "logs", members, printed)


@pytest.mark.parametrize("name", ["checkpointer", "reports"])
def test_after_a_kill_each_loss_is_that_of_the_undisturbed_training(trainings: Trainings, name: str) -> None:
    assert (trainings.folder / f"{name}-killed/killed").exists()
    for rank in range(2):
        whole, killed = trainings.losses(name, rank), trainings.losses(f"{name}-killed", rank)
        assert [step for step, _ in whole] == list(range(STEPS))
        assert set(killed) == set(whole)
        assert [step for step, _ in killed].count(0) == 1  # it has not begun again at the first step


def test_steps_of_the_checkpointer_are_in_the_namespace(trainings: Trainings) -> None:
    assert ckpt.open(f"ckpt://{trainings.members}/checkpointer-killed/steps").latest().step == LAST_SAVED


def test_checkpoints_that_workers_report_are_in_the_namespace(trainings: Trainings) -> None:
    lines = [line.split() for line in trainings.printed.splitlines() if line.startswith("checkpoint ")]
    assert [line[1:4] for line in lines] == [[str(STEPS - 1), str(STEPS - 1), "PyFileSystem"]] * 2
    assert [line[4].partition("/")[0] for line in lines] == ["reports", "reports-killed"]
