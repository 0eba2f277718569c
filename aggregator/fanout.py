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

from ckpt.storage.base import Writer
from ckpt.storage.errors import CkptError, StoreError, Unavailable
from ckpt.storage.threads import Threads

log = logging.getLogger("ckpt")

T = TypeVar("T")

_LATE_SECONDS = 1.0

_GRACE_SECONDS = 1.0
"""How long more answers are waited for that can be done without, or as long again as those took that are there."""

_PROBE_SECONDS = 60.0
"""Longer than a probe takes."""

_TOLD_SECONDS = 60.0
"""Who fails now and then is not spoken of more often."""


class Health:
    """Which members answered lately. One that did not is left alone until it answers a probe, which nobody waits for; where
    there is no probe, for a while, longer each time."""

    def __init__(
        self, first_seconds: float = 0.5, most_seconds: float = 15.0, probe: Callable[[str], object] | None = None
    ) -> None:
        self._first_seconds = first_seconds
        self._most_seconds = most_seconds
        self._probe = probe
        self._lock = threading.Lock()
        self._down: dict[str, tuple[float, int]] = {}
        self._told: dict[str, float] = {}

    def failed(self, name: str, why: object) -> None:
        """A member did not answer, or not well."""
        now = time.monotonic()
        with self._lock:
            until, times = self._down.get(name, (0.0, 0))
            if now < until:  # of a call that began before the first failure was known
                return
            self._leave_alone(name)
            tell = not times and now >= self._told.get(name, now)
            if tell:
                self._told[name] = now + _TOLD_SECONDS
        if tell:
            log.warning(
                "%s is left alone until it answers (%s); if it is down start it, if it is lost `ckpt-node admin forget` it",
                name, why,
            )  # fmt: skip

    def _leave_alone(self, name: str) -> None:
        """For a while, longer each time. Under the lock."""
        _, times = self._down.get(name, (0.0, 0))
        pause = min(self._most_seconds, self._first_seconds * 2**times)
        self._down[name] = (time.monotonic() + pause, times + 1)

    def answered(self, name: str) -> None:
        """A member answered."""
        if self._down:
            with self._lock:
                self._down.pop(name, None)

    def down(self, name: str) -> bool:
        """Whether to leave a member alone now."""
        known = self._down.get(name)
        if known is None:
            return False
        if time.monotonic() < known[0]:
            return True
        if self._probe is None:
            return False
        with self._lock:
            known = self._down.get(name)
            if known is None or time.monotonic() < known[0]:
                return known is not None
            self._down[name] = (time.monotonic() + _PROBE_SECONDS, known[1])  # one probe at a time
        threading.Thread(target=self._ask, args=(name, self._probe), name="ckpt-probe", daemon=True).start()
        return True

    def _ask(self, name: str, probe: Callable[[str], object]) -> None:
        try:
            probe(name)
        except CkptError:
            with self._lock:
                self._leave_alone(name)
        else:
            self.answered(name)


class FanOut:
    """Threads for calls to members. A call that never returns holds one thread until its own deadline."""

    def __init__(self, health: Health, threads: int = 64) -> None:
        self.health = health
        self._pool = Threads(threads, "ckpt-member")
        self._most = threads // 3
        self._lock = threading.Lock()
        self._under_way: dict[str, dict[object, float]] = {}  # calls that a thread is in, and since when

    def submit(self, name: str, call: Callable[[], T]) -> Future[T]:
        """Start one call. One of a member that leaves too many unanswered fails at once: it may not take all threads."""
        with self._lock:
            under_way = self._under_way.setdefault(name, {})
            late = time.monotonic() - _LATE_SECONDS
            if len(under_way) >= self._most and sum(began < late for began in under_way.values()) >= self._most:
                failed: Future[T] = Future()
                failed.set_exception(Unavailable(f"{name} leaves {len(under_way)} calls unanswered"))
                return failed
        return self._pool.submit(contextvars.copy_context().run, self._run, name, call)

    def ask(
        self,
        calls: Mapping[str, Callable[[], T]],
        seconds: float,
        enough: Callable[[dict[str, T]], bool] = lambda _: False,
        *,
        will_do: Callable[[dict[str, T]], bool] = lambda _: False,
        spare: bool = False,
        blame: bool = True,
    ) -> tuple[dict[str, T], dict[str, StoreError]]:
        """Call all; return what they answered, and the errors, as soon as it is `enough`, or all are done, or time is over.

        The others go on by themselves. A member that has just failed is asked only if the rest are not enough, and not even
        then if they are to be spared: that answer can be done without. will_do: with these answers the rest are waited for a
        moment longer, and no more. blame: who has not answered in time is left alone for a while.
        """
        answers: dict[str, T] = {}
        errors: dict[str, StoreError] = {}
        later = {name: call for name, call in calls.items() if self.health.down(name)}
        now = {name: call for name, call in calls.items() if name not in later}
        for group in (now, later):
            if not group or (group is later and (spare or enough(answers))):
                continue
            for name, result in self._each(group, seconds, blame, lambda: will_do(answers)):
                if isinstance(result, StoreError):
                    errors[name] = result
                else:
                    answers[name] = result
                    if enough(answers):
                        break
        for name in calls:
            if name not in answers and name not in errors:
                errors[name] = Unavailable(f"{name} {'did not answer lately' if name in later else 'has not answered yet'}")
        return answers, errors

    def _each(
        self, calls: Mapping[str, Callable[[], T]], seconds: float, blame: bool, will_do: Callable[[], bool]
    ) -> Iterator[tuple[str, T | StoreError]]:
        began = time.monotonic()
        until, hurried = began + seconds, False
        waiting = {self.submit(name, call): name for name, call in calls.items()}
        while waiting:
            if not hurried and will_do():
                hurried, now = True, time.monotonic()
                until = min(until, now + max(_GRACE_SECONDS, now - began))
            done, _ = wait(waiting, max(0.0, until - time.monotonic()), FIRST_COMPLETED)
            if not done:
                for name in waiting.values() if blame else ():
                    self.health.failed(name, f"no answer within {until - began:.3g} s")
                return
            for future in done:
                name = waiting.pop(future)
                try:
                    yield name, future.result()
                except StoreError as error:
                    yield name, error

    def _run(self, name: str, call: Callable[[], T]) -> T:
        mine = object()
        with self._lock:
            self._under_way[name][mine] = time.monotonic()
        try:
            answer = call()
        except Unavailable as error:
            self.health.failed(name, error)
            raise
        except CkptError as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(str(error)) from error  # whatever one member says, the others may do
        finally:
            with self._lock:
                del self._under_way[name][mine]
        self.health.answered(name)
        return answer

    def close(self) -> None:
        """Take no more calls; wait for none."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def in_order(call: Callable[[T], object], items: Iterable[T], threads: int, name: str) -> None:
    """Call for each item, so many at once, the first ones first. After an error no more are begun."""
    with Threads(threads, name) as pool:
        work = [pool.submit(call, item) for item in items]
        try:
            for each in work:
                each.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def durable(writer: Writer) -> Callable[[], int]:
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
