"""`FollowedLog`, the run log as this agent has read it so far."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ckpt.recovery.run_log.base import Draft, LogEntry, RunLog
from ckpt.recovery.run_log.run_state import RunState

_READ_SECONDS = 0.1
"""How often the log is read if other agents write it."""


class FollowedLog:
    """Reads new entries and appends after them. The main thread owns it; other threads may read `entries`."""

    def __init__(self, run_log: RunLog) -> None:
        self.run_log = run_log
        self.run_state = RunState()
        """The state of the run after the last entry that was read."""
        self.entries: tuple[LogEntry, ...] = ()
        """All entries that were read. The tuple is replaced, never changed, so that other threads can read it."""
        self._read_at = 0.0

    def read(self) -> list[LogEntry]:
        """Read the new entries, apply them and return them."""
        entries = self.run_log.entries(self.run_state.number)
        self._read_at = time.monotonic()
        self.run_state = self.run_state.apply_entries(entries)
        self.entries += tuple(entries)
        return entries

    def was_read_just_now(self) -> bool:
        """Return whether the log was read so recently that it need not be read again if others write it."""
        return time.monotonic() - self._read_at < _READ_SECONDS

    def append(self, drafts: Sequence[Draft]) -> bool:
        """Append entries after the last one that was read. Return False if another agent has appended some."""
        return self.run_log.append(self.run_state.number, drafts)
