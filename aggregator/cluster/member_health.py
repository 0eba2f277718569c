"""Which members are down: those that did not answer lately get no calls until a probe in the background is answered."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ckpt.storage.base.threads import try_start

log = logging.getLogger("ckpt")

_PROBE_SECONDS = 60.0
"""The pause after a probe was started; longer than a probe takes."""

WARNING_INTERVAL_SECONDS = 60.0
"""A warning about a member that fails now and then, or about too few members, is logged at most once in this time."""


class MemberHealth:
    """Which members are down: they did not answer lately, and get no calls if others can answer.

    A member is down until it answers a probe, which runs in the background. Without a probe it is down for a pause, which is
    longer after each failure. Safe to use from many threads.
    """

    def __init__(
        self, first_pause_seconds: float = 0.5, max_pause_seconds: float = 15.0, probe: Callable[[str], object] | None = None
    ) -> None:
        self._first_pause_seconds = first_pause_seconds
        self._max_pause_seconds = max_pause_seconds
        self._probe = probe
        self._lock = threading.Lock()
        """Guards `_next_warnings_at` and `_warned`. Guards changes of `_backoffs`."""
        self._backoffs: dict[str, tuple[float, int]] = {}  # when the pause of each ends, and its failures in a row
        self._next_warnings_at: dict[str, float] = {}
        self._warned: set[str] = set()
        """The members that are down and that a warning has named."""

    def record_failure(self, name: str, reason: object) -> None:
        """Note that a member did not answer, or answered with an error."""
        now = time.monotonic()
        with self._lock:
            until, _ = self._backoffs.get(name, (0.0, 0))
            if now < until:  # this call began before the first failure was noted
                return
            self._back_off(name)
            should_warn = name not in self._warned and now >= self._next_warnings_at.get(name, now)
            if should_warn:
                self._warned.add(name)
                self._next_warnings_at[name] = now + WARNING_INTERVAL_SECONDS
        if should_warn:
            log.warning(
                "%s gets no calls until it answers (%s); start it, or if it is lost run `ckpt-node admin forget`",
                name, reason,
            )  # fmt: skip

    def _back_off(self, name: str) -> None:
        """Begin a pause for a member, twice as long as the last one. Needs `_lock`."""
        _, failures = self._backoffs.get(name, (0.0, 0))
        pause = min(self._max_pause_seconds, self._first_pause_seconds * 2**failures)
        self._backoffs[name] = (time.monotonic() + pause, failures + 1)

    def record_answer(self, name: str) -> None:
        """Note that a member answered."""
        if self._backoffs:
            with self._lock:
                self._backoffs.pop(name, None)
                self._warned.discard(name)

    def is_down(self, name: str) -> bool:
        """Return whether a member is down. Starts a probe where its pause is over."""
        backoff = self._backoffs.get(name)
        if backoff is None:
            return False
        if time.monotonic() < backoff[0]:
            return True
        if self._probe is None:
            return False
        with self._lock:
            backoff = self._backoffs.get(name)
            if backoff is None or time.monotonic() < backoff[0]:
                return backoff is not None
            self._backoffs[name] = (time.monotonic() + _PROBE_SECONDS, backoff[1])  # one probe at a time
        thread = threading.Thread(target=self._run_probe, args=(name, self._probe), name="ckpt-probe", daemon=True)
        if not try_start(thread):
            with self._lock:
                self._back_off(name)
        return True

    def _run_probe(self, name: str, probe: Callable[[str], object]) -> None:
        try:
            probe(name)
        except Exception:  # also an OSError or a lack of memory: the next probe begins after the pause
            with self._lock:
                self._back_off(name)
        else:
            self.record_answer(name)
