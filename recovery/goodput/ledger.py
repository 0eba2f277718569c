"""The goodput ledger: a file in which every second of a run has one category, so their sum is the wall time.

The file has one line for each span of time. The newest lines are rewritten in place, so that the ledger of a killed run is
right up to a moment before, and an event that is detected late can still change their category. With several hosts, each
agent that leads has a file of its own. So a leader that was stopped, and does not know that another leads, damages only its
own file.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt.recovery.goodput.time_category import TimeCategory
from ckpt.storage.base.checked_decode import Malformed, decode, read_json
from ckpt.storage.base.fd_io import describe_os_error

log = logging.getLogger("ckpt.run")

LEDGER_FILE = "ledger.jsonl"
"""The name of the ledger file of a run on one host."""

_LEDGER_GLOB = "ledger*.jsonl"
_WRITE_SECONDS = 0.5
_SPAN_SECONDS, _SPAN_SHARE = 1.0, 0.01
"""A span in which the job makes steps ends when it is longer than both these seconds and this share of the wall time, so that
the ledger records the progress."""
_FINAL_AFTER_SECONDS = 10.0
"""A span that ended longer ago keeps its category. A lost host is detected sooner."""
_STARTING_SECONDS = 10.0
"""Longer than Python takes to start. A shell that has become this process (`exec ckpt-run …`) may be hours old."""


@dataclass(frozen=True, slots=True)
class LedgerSpan:
    """A span of time that was spent on one category."""

    at: float
    """Its end, in seconds since 1970."""
    name: TimeCategory
    seconds: float
    attempt: int
    step: int = -1
    """The newest step that all ranks had done at its end; -1 none or unknown."""
    committed: int = -1
    """The newest committed step at its end; -1 none or unknown."""
    since: float = 0.0
    """Since when its writer has accounted without a gap, in seconds since 1970."""

    @property
    def began(self) -> float:
        """Its beginning, in seconds since 1970."""
        return self.at - self.seconds


def ledger_file_name(host: str) -> str:
    """Return the name of the ledger file of one of several hosts."""
    return f"ledger-{host}.jsonl"


class GoodputLedger:
    """Writes the ledger file of one agent.

    While the file can't be opened or written (a full disk, a read-only file system), spans are kept in memory. They are
    written as soon as that is possible.

    began: the beginning of the first span, by CLOCK_MONOTONIC; by default the start of this process.
    """

    def __init__(self, path: Path, began: float | None = None) -> None:
        self._path = path
        self._file: int | None = None  # opened by the first write
        self._final_offset, self._separator = 0, b""
        self._recent_spans: list[LedgerSpan] = []  # spans that may still change, in order
        self._has_failed = False
        # One clock offset for the whole run, so that the lines follow each other without a gap even if the clock is set.
        self._clock = time.time() - time.monotonic()
        self._first_began = self._began = self._until = self._written_at = process_start_time() if began is None else began
        self._since = round(self._began + self._clock, 6)
        self._name: TimeCategory = "spawn"
        self._attempt = 0
        self._step = self._committed = -1
        self._begin_step = -1  # the step at the beginning of the current span

    def account(self, name: TimeCategory, attempt: int, step: int = -1, committed: int = -1) -> None:
        """Account the time since the last call to a category.

        step, committed: the newest step that all ranks have done, and the newest committed step; -1 none or unknown.
        """
        now = time.monotonic()
        longest = max(_SPAN_SECONDS, _SPAN_SHARE * (now - self._first_began))
        is_long_enough = self._step > self._begin_step and self._until - self._began >= longest
        if is_long_enough or (name, attempt) != (self._name, self._attempt):
            self._end_span(self._until)
            self._name, self._attempt = name, attempt
        self._until, self._step, self._committed = now, step, committed
        if now - self._written_at >= _WRITE_SECONDS:
            self._write_spans()

    def relabel(self, name: TimeCategory, seconds: float) -> None:
        """Give the last seconds of this attempt another category. Spans that ended more than about 10 s ago keep theirs."""
        moment = self._until - max(0.0, seconds)
        while self._began > moment and self._recent_spans and self._recent_spans[-1].attempt == self._attempt:
            span = self._recent_spans.pop()
            self._began = span.began - self._clock
            if self._began < moment:
                self._recent_spans.append(replace(span, at=moment + self._clock, seconds=moment - self._began))
                self._began = moment
        if self._began < moment:
            self._end_span(moment)
        self._name = name

    def _end_span(self, moment: float) -> None:
        """End the current span at this moment and begin the next one."""
        self._recent_spans.append(self._current_span(moment))
        self._began, self._begin_step = moment, self._step

    def _current_span(self, until: float) -> LedgerSpan:
        at, seconds = until + self._clock, until - self._began
        return LedgerSpan(at, self._name, seconds, self._attempt, self._step, self._committed, self._since)

    def _open(self) -> int:
        """Open the file unless it is open, and return its descriptor. Raises OSError."""
        if self._file is None:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                end = os.lseek(file, 0, os.SEEK_END)
                # A line that a crash has cut off is left as it is: the next one begins after it.
                is_cut_off = end > 0 and os.pread(file, 1, end - 1) != b"\n"
            except OSError:
                os.close(file)
                raise
            self._file, self._final_offset, self._separator = file, end, b"\n" if is_cut_off else b""
        return self._file

    def _write_spans(self) -> None:
        self._written_at = time.monotonic()
        try:
            self._write_to(self._open())
        except OSError as error:
            if not self._has_failed:
                log.warning(
                    "%s can't be written: %s; it is tried again every half second", self._path.name, describe_os_error(error)
                )
            self._has_failed = True

    def _write_to(self, file: int) -> None:
        final = sum(span.at - self._clock < self._until - _FINAL_AFTER_SECONDS for span in self._recent_spans)
        final_data = self._separator + b"".join(map(_encode_span, self._recent_spans[:final]))
        data = final_data + b"".join(map(_encode_span, [*self._recent_spans[final:], self._current_span(self._until)]))
        if os.pwrite(file, data, self._final_offset) == len(data):
            os.ftruncate(file, self._final_offset + len(data))
            self._final_offset += len(final_data)
            self._separator, self._has_failed = b"", False
            del self._recent_spans[:final]

    def close(self, ended: bool = True) -> None:
        """Write the last spans and close the file.

        ended: whether the run has ended, so that the time until now counts. Otherwise another agent accounts for it.
        """
        if ended:
            self.account(self._name, self._attempt, self._step, self._committed)
        self._write_spans()
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full network file system may report only now that lines are missing
                os.close(self._file)


def _encode_span(span: LedgerSpan) -> bytes:
    seconds = round(span.seconds, 6)
    if seconds <= 0:
        return b""
    fields: dict[str, object] = {"at": round(span.at, 6), "name": span.name, "seconds": seconds, "attempt": span.attempt}
    fields |= {key: step for key, step in (("step", span.step), ("committed", span.committed)) if step >= 0}
    return json.dumps(fields | {"since": span.since}).encode() + b"\n"


def process_start_time() -> float:
    """Return when this process was started, by CLOCK_MONOTONIC, and never an earlier time.

    Returns the time now if the start is unknown, or longer ago than Python takes to start.
    """
    try:
        with open("/proc/self/stat", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])  # proc(5): starttime, rounded down to whole ticks
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - (ticks + 1) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic()
    now = time.monotonic()  # read last: if this process is delayed in between, the result is too late, not too early
    return now - age if 0 <= age <= _STARTING_SECONDS else now


def read_ledgers(folder: Path) -> list[LedgerSpan]:
    """Return the spans of all ledger files in a folder, in order. A line that a crash has cut off is left out.

    Raises OSError if the folder or a file can't be read. `Path.glob` would return no files then.
    """
    try:
        names = fnmatch.filter(os.listdir(folder), _LEDGER_GLOB)
    except FileNotFoundError:
        names = []
    return merge_ledgers([read_ledger_file(folder / name) for name in sorted(names)])


def read_ledger_file(path: Path) -> list[LedgerSpan]:
    """Return the spans of one ledger file; none if it does not exist."""
    spans = []
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    spans.append(decode(LedgerSpan, read_json(line)))
                except Malformed:
                    continue
    except FileNotFoundError:
        pass
    return spans


def merge_ledgers(ledgers: Sequence[Sequence[LedgerSpan]]) -> list[LedgerSpan]:
    """Return the spans of agents that led one after the other, without overlaps. Pure.

    An agent that was stopped continues to account until it learns that another one leads. So its spans end where those of
    the next leader begin.
    """
    if len(ledgers) == 1:
        return list(ledgers[0])
    terms = sorted({(span.since, number) for number, ledger in enumerate(ledgers) for span in ledger})
    term_ends = {
        (since, number): next((other for other, owner in terms[i + 1 :] if owner != number), math.inf)
        for i, (since, number) in enumerate(terms)
    }
    merged = []
    for number, ledger in enumerate(ledgers):
        for span in ledger:
            end = min(span.at, term_ends[span.since, number])
            if (seconds := round(end - span.began, 6)) > 0:
                merged.append(replace(span, at=end, seconds=seconds))
    return sorted(merged, key=lambda span: span.at)


def total_seconds_by_category(folder: Path) -> Mapping[str, float]:
    """Return the seconds of each category in the ledgers of a folder."""
    return seconds_by_category(read_ledgers(folder))


def seconds_by_category(spans: Iterable[LedgerSpan]) -> Mapping[str, float]:
    """Return the seconds of each category in these spans."""
    totals: dict[str, float] = defaultdict(float)
    for span in spans:
        totals[span.name] += span.seconds
    return totals


def goodput(seconds: Mapping[str, float]) -> float:
    """Return the useful share of the time, 0 to 1. seconds: the seconds of each category."""
    total = sum(seconds.values())
    return seconds.get("useful", 0.0) / total if total else 0.0
