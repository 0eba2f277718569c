"""The check that no rank saves the last step of a fit if the loss of one rank is bad, for each framework that has a fit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import ckpt
from helpers.folders import PROGRAMS


def check_last_step_with_a_bad_loss(framework: str, url: Path) -> None:
    """Fit on two ranks, of which one has a bad last loss, and check that both end well and neither saves the step."""
    job = {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": str(time.monotonic_ns())}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAMS / "bad_last_loss.py"), framework, str(url)],
            stderr=subprocess.PIPE, text=True, env={**os.environ, **job, "RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    messages = [rank.communicate(timeout=600)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], messages
    assert "step 2 is not saved because rank 1 leaves it out: its loss is nan" in messages[0]
    assert "step 2 is not saved: its loss is nan" in messages[1]
    assert ckpt.open(url).steps() == []
