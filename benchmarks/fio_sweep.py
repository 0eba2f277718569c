"""Measures fio on a device: {buffered, O_DIRECT} x {1, 4, 16} threads, 1 MiB at a time."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

THREADS = (1, 4, 16)


@dataclass(frozen=True, slots=True)
class FioRun:
    """One way to move the bytes of one file."""

    direction: Literal["read", "write"]
    is_direct: bool
    threads: int

    def __str__(self) -> str:
        return f"{'O_DIRECT' if self.is_direct else 'buffered'}, {self.threads} threads"


def sweep(direction: Literal["read", "write"], modes: tuple[bool, ...] = (False, True)) -> list[FioRun]:
    """Return all runs of a direction. modes: the values of `is_direct`."""
    return [FioRun(direction, is_direct, threads) for is_direct in modes for threads in THREADS]


def why_missing() -> str | None:
    """Return why fio can't run, or None."""
    return None if shutil.which("fio") else "fio is not installed: apt-get install fio"


def measure(run: FioRun, file: Path, mib: int, groups: list[str]) -> float:
    """Return the seconds of a run. A write ends with fsync; the page cache is not dropped before a read.

    mib: a multiple of 16. groups: files of control groups, which limit fio.
    """
    share = f"{mib // run.threads}M"
    command = [
        "fio", "--name=sweep", f"--filename={file}", f"--rw={run.direction}", f"--direct={int(run.is_direct)}", "--bs=1M",
        f"--size={share}", f"--offset_increment={share}", f"--numjobs={run.threads}", "--thread", "--group_reporting",
        "--ioengine=psync", "--end_fsync=1", "--invalidate=0", "--output-format=json",
    ]  # fmt: skip

    def join() -> None:
        for group in groups:
            Path(group).write_text("0")

    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=join, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {(done.stderr or done.stdout).strip()[-300:]}")
    found = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][run.direction]
    return (mib << 20) / found["bw_bytes"]
