"""What an asynchronous save gives back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ckpt.errors import SaveFailed
from ckpt.storage.base.call_timeout import STORE_TIMEOUT_VARIABLE, StallTimer, store_timeout_seconds
from ckpt.support.fork_check import CreatorProcess

if TYPE_CHECKING:
    from ckpt.repository.checkpoint import Checkpoint


class SaveHandle:
    """A save under way. `result()` waits for it and returns the checkpoint, or raises what went wrong."""

    def __init__(self, step: int, moves: Callable[[], int] = int) -> None:
        """moves: a number that grows as long as the save makes progress."""
        self.step = step
        self._creator_process = CreatorProcess()
        self._progress_count = moves
        self._standstill = StallTimer()
        self.staged = threading.Event()
        """Set when the state has been copied and may be changed."""
        self._done = threading.Event()
        self._checkpoint: Checkpoint | None = None
        self._error: BaseException | None = None
        self._is_error_seen = False
        self._is_excused = False
        self._lock = threading.Lock()
        self._has_ended = False
        self._callbacks: list[Callable[[], None]] = []

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the save has ended, before anyone who waits for it is told; now if it has ended."""
        with self._lock:
            if not self._has_ended:
                self._callbacks.append(callback)
                return
        callback()

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, at most `timeout` seconds; whether it has come. Raises nothing.

        Without a timeout it waits as long as the save makes progress: at most CKPT_STORE_TIMEOUT seconds without any.
        A forked child does not wait: it never learns of the end.
        """
        if not self._creator_process.is_current:
            return self.done()
        return self._done.wait(timeout) if timeout is not None else self._wait_for(self._done)

    def require_end(self) -> None:
        """Wait for the end; raise SaveFailed where the save makes no progress any more."""
        if self._creator_process.is_current and not self._wait_for(self._done):
            raise self.stuck()

    def require_staged(self) -> None:
        """Wait until the state has been copied; raise SaveFailed where the save makes no progress any more."""
        if self._creator_process.is_current and not self._wait_for(self.staged):
            raise self.stuck()

    def is_stuck(self) -> bool:
        """Whether somebody has waited in vain for the save to make progress."""
        return self._standstill.seconds >= store_timeout_seconds() and not self._done.is_set()

    def stuck(self) -> SaveFailed:
        """What to raise where the save makes no progress."""
        return SaveFailed(
            f"saving step {self.step} has made no progress for {self._standstill.seconds:g} s: the store does not answer. The "
            f"step is committed if it answers again while this program runs. {STORE_TIMEOUT_VARIABLE} sets the seconds"
        )

    def _wait_for(self, event: threading.Event) -> bool:
        """Whether it came, before there was no progress for too long."""
        while not event.wait(tick := self._standstill.next_wait_seconds()):
            if self._standstill.has_timed_out(tick, self._progress_count()):
                return event.is_set()
        return True

    def result(self, timeout: float | None = None) -> Checkpoint:
        """The committed checkpoint; raises the error of the save, or TimeoutError after `timeout` seconds.

        Without a timeout: SaveFailed where the save makes no progress for CKPT_STORE_TIMEOUT seconds. CkptError in a child that
        was forked while the save was under way.
        """
        if not self.done():
            self._creator_process.require_current(
                f"the save of step {self.step}", "ask for its result in the process that saves"
            )
        if timeout is None:
            self.require_end()
        elif not self._done.wait(timeout):
            raise TimeoutError(f"saving step {self.step} has not ended after {timeout} s; it goes on")
        self._is_error_seen = True
        if self._error is not None:
            raise self._error
        assert self._checkpoint is not None
        return self._checkpoint

    def failed(self) -> bool:
        """Whether the save has ended badly."""
        return self._error is not None

    def error(self) -> BaseException | None:
        """The error, which stays unseen. For callbacks of `when_done`."""
        return self._error

    def checkpoint(self) -> Checkpoint:
        """What was committed. For callbacks of `when_done`, where the save has ended well."""
        assert self._checkpoint is not None
        return self._checkpoint

    def unseen(self) -> bool:
        """Whether the save failed, nobody has its error yet, and it is not excused."""
        return self.unasked() and not self._is_excused

    def unasked(self) -> bool:
        """Whether the save failed and nobody has its error yet."""
        return self._error is not None and not self._is_error_seen

    def excuse(self) -> None:
        """The next save makes up for this one if it fails. It is an error only where no later save follows."""
        self._is_excused = True

    def take_error(self) -> BaseException | None:
        """The error; it counts as seen."""
        self._is_error_seen = True
        return self._error

    def end(self, checkpoint: Checkpoint | None, error: BaseException | None) -> None:
        """For the pipeline: the step is committed, or the save was given up."""
        self._checkpoint = checkpoint
        self._error = error
        self.staged.set()
        with self._lock:
            self._has_ended = True
            callbacks, self._callbacks = self._callbacks, []
        try:
            for callback in callbacks:
                callback()
        finally:
            self._done.set()
