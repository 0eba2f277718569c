"""The log of the run as this agent has read it so far."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ckpt.recovery.run_log.base import Draft, LogEntry, RunLog
from ckpt.recovery.run_log.run_state import RunState

_READ_SECONDS = 0.1
"""How often the log is read, where others write it."""


class FollowedLog:
    """Reads on where it stopped, and appends there. The main thread owns it; other threads may read `entries`."""

    def __init__(self, state: RunLog) -> None:
        self.state = state
        self.run_state = RunState()
        """After the last entry that was read."""
        self.entries: tuple[LogEntry, ...] = ()
        """All that were read. Replaced, never changed, so that other threads can read it."""
        self._read_at = 0.0

    def read(self) -> list[LogEntry]:
        """The entries that were written since."""
        entries = self.state.entries(self.run_state.number)
        self._read_at = time.monotonic()
        self.run_state = self.run_state.apply_entries(entries)
        self.entries += tuple(entries)
        return entries

    def was_read_just_now(self) -> bool:
        """Whether it need not be read again, where others write it."""
        return time.monotonic() - self._read_at < _READ_SECONDS

    def append(self, drafts: Sequence[Draft]) -> bool:
        """Add entries behind the last one that was read; False where somebody else has added some."""
        return self.state.append(self.run_state.number, drafts)
