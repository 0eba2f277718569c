"""Brings steps to one tier in the background, one at a time. The newest wins: what waits is replaced, and never piles up."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ckpt.damage_registry import mark_damaged_in_all_tiers
from ckpt.promote import promote
from ckpt.quiet import be_nice
from ckpt.repository import Repository
from ckpt.retention import Keep
from ckpt.session import Session
from ckpt.storage.errors import Fenced, IntegrityError, SaveFailed, StepNotFound
from ckpt.storage.patience import VARIABLE, Standstill, patience_seconds

log = logging.getLogger("ckpt")


def _nothing() -> None: ...


_RETRY_SECONDS = (1.0, 60.0)
"""After a failure: at first, and at most."""


class Promoter:
    """Copies from `source` to `target`, in a thread that begins with the first step. An error is told once a cause in the
    log, and by `wait`; the copy is tried again, or that of a newer step."""

    def __init__(
        self, source: Repository, target: Session, keep: Keep | None, copied: Callable[[int], None] = lambda step: None
    ) -> None:
        """copied: called with each step that the target has now."""
        self._source = source
        self._target = target
        self._keep = keep
        self._copied = copied
        self._changed = threading.Condition()
        self._expected: set[int] = set()
        self._waiting: int | None = None
        self._current: int | None = None
        self._tries = 0
        self._error: Exception | None = None
        self._told = ""
        self._pause = _RETRY_SECONDS[0]
        self._not_before = 0.0
        self._closing = False
        self._progress: Callable[[], None] = _nothing
        self._moves = 0
        """Grows as long as the copying makes progress."""
        self._left_over: set[str] = set()
        self._thread: threading.Thread | None = None
        self.seconds = 0.0
        """That the last copy took."""

    # --- what to copy ------------------------------------------------------------------------------------------

    def expect(self, step: int) -> None:
        """A step is being saved that is to come here: nearer tiers keep it until it is offered or dropped."""
        with self._changed:
            self._expected.add(step)

    def drop(self, step: int) -> None:
        """A step that was expected does not come."""
        with self._changed:
            self._expected.discard(step)

    def offer(self, step: int) -> None:
        """A step that is committed nearer by. The one that waits is left out for it."""
        with self._changed:
            self._expected.discard(step)
            if self._closing:
                return
            if self._waiting is not None and self._waiting != step:
                log.info("step %d is not promoted to %s: step %d is newer", self._waiting, self._target.repo.url, step)
            self._waiting = step
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ckpt-promote", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def reads(self, source: Repository) -> None:
        """From now on it copies from there."""
        self._source = source

    def needed(self) -> set[int]:
        """Steps that nearer tiers must not delete yet."""
        with self._changed:
            return self._expected | {step for step in (self._waiting, self._current) if step is not None}

    # --- how it goes -------------------------------------------------------------------------------------------

    def wait(self, progress: Callable[[], None] | None = None) -> None:
        """Wait until what was offered is there; raise SaveFailed after a try that failed. It is tried again later.

        Raises SaveFailed, too, where a copy makes no progress any more.

        progress: called by the thread that copies, for each piece.
        """
        with self._changed:
            self._progress = progress or _nothing
            self._not_before = 0.0
            self._changed.notify_all()
            enough = self._tries + (self._current is not None) + (self._waiting is not None)
            ended = self._wait_while_it_moves(
                lambda: (self._waiting is None and self._current is None) or bool(self._error and self._tries >= enough)
            )
            error, self._progress = self._error, _nothing
        if not ended:
            raise SaveFailed(self._stuck())
        if error is not None:
            raise SaveFailed(f"promoting to {self._target.repo.url} failed: {error}") from error

    def raise_fenced(self) -> None:
        """Raise Fenced where a newer job has taken the tier over."""
        if isinstance(self._error, Fenced):
            raise self._error

    def close(self, wait: bool) -> None:
        """End the thread after the copy that is under way. wait: until then; else it ends with the process at the latest."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            if wait and not self._wait_while_it_moves(lambda: self._thread is None):
                log.error("%s", self._stuck())

    def _wait_while_it_moves(self, ended: Callable[[], bool]) -> bool:
        """With the lock. Whether it ended, before a copy made no progress for too long."""
        standstill = Standstill(self._moves)
        while not ended():
            if self._changed.wait(tick := standstill.tick()):
                continue
            if self._current is None:
                standstill = Standstill(self._moves)
            elif standstill.is_too_long(tick, self._moves):
                return ended()
        return True

    def _stuck(self) -> str:
        return (
            f"promoting step {self._current} to {self._target.repo.url} has made no progress for {patience_seconds():g} s: a "
            f"store does not answer. {VARIABLE} sets the seconds"
        )

    def _moved(self) -> None:
        self._moves += 1
        self._progress()

    # --- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        be_nice()
        try:
            self._copy_all()
        finally:
            with self._changed:
                self._thread = None
                self._changed.notify_all()

    def _copy_all(self) -> None:
        while (step := self._next()) is not None:
            began = time.monotonic()
            error: Exception | None = None
            try:
                promote(self._source, step, self._target, self._keep, self._left_over, self._moved)
                self.seconds = time.monotonic() - began
                self._copied(step)
            except StepNotFound:  # a nearer tier has lost it, or a roll-back has replaced it
                log.warning("step %d is not promoted to %s: no nearer tier has it any more", step, self._target.repo.url)
            except Exception as failed:
                error = failed
            self._ended(step, error)

    def _next(self) -> int | None:
        with self._changed:
            while not self._closing:
                left = self._not_before - time.monotonic()
                if self._waiting is not None and left <= 0:
                    self._current, self._waiting = self._waiting, None
                    return self._current
                self._changed.wait(None if self._waiting is None else left)
            return None

    def _ended(self, step: int, error: Exception | None) -> None:
        if isinstance(error, IntegrityError):
            mark_damaged_in_all_tiers(self._source, [step])  # nothing refers to it, so that the next save is whole
        with self._changed:
            self._current = None
            self._tries += 1
            self._error = error
            if error is None:
                self._pause, self._told = _RETRY_SECONDS[0], ""
            elif isinstance(error, Fenced):
                self._closing, self._waiting = True, None
            elif not isinstance(error, IntegrityError):
                if self._waiting is None:
                    self._waiting = step
                self._not_before = time.monotonic() + self._pause
                self._pause = min(2 * self._pause, _RETRY_SECONDS[1])
            told = f"{type(error).__name__} {step}" if isinstance(error, IntegrityError) else type(error).__name__
            loud, self._told = error is not None and told != self._told, told if error is not None else ""
            self._changed.notify_all()
        if loud:
            log.warning(
                "step %d could not be promoted to %s: %s; it is kept where it is%s", step, self._target.repo.url, error,
                "" if isinstance(error, (Fenced, IntegrityError)) else ", and the copy is tried again",
            )  # fmt: skip
