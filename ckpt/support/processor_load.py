"""How busy the processors of this host are, from the counters of Linux."""

from __future__ import annotations

import os
from dataclasses import dataclass

_STAT = "/proc/stat"


@dataclass(frozen=True, slots=True)
class ProcessorLoad:
    """The average numbers of idle and of busy processors over some time."""

    idle: float
    busy: float


@dataclass(frozen=True, slots=True)
class ProcessorTimes:
    """Processor time of this host since it started, in clock ticks."""

    idle: int
    """Ticks in which a processor was idle or waited for a device."""
    total: int
    processors: int

    def load_since(self, earlier: ProcessorTimes) -> ProcessorLoad | None:
        """Return the load since an earlier reading; None if less than a tenth of a second has passed."""
        total = self.total - earlier.total
        if total < 10 * self.processors:
            return None
        idle = min(1.0, max(0.0, (self.idle - earlier.idle) / total))
        return ProcessorLoad(self.processors * idle, self.processors * (1 - idle))


def read_processor_times() -> ProcessorTimes | None:
    """Return the processor times of this host, None if the system does not have them."""
    try:
        with open(_STAT, encoding="ascii") as file:
            return parse_processor_times(file.readline(), os.cpu_count() or 1)
    except (OSError, ValueError):
        return None


def parse_processor_times(line: str, processors: int) -> ProcessorTimes:
    """Return the times in the first line of /proc/stat (proc_stat(5)); raise ValueError for another line."""
    name, *fields = line.split() or [""]
    if name != "cpu" or len(fields) < 5:
        raise ValueError(f"not the first line of {_STAT}: {line[:80]!r}")
    ticks = [int(field) for field in fields[:8]]  # guest time, which follows, is part of the user time
    return ProcessorTimes(ticks[3] + ticks[4], sum(ticks), processors)
