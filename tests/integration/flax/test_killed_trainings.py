"""A run with flax, equinox, optax and grain that is killed and resumed has the losses of an unbroken one, bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.folders import PROGRAMS

STEPS = 300


def start(kind: str, url: Path, result: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(PROGRAMS / "flax_training.py"), kind, str(url), str(result), str(STEPS)]
    return subprocess.Popen(command, env=os.environ | {"JAX_PLATFORMS": "cpu"})


def losses(result: Path) -> list[tuple[int, str]]:
    lines = [line.split() for line in result.read_text().splitlines()]
    return [(int(step), loss) for step, loss in lines]


@pytest.mark.parametrize("kind", [pytest.param("nnx", marks=pytest.mark.essential), "linen", "equinox"])
def test_the_losses_after_a_kill_are_those_of_an_unbroken_run(tmp_path: Path, kind: str) -> None:
    straight, cut = tmp_path / "straight.txt", tmp_path / "cut.txt"
    assert start(kind, tmp_path / "straight", straight).wait(300) == 0
    want = dict(losses(straight))
    assert list(want) == list(range(STEPS))

    process = start(kind, tmp_path / "cut", cut)
    try:
        deadline = time.monotonic() + 300
        while not (cut.exists() and cut.read_bytes().count(b"\n") > 50) and time.monotonic() < deadline:
            time.sleep(0.001)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    before = losses(cut)
    assert 50 < len(before) < STEPS

    assert start(kind, tmp_path / "cut", cut).wait(300) == 0
    after = losses(cut)[len(before) :]
    assert 0 < after[0][0] <= before[-1][0] + 1
    assert dict(before + after) == want
    assert all(want[step] == loss for step, loss in before)
