"""How long work takes on a CUDA device, found without waiting for it: events before and after it, read when they have passed.

A rank that hands work to a device is done with it at once, and one that waits for the device waits for collectives before it,
too. The events are passed in the order of the stream: the first when all before it is done, the second after the work between.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass
from typing import Any

_MAX_PENDING = 64
"""So many may be on their way; then the oldest is waited for."""


@dataclass(frozen=True, slots=True)
class TimedWork:
    """Work on one stream."""

    stream: Any
    began: Any
    ended: Any


_pending: deque[TimedWork] = deque()


def begin() -> TimedWork | None:
    """To be called before the work; None where torch uses no CUDA device, or records a graph, in which no time passes."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized() or cuda.is_current_stream_capturing():
        return None
    span = TimedWork(cuda.current_stream(), cuda.Event(enable_timing=True), cuda.Event(enable_timing=True))
    span.began.record(span.stream)
    return span


def end(span: TimedWork) -> int:
    """To be called after it. Nanoseconds of all spans that have ended since the last call."""
    span.ended.record(span.stream)
    _pending.append(span)
    found = 0.0
    while _pending and (len(_pending) > _MAX_PENDING or _pending[0].ended.query()):
        first = _pending.popleft()
        first.ended.synchronize()
        found += first.began.elapsed_time(first.ended)  # milliseconds
    return round(1e6 * found)
