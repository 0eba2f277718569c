"""Measures how long work takes on a CUDA device, without waiting for the device.

Launching work returns at once, and waiting for the device would also wait for earlier collectives. So an event is recorded on
the stream before and after the work, and their distance is read when both have passed.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MAX_PENDING = 64
"""How many results of a device may be outstanding; with more, the oldest is waited for."""


@dataclass(frozen=True, slots=True)
class TimedWork:
    """The events before and after some work on one stream."""

    stream: torch.cuda.Stream
    began: torch.cuda.Event
    ended: torch.cuda.Event


_pending: deque[TimedWork] = deque()
"""Work that has ended for the host but perhaps not on the device, the oldest first. It is used by the thread that trains."""


def is_recording_graph() -> bool:
    """Return whether torch records what this stream gets in a CUDA graph, instead of running it."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and cuda.is_initialized() and cuda.is_current_stream_capturing()


def begin() -> TimedWork | None:
    """Start timing before the work. Return None if torch uses no CUDA device, or records a graph, which runs nothing."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized() or is_recording_graph():
        return None
    span = TimedWork(cuda.current_stream(), cuda.Event(enable_timing=True), cuda.Event(enable_timing=True))
    span.began.record(span.stream)
    return span


def end(span: TimedWork) -> int:
    """Stop timing after the work. Return the nanoseconds of all timed work that has finished since the last call."""
    span.ended.record(span.stream)
    _pending.append(span)
    found = 0.0
    while _pending and (len(_pending) > MAX_PENDING or _pending[0].ended.query()):
        first = _pending.popleft()
        first.ended.synchronize()
        found += first.began.elapsed_time(first.ended)  # milliseconds
    return round(1e6 * found)
