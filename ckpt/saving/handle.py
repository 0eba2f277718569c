"""The class SaveHandle, with which the caller of an asynchronous save waits for its result or its error."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ckpt.errors import SaveFailed, StepSkipped
from ckpt.storage.base.call_timeout import STORE_TIMEOUT_VARIABLE, StallTimer, store_timeout_seconds
from ckpt.support.fork_check import CreatorProcess

if TYPE_CHECKING:
    from ckpt.repository.checkpoint import Checkpoint

log = logging.getLogger("ckpt")


class SaveHandle:
    """A running save. `ckpt.save(..., blocking=False)` and the methods of `Checkpointer` that save return it.

        handle = ckpt.save(state, url, step=10, blocking=False)
        ...
        checkpoint = handle.result()

    `handle.step` is the number of the step. The event `handle.staged` is set when the state has been copied and may change.
    """

    def __init__(self, step: int, progress_count: Callable[[], int] = int) -> None:
        """progress_count: returns a number that grows while the save makes progress."""
        self.step = step
        self._creator_process = CreatorProcess()
        self._progress_count = progress_count
        self._standstill = StallTimer()
        self.staged = threading.Event()
        """Set when the state has been copied and may be changed."""
        self._done = threading.Event()
        self._checkpoint: Checkpoint | None = None
        self._error: BaseException | None = None
        self._is_error_seen = False
        self._is_error_superseded = False
        self._lock = threading.Lock()
        """Guards `_has_ended` and `_callbacks`. `_checkpoint` and `_error` are set once, before `_done`; the flags
        `_is_error_seen` and `_is_error_superseded` only become True."""
        self._has_ended = False
        self._callbacks: list[Callable[[], None]] = []

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the save ends, before any waiting thread resumes; call it now if the save has ended."""
        with self._lock:
            if not self._has_ended:
                self._callbacks.append(callback)
                return
        callback()

    def done(self) -> bool:
        """Return whether the save has ended, with success or an error."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of the save, and return whether it has ended. It raises no error of the save.

            ended = handle.wait(timeout=60)

        timeout: seconds to wait at most. None waits while the save makes progress, and for at most CKPT_STORE_TIMEOUT seconds
            without any progress.

        A forked child does not wait, because it never learns of the end.
        """
        if not self._creator_process.is_current:
            return self.done()
        return self._done.wait(timeout) if timeout is not None else self._wait_for(self._done)

    def require_end(self) -> None:
        """Wait for the end of the save; raise SaveFailed if it makes no progress any more."""
        if self._creator_process.is_current and not self._wait_for(self._done):
            raise self.stall_error()

    def require_staged(self) -> None:
        """Wait until the state has been copied; raise SaveFailed if the save makes no progress any more."""
        if self._creator_process.is_current and not self._wait_for(self.staged):
            raise self.stall_error()

    def has_stalled(self) -> bool:
        """Return whether a thread has waited for CKPT_STORE_TIMEOUT seconds without any progress of the save."""
        with self._lock:
            return not self._has_ended and self._standstill.seconds >= store_timeout_seconds()

    def stall_error(self) -> SaveFailed:
        """Return the error to raise if the save makes no progress."""
        return SaveFailed(
            f"saving step {self.step} has made no progress for {self._standstill.seconds:g} s: check the store; the step is "
            f"committed if it answers again while this program runs ({STORE_TIMEOUT_VARIABLE} sets the seconds)"
        )

    def _wait_for(self, event: threading.Event) -> bool:
        """Wait for the event, and return whether it was set before the save made no progress for too long."""
        while not event.wait(tick := self._standstill.next_wait_seconds()):
            if self._standstill.has_timed_out(tick, self._progress_count()):
                return event.is_set()
        return True

    def result(self, timeout: float | None = None) -> Checkpoint:
        """Wait for the end of the save, and return the committed checkpoint.

            checkpoint = handle.result()

        timeout: seconds to wait at most; None waits while the save makes progress.

        Raises:
            TimeoutError: The save has not ended after `timeout` seconds. It continues.
            SaveFailed: Without a timeout, the save made no progress for CKPT_STORE_TIMEOUT seconds.
            CkptError: The error of the save (see `ckpt.save`), or this process was forked during the save.
        """
        if not self.done():
            self._creator_process.require_current(
                f"the save of step {self.step}", "ask for its result in the process that saves"
            )
        if timeout is None:
            self.require_end()
        elif not self._done.wait(timeout):
            raise TimeoutError(
                f"saving step {self.step} has not ended after {timeout} s, and continues in the background; call result() again"
            )
        self._is_error_seen = True
        if self._error is not None:
            raise self._error
        assert self._checkpoint is not None
        return self._checkpoint

    def failed(self) -> bool:
        """Return whether the save has ended with an error."""
        return self._error is not None

    def error(self) -> BaseException | None:
        """Return the error, and do not count it as seen by the user. For callbacks of `when_done`."""
        return self._error

    def checkpoint(self) -> Checkpoint:
        """Return the committed checkpoint. For callbacks of `when_done`, after a save without an error."""
        assert self._checkpoint is not None
        return self._checkpoint

    def has_error_to_raise(self) -> bool:
        """Return whether the save failed, the user has not seen its error, and no later save supersedes it."""
        return self.has_unseen_error() and not self._is_error_superseded

    def has_unseen_error(self) -> bool:
        """Return whether the save failed and the user has not seen its error."""
        return self._error is not None and not self._is_error_seen and not self.is_skipped()

    def is_skipped(self) -> bool:
        """Return whether the save has ended because another rank leaves the step out, which is not a failure."""
        return isinstance(self._error, StepSkipped)

    def supersede_error(self) -> None:
        """Let the next save supersede an error of this one, which then counts only if no later save follows."""
        self._is_error_superseded = True

    def take_error(self) -> BaseException | None:
        """Return the error, and count it as seen."""
        self._is_error_seen = True
        return self._error

    def end(self, checkpoint: Checkpoint | None, error: BaseException | None) -> None:
        """Record the end of the save: the committed checkpoint or the error. The pipeline calls it."""
        self._checkpoint = checkpoint
        self._error = error
        self.staged.set()
        with self._lock:
            self._has_ended = True
            callbacks, self._callbacks = self._callbacks, []
        with ExitStack() as calls:  # an interrupt of one call skips none of the others
            calls.callback(self._done.set)
            for callback in reversed(callbacks):
                calls.callback(self._call, callback)

    def _call(self, callback: Callable[[], None]) -> None:
        """Call a callback; log its error, which is not one of the save."""
        try:
            callback()
        except Exception:
            log.exception("after the save of step %d: a call failed", self.step)
