"""Describes how a rank has ended, by its status and the last line of its log."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from ckpt.recovery.ranks.rank_process import RankProcess

_LAST_LINE_CHARACTERS = 400
"""The most characters of the last line of a log. In it, long folder names may precede the reason."""

_MPIEXEC_NOISE = ("This typically refers to a problem with your application.", "Please see the FAQ page", "====")
"""The beginnings of the last lines that MPICH's mpiexec writes about a failed rank."""


def describe_end(rank: RankProcess) -> str:
    """Return a text: how a rank has ended, with the last line of its log."""
    code = rank.status
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"
    line = last_line(rank)
    return f"exited with status {code} ({line})" if line else f"exited with status {code}"


def last_line(rank: RankProcess) -> str:
    """Return the last line that a rank has written to its log, and that is not empty and not noise of mpiexec."""
    text = _read_tail(rank.log, rank.log_begin)
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(_MPIEXEC_NOISE)]
    return lines[-1][:_LAST_LINE_CHARACTERS] if lines else ""


def _read_tail(path: Path, begin: int, nbytes: int = 4096) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(begin, file.seek(0, os.SEEK_END) - nbytes))
        return file.read().decode("utf-8", "replace")
    return ""
