"""`LoopWatch`, which finds out whether the loop of an agent hangs, so that no thread reports the agent as alive."""

from __future__ import annotations

import threading

from ckpt.recovery.run_log.agent_reports import pause_seconds

HUNG_SECONDS = 90.0
"""A loop without a tick for this long hangs. The longest step of a working loop is the wait for the end of a killed rank, which
fails after 60 s; before that it may write stacks for some seconds."""


class LoopWatch:
    """The time since the last tick of a loop. The main thread ticks, and one other thread checks it about twice a second.

    now: the time by CLOCK_MONOTONIC.
    """

    def __init__(self, now: float) -> None:
        self._lock = threading.Lock()
        """Guards the times and `_is_ended`."""
        self._ticked_at = self._checked_at = now
        self._is_ended = False

    def tick(self, now: float) -> None:
        """Note that the loop runs."""
        with self._lock:
            self._ticked_at = now

    def end(self) -> None:
        """Stop to watch: from now on the loop may take any time."""
        with self._lock:
            self._is_ended = True

    def hung_seconds(self, now: float) -> float:
        """Return how long the loop hangs; 0 if it does not.

        Of the time between two calls, at most UNOBSERVED_SECONDS count: in a longer gap the whole process was stopped.
        """
        with self._lock:
            self._ticked_at += pause_seconds(now - self._checked_at)
            self._checked_at = now
            silent = now - self._ticked_at
            return silent if silent > HUNG_SECONDS and not self._is_ended else 0.0
