"""Calls to many members at once, which do not wait for the members that do not answer."""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import Any, TypeVar

from ckpt.aggregator.cluster.member_health import MemberHealth
from ckpt.storage.base.errors import CkptError, StoreError, Unavailable
from ckpt.storage.base.store import Writer
from ckpt.storage.base.threads import DaemonThreadPool

log = logging.getLogger("ckpt")

T = TypeVar("T")

_SLOW_CALL_SECONDS = 1.0
"""A call that has run for longer counts as unanswered in the limit of calls to one member."""

_GRACE_SECONDS = 1.0
"""How long to wait for more answers once the present ones are acceptable; or as long as those took, if that is longer."""


class FanOut:
    """Threads for calls to members. A call that does not return occupies one thread until its own deadline."""

    def __init__(self, health: MemberHealth, threads: int = 64) -> None:
        self.health = health
        self._pool = DaemonThreadPool(threads, "ckpt-member")
        self._max_calls_per_member = threads // 3
        self._lock = threading.Lock()
        """Guards `_running_calls`."""
        self._running_calls: dict[str, dict[object, float]] = {}  # by member: calls that run on a thread, and when each began

    def submit(self, name: str, call: Callable[[], T], hides_errors: bool = False) -> Future[T]:
        """Start one call. It fails at once if the system refuses all threads.

        It also fails at once if too many calls to the member are unanswered: they would take all threads. hides_errors: whether
        the call also returns if the member did not answer.
        """
        with self._lock:
            running = self._running_calls.setdefault(name, {})
            slow_since = time.monotonic() - _SLOW_CALL_SECONDS
            if (
                len(running) >= self._max_calls_per_member
                and sum(began < slow_since for began in running.values()) >= self._max_calls_per_member
            ):
                return _failed(Unavailable(f"{name} has not answered {len(running)} calls"))
        try:
            return self._pool.submit(contextvars.copy_context().run, self._run_call, name, call, hides_errors)
        except StoreError as error:
            return _failed(error)

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
        """Make all calls. Return the answers and errors by member, as soon as `is_enough`, or all are done, or time is over.

        Late calls continue in the background. A member that is down is called only if the answers of the others are not enough.

        calls: by member. timeout_seconds: how long to wait for the members that are up, and then again for those that are down.
        is_acceptable: whether these answers are enough if no more arrive soon. skip_failed: never
        call members that are down. mark_late: a member that has not answered in time counts as down.
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
                reason = "did not answer lately" if name in recently_failed else "has not answered yet"
                errors[name] = Unavailable(f"{name} {reason}")
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
                for future, name in waiting.items() if mark_late else ():
                    if future.running():  # otherwise it waits for a thread, and the member was not asked yet
                        self.health.record_failure(name, f"no answer within {until - began:.3g} s")
                return
            for future in done:
                name = waiting.pop(future)
                try:
                    yield name, future.result()
                except StoreError as error:
                    yield name, error

    def _run_call(self, name: str, call: Callable[[], T], hides_errors: bool) -> T:
        call_id = object()
        with self._lock:
            self._running_calls[name][call_id] = time.monotonic()
        try:
            answer = call()
        except Unavailable as error:
            self.health.record_failure(name, error)
            raise
        except (CkptError, OSError) as error:
            if isinstance(error, StoreError):
                raise
            # Any error of one member: the others may still answer.
            raise StoreError(str(error) if isinstance(error, CkptError) else f"{name}: {error}") from error
        finally:
            with self._lock:
                del self._running_calls[name][call_id]
        if not hides_errors:
            self.health.record_answer(name)
        return answer

    def abort(self, writers: Mapping[str, Writer], timeout_seconds: float) -> None:
        """Abort a writer of each member. Late calls continue in the background, and so do those of members that are down."""
        is_down = {name: self.health.is_down(name) for name in writers}
        calls = {name: self.submit(name, writer.abort, hides_errors=True) for name, writer in writers.items()}
        wait([call for name, call in calls.items() if not is_down[name]], timeout_seconds)

    def close(self) -> None:
        """Accept no more calls, and wait for none."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _failed(error: StoreError) -> Future[Any]:
    failed: Future[Any] = Future()
    failed.set_exception(error)
    return failed


def run_in_order(call: Callable[[T], object], items: Iterable[T], max_threads: int, thread_name: str) -> None:
    """Call `call` for each item, begun in order, up to `max_threads` at once. After an error no more calls are begun."""
    with DaemonThreadPool(max_threads, thread_name) as pool:
        futures = [pool.submit(call, item) for item in items]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def commit_or_abort(writer: Writer) -> Callable[[], int]:
    """Return a call that commits a writer. If the commit fails, it aborts the writer, which frees its file and disk space."""

    def commit() -> int:
        try:
            return writer.commit()
        except StoreError:
            with suppress(StoreError):
                writer.abort()
            raise

    return commit
