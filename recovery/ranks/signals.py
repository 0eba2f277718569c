"""`Signals`, which records requests to end this process, so that they interrupt neither setup nor cleanup."""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The signals that ask a process to end."""


class Signals:
    """The end signals that have arrived so far."""

    def __init__(self) -> None:
        self.first = 0
        """The number of the first signal; 0 none."""
        self.first_at = 0.0
        """When it arrived, by `time.monotonic`."""
        self.count = 0
        """How many have arrived. A SIGHUP after another one counts as the same request: if a terminal is closed, its shell and
        the kernel each send one, and systemd may send one right after SIGTERM."""

    @contextmanager
    def installed(self, select: selectors.BaseSelector) -> Iterator[None]:
        """Record signals within this context, and make `select` return when one arrives (`key.data` is this object).

        Use it from the main thread. Settings that the parent of this process has left are undone: a blocked signal would never
        arrive, and the kernel keeps no exit status of a child if SIGCHLD is ignored.
        """
        wake, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        wake.setblocking(False)
        select.register(self._wakeup, selectors.EVENT_READ, self)
        # A signal that is ignored, as SIGHUP under nohup, stays ignored.
        handled = [number for number in END_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        previous = {number: signal.signal(number, self._record) for number in handled}
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
        wakeup = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            for number, handler in previous.items():  # after a first signal, further ones do not interrupt the end
                signal.signal(number, handler if not self.first or number == signal.SIGCHLD else signal.SIG_IGN)
            wake.close()
            self._wakeup.close()

    def clear_wakeup(self) -> None:
        """Consume the wake-up after `select` has returned for it, so that `select` waits again."""
        self._wakeup.recv(4096)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.first and number == signal.SIGHUP:
            return
        self.count += 1
        if not self.first:
            self.first, self.first_at = number, time.monotonic()
