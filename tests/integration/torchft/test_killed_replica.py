"""A replica that is killed gets the state of the other one by `CkptTransport`; all losses are those of an unbroken training."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torchft._torchft import LighthouseServer

STEPS = 14
PROGRAM = Path(__file__).parent / "train.py"


class Job:
    """Two replicas, each in a process, and the lighthouse of torchft."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=100, heartbeat_timeout_ms=2000)
        self.replicas = [self.start(i) for i in range(2)]

    def start(self, replica: int) -> subprocess.Popen[bytes]:
        arguments = [str(replica), self.lighthouse.address(), self.log(replica), str(STEPS)]
        with open(f"{self.log(replica)}.err", "ab") as errors:
            return subprocess.Popen(
                [sys.executable, PROGRAM, *arguments], stderr=errors, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )

    def log(self, replica: int) -> str:
        return str(self.folder / f"{replica}.log")

    def losses(self, replica: int) -> list[tuple[int, str]]:
        path = Path(self.log(replica))
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(int(step), loss) for step, loss in lines]

    def wait_for_step(self, replica: int, step: int) -> None:
        end = time.monotonic() + 300
        while not any(number >= step for number, _ in self.losses(replica)):
            assert time.monotonic() < end, Path(f"{self.log(replica)}.err").read_text()[-3000:]
            time.sleep(0.02)

    def finish(self) -> None:
        for number, replica in enumerate(self.replicas):
            assert replica.wait(400) == 0, Path(f"{self.log(number)}.err").read_text()[-3000:]
        self.close()

    def close(self) -> None:
        for replica in self.replicas:
            replica.kill()
            replica.wait()
        self.lighthouse.shutdown()


@pytest.fixture
def job():
    made: list[Job] = []

    def start(folder: Path) -> Job:
        made.append(Job(folder))
        return made[-1]

    yield start
    for each in made:
        each.close()


def test_all_losses_equal_those_of_an_unbroken_training(job, tmp_path: Path) -> None:
    whole = job(tmp_path / "whole")
    whole.finish()
    expected = [dict(whole.losses(replica)) for replica in range(2)]
    assert [len(each) for each in expected] == [STEPS, STEPS]

    broken = job(tmp_path / "broken")
    broken.wait_for_step(1, 4)
    broken.replicas[1].kill()
    broken.replicas[1].wait()
    broken.replicas[1] = broken.start(1)
    broken.wait_for_step(0, 9)
    broken.replicas[0].kill()  # the one that has never been behind
    broken.replicas[0].wait()
    broken.replicas[0] = broken.start(0)
    broken.finish()
    found = [broken.losses(replica) for replica in range(2)]
    for replica in range(2):
        steps = [step for step, _ in found[replica]]
        assert steps == sorted(set(steps))  # the new process has continued, and not begun again
        assert all(expected[replica][step] == loss for step, loss in found[replica])
    assert {step for each in found for step, _ in each} == set(range(STEPS))
