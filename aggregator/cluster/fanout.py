"""Asking many members at once, without waiting for those that do not answer."""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import TypeVar

from ckpt.storage.base.errors import CkptError, StoreError, Unavailable
from ckpt.storage.base.store import Writer
from ckpt.storage.base.threads import DaemonThreadPool

log = logging.getLogger("ckpt")

T = TypeVar("T")

_SLOW_CALL_SECONDS = 1.0

_GRACE_SECONDS = 1.0
"""How long more answers are waited for that can be done without, or as long again as those took that are there."""

_PROBE_SECONDS = 60.0
"""Longer than a probe takes."""

_WARNING_INTERVAL_SECONDS = 60.0
"""Who fails now and then is not spoken of more often."""


class MemberHealth:
    """Which members answered lately. One that did not is left alone until it answers a probe, which nobody waits for; where
    there is no probe, for a while, longer each time."""

    def __init__(
        self, first_pause_seconds: float = 0.5, max_pause_seconds: float = 15.0, probe: Callable[[str], object] | None = None
    ) -> None:
        self._first_pause_seconds = first_pause_seconds
        self._max_pause_seconds = max_pause_seconds
        self._probe = probe
        self._lock = threading.Lock()
        self._backoffs: dict[str, tuple[float, int]] = {}
        self._next_warnings_at: dict[str, float] = {}

    def record_failure(self, name: str, reason: object) -> None:
        """A member did not answer, or not well."""
        now = time.monotonic()
        with self._lock:
            until, failures = self._backoffs.get(name, (0.0, 0))
            if now < until:  # of a call that began before the first failure was known
                return
            self._back_off(name)
            should_warn = not failures and now >= self._next_warnings_at.get(name, now)
            if should_warn:
                self._next_warnings_at[name] = now + _WARNING_INTERVAL_SECONDS
        if should_warn:
            log.warning(
                "%s is left alone until it answers (%s); if it is down start it, if it is lost `ckpt-node admin forget` it",
                name, reason,
            )  # fmt: skip

    def _back_off(self, name: str) -> None:
        """For a while, longer each time. Under the lock."""
        _, failures = self._backoffs.get(name, (0.0, 0))
        pause = min(self._max_pause_seconds, self._first_pause_seconds * 2**failures)
        self._backoffs[name] = (time.monotonic() + pause, failures + 1)

    def record_answer(self, name: str) -> None:
        """A member answered."""
        if self._backoffs:
            with self._lock:
                self._backoffs.pop(name, None)

    def is_down(self, name: str) -> bool:
        """Whether to leave a member alone now."""
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
        threading.Thread(target=self._run_probe, args=(name, self._probe), name="ckpt-probe", daemon=True).start()
        return True

    def _run_probe(self, name: str, probe: Callable[[str], object]) -> None:
        try:
            probe(name)
        except CkptError:
            with self._lock:
                self._back_off(name)
        else:
            self.record_answer(name)


class FanOut:
    """Threads for calls to members. A call that never returns holds one thread until its own deadline."""

    def __init__(self, health: MemberHealth, threads: int = 64) -> None:
        self.health = health
        self._pool = DaemonThreadPool(threads, "ckpt-member")
        self._max_calls_per_member = threads // 3
        self._lock = threading.Lock()
        self._running_calls: dict[str, dict[object, float]] = {}  # calls that a thread is in, and since when

    def submit(self, name: str, call: Callable[[], T]) -> Future[T]:
        """Start one call. One of a member that leaves too many unanswered fails at once: it may not take all threads."""
        with self._lock:
            running = self._running_calls.setdefault(name, {})
            slow_since = time.monotonic() - _SLOW_CALL_SECONDS
            if (
                len(running) >= self._max_calls_per_member
                and sum(began < slow_since for began in running.values()) >= self._max_calls_per_member
            ):
                failed: Future[T] = Future()
                failed.set_exception(Unavailable(f"{name} leaves {len(running)} calls unanswered"))
                return failed
        return self._pool.submit(contextvars.copy_context().run, self._run_call, name, call)

    def ask(
        self,
        calls: Mapping[str, Callable[[], T]],
        timeout_seconds: float,
        is_enough: Callable[[dict[str, T]], bool] = lambda _: False,
        *,
        is_acceptable: Callable[[dict[str, T]], bool] = lambda _: False,
        skip_failed: bool = False,
        mark_late: bool = True,
    ) -> tuple[dict[str, T], dict[str, StoreError]]:
        """Call all; return what they answered, and the errors, as soon as it is `enough`, or all are done, or time is over.

        The others go on by themselves. A member that has just failed is asked only if the rest are not enough, and not even
        then if they are to be spared: that answer can be done without. will_do: with these answers the rest are waited for a
        moment longer, and no more. blame: who has not answered in time is left alone for a while.
        """
        answers: dict[str, T] = {}
        errors: dict[str, StoreError] = {}
        recently_failed = {name: call for name, call in calls.items() if self.health.is_down(name)}
        healthy = {name: call for name, call in calls.items() if name not in recently_failed}
        for group in (healthy, recently_failed):
            if not group or (group is recently_failed and (skip_failed or is_enough(answers))):
                continue
            for name, result in self._call_each(group, timeout_seconds, mark_late, lambda: is_acceptable(answers)):
                if isinstance(result, StoreError):
                    errors[name] = result
                else:
                    answers[name] = result
                    if is_enough(answers):
                        break
        for name in calls:
            if name not in answers and name not in errors:
                errors[name] = Unavailable(
                    f"{name} {'did not answer lately' if name in recently_failed else 'has not answered yet'}"
                )
        return answers, errors

    def _call_each(
        self, calls: Mapping[str, Callable[[], T]], timeout_seconds: float, mark_late: bool, is_acceptable: Callable[[], bool]
    ) -> Iterator[tuple[str, T | StoreError]]:
        began = time.monotonic()
        until, is_shortened = began + timeout_seconds, False
        waiting = {self.submit(name, call): name for name, call in calls.items()}
        while waiting:
            if not is_shortened and is_acceptable():
                is_shortened, now = True, time.monotonic()
                until = min(until, now + max(_GRACE_SECONDS, now - began))
            done, _ = wait(waiting, max(0.0, until - time.monotonic()), FIRST_COMPLETED)
            if not done:
                for name in waiting.values() if mark_late else ():
                    self.health.record_failure(name, f"no answer within {until - began:.3g} s")
                return
            for future in done:
                name = waiting.pop(future)
                try:
                    yield name, future.result()
                except StoreError as error:
                    yield name, error

    def _run_call(self, name: str, call: Callable[[], T]) -> T:
        call_id = object()
        with self._lock:
            self._running_calls[name][call_id] = time.monotonic()
        try:
            answer = call()
        except Unavailable as error:
            self.health.record_failure(name, error)
            raise
        except CkptError as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(str(error)) from error  # whatever one member says, the others may do
        finally:
            with self._lock:
                del self._running_calls[name][call_id]
        self.health.record_answer(name)
        return answer

    def close(self) -> None:
        """Take no more calls; wait for none."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def run_in_order(call: Callable[[T], object], items: Iterable[T], max_threads: int, thread_name: str) -> None:
    """Call for each item, so many at once, the first ones first. After an error no more are begun."""
    with DaemonThreadPool(max_threads, thread_name) as pool:
        work = [pool.submit(call, item) for item in items]
        try:
            for each in work:
                each.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def commit_or_abort(writer: Writer) -> Callable[[], int]:
    """A call for its commit. Where that fails what was written is given up with it, for nobody asks again: else a file stays
    open, and its bytes on the disk."""

    def commit() -> int:
        try:
            return writer.commit()
        except StoreError:
            with suppress(StoreError):
                writer.abort()
            raise

    return commit
