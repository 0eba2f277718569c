"""Where the time went: every second of a run has one name, and their sum is the wall time.

A file of lines, one for each stretch of time. The last one is under way and is written again in its place, so that what a
run leaves when it is killed is right up to a moment before.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

log = logging.getLogger("ckpt.run")

Name = Literal["useful", "redo", "stall", "restore", "spawn", "detect", "stop", "decide", "wait"]
NAMES: tuple[Name, ...] = get_args(Name)

FILE = "ledger.jsonl"

_WRITE_SECONDS = 0.5
_STARTING_SECONDS = 10.0
"""Longer than Python takes to start. A shell that has become this process (`exec ckpt-run …`) may be hours old."""


@dataclass(frozen=True, slots=True)
class Line:
    """A stretch of time that was spent on one thing."""

    at: float
    """Its end, in seconds since 1970."""
    name: Name
    seconds: float
    attempt: int
    step: int = -1
    """The newest that all ranks had done at its end; -1 none, or nobody said."""
    committed: int = -1
    """The newest committed step, likewise."""

    @property
    def began(self) -> float:
        return self.at - self.seconds


class Ledger:
    """Accounts for the time since `began`, by CLOCK_MONOTONIC; by default since this process was started.

    A disk that is full stops nothing: what could not be written is kept, and written as soon as that goes.
    """

    def __init__(self, folder: Path, began: float | None = None) -> None:
        self._file = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._place = os.lseek(self._file, 0, os.SEEK_END)
        # A line that a crash has cut off is left alone: the next one begins behind it.
        cut = self._place > 0 and os.pread(self._file, 1, self._place - 1) != b"\n"
        self._ended = b"\n" if cut else b""  # lines that are complete and not on the disk yet
        self._failed = False
        # One offset for the whole run: its lines follow each other without a gap, whatever is done to the clock.
        self._clock = time.time() - time.monotonic()
        self._began = self._until = process_began() if began is None else began
        self._written = self._until
        self._name: Name = "spawn"
        self._attempt = 0
        self._step = self._committed = -1

    def now(self, name: Name, attempt: int, step: int = -1, committed: int = -1) -> None:
        """The time since the last call was spent on this. step, committed: how far the job is now, where that is known."""
        moment = time.monotonic()
        if (name, attempt) != (self._name, self._attempt):
            self._end_line(self._until)
            self._name, self._attempt = name, attempt
        self._until, self._step, self._committed = moment, step, committed
        if moment - self._written >= _WRITE_SECONDS:
            self._write()

    def instead(self, name: Name, seconds: float) -> None:
        """The last so many seconds, as far as they are in the line under way, were spent on this."""
        self._end_line(max(self._began, self._until - max(0.0, seconds)))
        self._name = name

    def _end_line(self, moment: float) -> None:
        """The line under way ends here, and the next one begins."""
        self._ended += self._line(moment)
        self._began = moment

    def _line(self, until: float) -> bytes:
        seconds = round(until - self._began, 6)
        if seconds <= 0:
            return b""
        line: dict[str, object] = {
            "at": round(until + self._clock, 6), "name": self._name, "seconds": seconds, "attempt": self._attempt,
        }  # fmt: skip
        line |= {key: step for key, step in (("step", self._step), ("committed", self._committed)) if step >= 0}
        return json.dumps(line).encode() + b"\n"

    def _write(self) -> None:
        self._written = time.monotonic()
        data = self._ended + self._line(self._until)
        try:
            if os.pwrite(self._file, data, self._place) == len(data):
                os.ftruncate(self._file, self._place + len(data))
                self._place += len(self._ended)
                self._ended, self._failed = b"", False
        except OSError as error:
            if not self._failed:
                log.warning("%s can't be written: %s; it is tried again and again", FILE, error.strerror)
            self._failed = True

    def close(self) -> None:
        """With the time until now."""
        self.now(self._name, self._attempt, self._step, self._committed)
        self._write()
        os.close(self._file)


def process_began() -> float:
    """When this process was started, by CLOCK_MONOTONIC, and never earlier; now, where that can't be known (not Linux)."""
    now = time.monotonic()
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])  # proc(5): starttime, cut to whole ticks
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - (ticks + 1) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return now
    return now - age if 0 <= age <= _STARTING_SECONDS else now


def lines(folder: Path) -> list[Line]:
    """All that is in a folder, in order. What a crash has cut off is left out."""
    found = []
    try:
        with (folder / FILE).open() as file:
            for text in file:
                try:
                    line = Line(**json.loads(text))
                except (ValueError, TypeError):
                    continue
                if line.name in NAMES:
                    found.append(line)
    except FileNotFoundError:
        pass
    return found


def totals(folder: Path) -> Mapping[str, float]:
    """Seconds by name."""
    found: dict[str, float] = defaultdict(float)
    for line in lines(folder):
        found[line.name] += line.seconds
    return found


def goodput(seconds: Mapping[str, float]) -> float:
    """The share of the time that was useful work, 0 to 1."""
    total = sum(seconds.values())
    return seconds.get("useful", 0.0) / total if total else 0.0
