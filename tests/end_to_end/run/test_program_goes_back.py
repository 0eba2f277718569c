"""A program under ckpt-run restores an older step by its number: its next saves are the newest, for ckpt-run, too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import os, sys
from pathlib import Path
import numpy as np
import ckpt

folder, how = Path(sys.argv[1]), sys.argv[2]
attempt = int(os.environ["CKPT_ATTEMPT"])

def steps(ck, state, first, last):
    for step in range(first, last + 1):
        state["w"][...] = step
        ck.step(step, state)
    ck.wait()

with ckpt.Checkpointer(folder / "repo", every=1, keep=50) as ck:
    state = {"w": np.zeros(3)}
    name = 5 if how == "each attempt" and attempt or how == "next attempt" and attempt == 1 else None
    state, start = ck.restore(state, step=name)
    with (folder / "begun").open("a") as file:
        file.write(f"{start} {state['w'][0]:g}\\n")
    if attempt == 0:
        steps(ck, state, start, 12)
        if how == "same process":
            state, start = ck.restore(state, step=5)
            steps(ck, state, start, 8)
        os._exit(3)
    if name is not None:
        steps(ck, state, start, 8)
        os._exit(3)
    steps(ck, state, start, 15)
"""


def run(folder: Path, how: str) -> tuple[int, list[dict[str, Any]]]:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    ckpt_run, run_dir = [sys.executable, "-m", "ckpt.tools.run"], ["--run-dir", str(folder / "run")]
    job = [*ckpt_run, "-n", "1", "--cold", *run_dir, "--", sys.executable, str(program), str(folder), how]
    done = subprocess.run(job, capture_output=True, text=True, timeout=600, check=False)
    why = subprocess.run([*ckpt_run, "why", "--json", *run_dir], capture_output=True, text=True, check=True)
    return done.returncode, [json.loads(line) for line in why.stdout.splitlines()]


@pytest.mark.parametrize(
    ("how", "begun", "committed"), [("next attempt", ["0 0", "6 5", "9 8"], [12, 8]), ("same process", ["0 0", "9 8"], [8])]
)
def test_saves_after_going_back_are_the_newest(tmp_path: Path, how: str, begun: list[str], committed: list[int]) -> None:
    status, record = run(tmp_path, how)
    assert status == 0
    assert (tmp_path / "begun").read_text().splitlines() == begun
    assert [entry["facts"]["committed"] for entry in record if entry["kind"] == "failure"] == committed
    decisions = [entry["text"] for entry in record if entry["kind"] == "decision"]
    assert all(f"from the newest saved step ({step} or later)" in text for step, text in zip(committed, decisions, strict=True))


def test_going_back_to_the_same_step_at_each_start_is_no_progress(tmp_path: Path) -> None:
    status, record = run(tmp_path, "each attempt")
    assert status == 1
    assert "with no newer step saved" in record[-1]["text"], record[-1]["text"]
