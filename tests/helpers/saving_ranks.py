"""Ranks as processes that run programs/saving_rank.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helpers.folders import PROGRAMS, TESTS

PROGRAM = PROGRAMS / "saving_rank.py"
SIZE = 3


def start(size: int, what: str, url: Path, **options: Any) -> list[subprocess.Popen[str]]:
    """Start the ranks as plain processes with RANK and WORLD_SIZE: they share only the store."""
    command = [sys.executable, str(PROGRAM), what, str(url), json.dumps(options)]
    pipe = subprocess.PIPE
    return [
        subprocess.Popen(
            command, env=clean() | {"RANK": str(rank), "WORLD_SIZE": str(size)}, stdout=pipe, stderr=pipe, text=True
        )
        for rank in range(size)
    ]


def clean() -> dict[str, str]:
    """Return the environment without the variables of a launcher."""
    return {k: v for k, v in os.environ.items() if not re.match(r"RANK|WORLD_SIZE|OMPI_|PMI|SLURM_|TORCHELASTIC", k)} | {
        "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1",
    }  # fmt: skip


def results_of(ranks: list[subprocess.Popen[str]]) -> list[tuple[int, list[dict[str, Any]], str]]:
    """Return exit status, printed results and errors of each rank."""
    found = []
    for process in ranks:
        out, err = process.communicate(timeout=600)
        found.append((process.returncode, [json.loads(line) for line in out.splitlines() if line.startswith("{")], err))
    return found


def run(command: Sequence[str]) -> list[dict[str, Any]]:
    """Return what the ranks of a launcher print, by rank."""
    done = subprocess.run(command, env=clean(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stderr[:6000]}\n…\n{done.stderr[-3000:]}"
    next_lines = [json.loads(line) for line in re.findall(r"\{.*?\}", done.stdout)]
    return sorted((line for line in next_lines if "rank" in line), key=lambda line: int(line["rank"]))


def next_lines(ranks: Sequence[subprocess.Popen[str]]) -> list[str]:
    """Return the next line of each rank."""
    return [rank.stdout.readline().rstrip() for rank in ranks if rank.stdout is not None]
