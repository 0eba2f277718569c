"""Where the time went: every second of a run has one name, and their sum is the wall time.

A file of lines, one for each stretch of time. The newest ones are written again in their place, so that what a run leaves when
it is killed is right up to a moment before, and what is noticed late can still change their names. On several hosts each agent
that leads has a file of its own: one that stood still, and does not know yet that another leads, spoils none but its own.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from ckpt.storage.base.checked_decode import Malformed, decode, read_json

log = logging.getLogger("ckpt.run")

TimeCategory = Literal["useful", "redo", "stall", "restore", "spawn", "detect", "stop", "decide", "wait"]
TIME_CATEGORIES: tuple[TimeCategory, ...] = get_args(TimeCategory)

LEDGER_FILE = "ledger.jsonl"
"""Of a run on one host."""

_LEDGER_GLOB = "ledger*.jsonl"
_WRITE_SECONDS = 0.5
_SPAN_SECONDS, _SPAN_SHARE = 1.0, 0.01
"""A line in which the job goes on ends when it is longer than both this and this part of all time: it says how far that was."""
_SETTLE_SECONDS = 10.0
"""What ended longer ago keeps its name. A lost host is noticed sooner."""
_STARTING_SECONDS = 10.0
"""Longer than Python takes to start. A shell that has become this process (`exec ckpt-run …`) may be hours old."""


@dataclass(frozen=True, slots=True)
class LedgerSpan:
    """A stretch of time that was spent on one thing."""

    at: float
    """Its end, in seconds since 1970."""
    name: TimeCategory
    seconds: float
    attempt: int
    step: int = -1
    """The newest that all ranks had done at its end; -1 none, or nobody said."""
    committed: int = -1
    """The newest committed step, likewise."""
    since: float = 0.0
    """From when on who wrote it has accounted without a gap, in seconds since 1970."""

    @property
    def began(self) -> float:
        return self.at - self.seconds


def ledger_file_name(host: str) -> str:
    """The ledger of one host of several."""
    return f"ledger-{host}.jsonl"


class GoodputLedger:
    """Accounts in a file for the time since `began`, by CLOCK_MONOTONIC; by default since this process was started.

    A disk that is full stops nothing: what could not be written is kept, and written as soon as that goes.
    """

    def __init__(self, path: Path, began: float | None = None) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._settled_offset = os.lseek(self._file, 0, os.SEEK_END)
        # A line that a crash has cut off is left alone: the next one begins behind it.
        cut = self._settled_offset > 0 and os.pread(self._file, 1, self._settled_offset - 1) != b"\n"
        self._separator = b"\n" if cut else b""
        self._unsettled_spans: list[LedgerSpan] = []  # not on the disk for good yet, in order
        self._has_failed = False
        # One offset for the whole run: its lines follow each other without a gap, whatever is done to the clock.
        self._clock = time.time() - time.monotonic()
        self._first_began = self._began = self._until = self._written_at = process_start_time() if began is None else began
        self._since = round(self._began + self._clock, 6)
        self._name: TimeCategory = "spawn"
        self._attempt = 0
        self._step = self._committed = -1
        self._begin_step = -1  # the step at the beginning of the line under way

    def account(self, name: TimeCategory, attempt: int, step: int = -1, committed: int = -1) -> None:
        """The time since the last call was spent on this. step, committed: how far the job is now, where that is known."""
        moment = time.monotonic()
        longest = max(_SPAN_SECONDS, _SPAN_SHARE * (moment - self._first_began))
        goes_on = self._step > self._begin_step and self._until - self._began >= longest
        if goes_on or (name, attempt) != (self._name, self._attempt):
            self._end_span(self._until)
            self._name, self._attempt = name, attempt
        self._until, self._step, self._committed = moment, step, committed
        if moment - self._written_at >= _WRITE_SECONDS:
            self._write_spans()

    def relabel(self, name: TimeCategory, seconds: float) -> None:
        """The last so many seconds of this attempt were spent on this; beyond the line under way at most about ten."""
        moment = self._until - max(0.0, seconds)
        while self._began > moment and self._unsettled_spans and self._unsettled_spans[-1].attempt == self._attempt:
            line = self._unsettled_spans.pop()
            self._began = line.began - self._clock
            if self._began < moment:
                self._unsettled_spans.append(replace(line, at=moment + self._clock, seconds=moment - self._began))
                self._began = moment
        if self._began < moment:
            self._end_span(moment)
        self._name = name

    def _end_span(self, moment: float) -> None:
        """The line under way ends here, and the next one begins."""
        self._unsettled_spans.append(self._current_span(moment))
        self._began, self._begin_step = moment, self._step

    def _current_span(self, until: float) -> LedgerSpan:
        at, seconds = until + self._clock, until - self._began
        return LedgerSpan(at, self._name, seconds, self._attempt, self._step, self._committed, self._since)

    def _write_spans(self) -> None:
        self._written_at = time.monotonic()
        settled = sum(line.at - self._clock < self._until - _SETTLE_SECONDS for line in self._unsettled_spans)
        for_good = self._separator + b"".join(map(_encode_span, self._unsettled_spans[:settled]))
        data = for_good + b"".join(map(_encode_span, [*self._unsettled_spans[settled:], self._current_span(self._until)]))
        try:
            if os.pwrite(self._file, data, self._settled_offset) == len(data):
                os.ftruncate(self._file, self._settled_offset + len(data))
                self._settled_offset += len(for_good)
                self._separator, self._has_failed = b"", False
                del self._unsettled_spans[:settled]
        except OSError as error:
            if not self._has_failed:
                log.warning("%s can't be written: %s; it is tried again and again", self._path.name, error.strerror)
            self._has_failed = True

    def close(self, ended: bool = True) -> None:
        """With the time until now; where it is not `over`, and others account for that, up to the last call."""
        if ended:
            self.account(self._name, self._attempt, self._step, self._committed)
        self._write_spans()
        os.close(self._file)


def _encode_span(span: LedgerSpan) -> bytes:
    seconds = round(span.seconds, 6)
    if seconds <= 0:
        return b""
    said: dict[str, object] = {"at": round(span.at, 6), "name": span.name, "seconds": seconds, "attempt": span.attempt}
    said |= {key: step for key, step in (("step", span.step), ("committed", span.committed)) if step >= 0}
    return json.dumps(said | {"since": span.since}).encode() + b"\n"


def process_start_time() -> float:
    """When this process was started, by CLOCK_MONOTONIC, and never earlier; now, where that can't be known (not Linux)."""
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])  # proc(5): starttime, cut to whole ticks
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - (ticks + 1) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic()
    now = time.monotonic()  # last: whoever is kept waiting in between says too late a moment, not too early a one
    return now - age if 0 <= age <= _STARTING_SECONDS else now


def read_ledgers(folder: Path) -> list[LedgerSpan]:
    """All that is in a folder, in order. What a crash has cut off is left out."""
    return merge_ledgers([read_ledger_file(path) for path in sorted(folder.glob(_LEDGER_GLOB))])


def read_ledger_file(path: Path) -> list[LedgerSpan]:
    """Those of one file; none where it is not there."""
    found = []
    try:
        with path.open("rb") as file:
            for text in file:
                try:
                    found.append(decode(LedgerSpan, read_json(text)))
                except Malformed:
                    continue
    except FileNotFoundError:
        pass
    return found


def merge_ledgers(ledgers: Sequence[Sequence[LedgerSpan]]) -> list[LedgerSpan]:
    """Those of agents that led one after the other. Pure.

    One that stood still accounts on until it learns that another leads: from when that one accounts, it is right.
    """
    if len(ledgers) == 1:
        return list(ledgers[0])
    terms = sorted({(line.since, number) for number, ledger in enumerate(ledgers) for line in ledger})
    until = {
        (since, number): next((other for other, whose in terms[i + 1 :] if whose != number), math.inf)
        for i, (since, number) in enumerate(terms)
    }
    found = []
    for number, ledger in enumerate(ledgers):
        for line in ledger:
            end = min(line.at, until[line.since, number])
            if (seconds := round(end - line.began, 6)) > 0:
                found.append(replace(line, at=end, seconds=seconds))
    return sorted(found, key=lambda line: line.at)


def total_seconds_by_category(folder: Path) -> Mapping[str, float]:
    """Seconds by name."""
    found: dict[str, float] = defaultdict(float)
    for line in read_ledgers(folder):
        found[line.name] += line.seconds
    return found


def goodput(seconds: Mapping[str, float]) -> float:
    """The share of the time that was useful work, 0 to 1."""
    total = sum(seconds.values())
    return seconds.get("useful", 0.0) / total if total else 0.0
