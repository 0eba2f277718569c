"""Where the time went: every second of a run has one name, and their sum is the wall time."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

Name = Literal["useful", "redo", "stall", "restore", "spawn", "detect", "stop", "decide", "wait"]
NAMES: tuple[Name, ...] = ("useful", "redo", "stall", "restore", "spawn", "detect", "stop", "decide", "wait")

FILE = "ledger.jsonl"


class Ledger:
    """Accounts for the time since it was made, as lines in a file: {"at", "name", "seconds", "attempt"}."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / FILE).open("a", buffering=1)
        self._since = time.monotonic()
        self._name: Name = "spawn"
        self._seconds = 0.0
        self._attempt = 0

    def now(self, name: Name, attempt: int) -> None:
        """The time since the last call was spent on this."""
        moment = time.monotonic()
        elapsed, self._since = moment - self._since, moment
        if (name, attempt) != (self._name, self._attempt):
            self._write()
            self._name, self._attempt = name, attempt
        self._seconds += elapsed

    def instead(self, name: Name, seconds: float) -> None:
        """The last so many seconds, as far as they are in the line under way, were spent on this."""
        taken = min(max(0.0, seconds), self._seconds)
        self._seconds -= taken
        self._write()
        self._name, self._seconds = name, taken

    def _write(self) -> None:
        if self._seconds > 0:
            at, seconds = round(time.time(), 3), round(self._seconds, 6)
            line = {"at": at, "name": self._name, "seconds": seconds, "attempt": self._attempt}
            self._file.write(json.dumps(line) + "\n")
        self._seconds = 0.0

    def close(self) -> None:
        self._write()
        self._file.close()


def totals(folder: Path) -> Mapping[str, float]:
    """Seconds by name."""
    found: dict[str, float] = defaultdict(float)
    try:
        with (folder / FILE).open() as file:
            for line in file:
                try:
                    entry = json.loads(line)
                    found[str(entry["name"])] += float(entry["seconds"])
                except (ValueError, KeyError, TypeError):
                    continue  # cut off by a crash
    except FileNotFoundError:
        pass
    return found
