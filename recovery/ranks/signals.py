"""Signals that ask this process to end. They are noted and interrupt nothing: neither what makes something, nor what clears
it away."""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Signals:
    """What came so far."""

    def __init__(self) -> None:
        self.first = 0
        """Its number; 0: none came."""
        self.first_at = 0.0
        """Of `time.monotonic`."""
        self.count = 0

    @contextmanager
    def installed(self, select: selectors.BaseSelector) -> Iterator[None]:
        """From the main thread: signals are noted, and `select` returns when one comes (`key.data` is this)."""
        wake, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        wake.setblocking(False)
        select.register(self._wakeup, selectors.EVENT_READ, self)
        handled = [number for number in _END_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # as nohup has it
        previous = {number: signal.signal(number, self._record) for number in handled}
        wakeup = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in previous.items():  # who asks again while it ends changes nothing
                signal.signal(number, handler if not self.first else signal.SIG_IGN)
            wake.close()
            self._wakeup.close()

    def clear_wakeup(self) -> None:
        """After `select` has returned for them: it waits again."""
        self._wakeup.recv(4096)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if not self.first:
            self.first, self.first_at = number, time.monotonic()
