"""The training of the demo, small: killed during saves, it continues with the same losses, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.folders import EXAMPLES

import ckpt

pytest.importorskip("torch")


TRAIN = EXAMPLES / "train.py"
SMALL = ["--steps=15", "--every=3", "--width=32", "--layers=1", "--context=16", "--batch=4"]


def train(folder: Path, failpoints: str = "") -> tuple[int, list[dict[str, object]]]:
    """Run train.py; return how it ended and what it logged."""
    log = folder.with_suffix(".jsonl")
    logged = len(log.read_text().splitlines()) if log.exists() else 0
    environment = os.environ | {"CKPT_FAILPOINTS": failpoints}
    command = [sys.executable, str(TRAIN), str(folder), "--log", str(log), *SMALL]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, [json.loads(line) for line in log.read_text().splitlines()[logged:]]


def test_a_killed_training_continues_with_the_same_losses(tmp_path):
    ended, reference = train(tmp_path / "undisturbed")
    assert ended == 0
    assert [line["step"] for line in reference] == list(range(15))

    killed = tmp_path / "killed"
    runs = [
        train(killed, "save.pack=kill@3"),  # killed in step 8, whose pack is still a temporary file
        train(killed, "save.commit=kill@2"),  # step 8 succeeds; killed in step 11, which has all but its commit record
        train(killed),
    ]
    assert [ended for ended, _ in runs] == [-signal.SIGKILL, -signal.SIGKILL, 0]
    assert [lines[0]["step"] for _, lines in runs] == [0, 6, 9]
    assert runs[-1][1][-1]["step"] == 14
    for _, lines in runs:
        assert lines == reference[lines[0]["step"] : lines[-1]["step"] + 1]
    assert ckpt.open(killed).steps() == [8, 11, 14]


def test_the_training_script_of_the_demo_uses_few_lines_of_ckpt():
    code = TRAIN.read_text().partition('"""\n\n')[2]
    lines = [line for line in code.splitlines() if "ckpt" in line.split("#")[0] or "ck." in line]
    assert len(lines) < 10
