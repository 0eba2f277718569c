"""The class BackgroundCopier, which copies steps to a tier in the background; a newer step replaces a waiting one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ckpt.errors import Fenced, SaveFailed, StepNotFound
from ckpt.repository.damage_registry import mark_damaged_in_all_tiers
from ckpt.repository.repository import Repository
from ckpt.repository.retention import Keep
from ckpt.saving.writer_session import WriterSession
from ckpt.storage.base.call_timeout import STORE_TIMEOUT_VARIABLE, StallTimer, store_timeout_seconds
from ckpt.storage.base.errors import IntegrityError, NotFound
from ckpt.support.runtime import lower_thread_priority
from ckpt.tiers.copy_step import promote

log = logging.getLogger("ckpt")


def _ignore_progress() -> None: ...


_RETRY_SECONDS = (1.0, 60.0)
"""The first and the longest time before a failed copy is retried."""


_FINAL_ERRORS = (IntegrityError, StepNotFound)
"""Errors of one step that remain if its copy is retried."""


def _continuation(error: Exception) -> str:
    """Return what happens after a failed copy, as the end of a message."""
    if isinstance(error, StepNotFound):
        return ""
    is_final = isinstance(error, (Fenced, IntegrityError))
    return "; the nearer tier keeps it" if is_final else "; the nearer tier keeps it, and the copy is retried"


class BackgroundCopier:
    """Copies steps from `source` to `target`, in a thread that starts with the first step.

    `wait` raises the last error, and the log has one warning for each kind of error. A failed copy is retried, or a newer step
    is copied instead. A copy of damaged bytes, or of a step that no nearer tier has any more, is not retried. After Fenced, no
    step is copied any more.
    """

    def __init__(
        self, source: Repository, target: WriterSession, keep: Keep | None, on_copied: Callable[[int, int], None]
    ) -> None:
        """on_copied: called with the number and the training line of each offered step once the target has it."""
        self._source = source
        self._target = target
        self._keep = keep
        self._on_copied = on_copied
        self._condition = threading.Condition()
        """Guards `_expected_steps`, `_waiting_step` and `_offered_line`. Guards changes of `_current_step`, `_attempt_count`,
        `_error`, `_retry_at`, `_closing`, `_progress_callback` and `_thread`. Notified when one of these changes. `_source`
        is replaced as a whole. Only the thread changes the other attributes; while it does not run, the caller that fails to
        start it changes `_logged_failure`."""
        self._expected_steps: set[int] = set()
        self._waiting_step: int | None = None
        self._offered_line = 0
        """The training line of the step that was offered last."""
        self._current_step: int | None = None
        self._attempt_count = 0
        self._error: Exception | None = None
        self._logged_failure = ""
        self._retry_seconds = _RETRY_SECONDS[0]
        self._retry_at = 0.0
        self._closing = False
        self._progress_callback: Callable[[], None] = _ignore_progress
        self._progress_count = 0
        """Grows while a copy makes progress."""
        self._orphaned_files: set[str] = set()
        self._thread: threading.Thread | None = None
        self.last_copy_seconds = 0.0
        """The duration of the last copy; 0 before the first one."""

    # --- what to copy ------------------------------------------------------------------------------------------

    def expect(self, step: int) -> None:
        """Announce a step that is being saved and is due here. Nearer tiers keep it until `offer` or `drop`."""
        with self._condition:
            self._expected_steps.add(step)

    def drop(self, step: int) -> None:
        """Withdraw an announced step."""
        with self._condition:
            self._expected_steps.discard(step)

    def offer(self, step: int, line: int = 0) -> None:
        """Queue a step that a nearer tier has committed on this training line. It replaces an older step that waits."""
        with self._condition:
            self._expected_steps.discard(step)
            if self._closing or (self._waiting_step is not None and (self._offered_line, self._waiting_step) > (line, step)):
                return
            if self._waiting_step is not None and self._waiting_step != step:
                log.info("step %d is not promoted to %s: step %d is newer", self._waiting_step, self._target.repo.url, step)
            self._waiting_step, self._offered_line = step, line
            self._start_thread_if_needed()
            self._condition.notify_all()

    def withdraw_later(self, line: int, step: int) -> None:
        """Withdraw a waiting step that is newer than this one, because a roll-back to this one has abandoned it."""
        with self._condition:
            if self._waiting_step is not None and (self._offered_line, self._waiting_step) > (line, step):
                self._waiting_step = self._error = None
                self._condition.notify_all()

    def _start_thread_if_needed(self) -> None:
        """Start the thread if a step waits and it does not run. The next call tries again. Needs `_condition`."""
        step = self._waiting_step
        if step is None or self._thread is not None or self._closing:
            return
        thread = threading.Thread(target=self._run, name="ckpt-promote", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no thread left
            self._log_failure(step, error)
            self._error = error
        else:
            self._thread = thread

    def set_source(self, source: Repository) -> None:
        """Set the repository from which the next steps are copied."""
        self._source = source

    def needed_steps(self) -> set[int]:
        """Return the steps that nearer tiers must not delete yet."""
        with self._condition:
            return self._expected_steps | {step for step in (self._waiting_step, self._current_step) if step is not None}

    # --- waiting and ending ------------------------------------------------------------------------------------

    def wait(self, progress: Callable[[], None] | None = None) -> None:
        """Wait until the offered steps are copied.

        progress: called by the copying thread for each range of bytes that it has copied.

        Raises SaveFailed if a copy failed, which is retried later, or if it makes no progress any more.
        """
        with self._condition:
            self._progress_callback = progress or _ignore_progress
            self._retry_at = 0.0
            self._start_thread_if_needed()
            self._condition.notify_all()
            # Once that many attempts have ended, each step that was offered before this call was tried.
            attempts_to_await = self._attempt_count + (self._current_step is not None) + (self._waiting_step is not None)
            ended = self._wait_for_progress(
                lambda: (
                    self._thread is None
                    or (self._waiting_step is None and self._current_step is None)
                    or bool(self._error and self._attempt_count >= attempts_to_await)
                )
            )
            error, self._progress_callback = self._error, _ignore_progress
        if not ended:
            raise SaveFailed(self._stalled_message())
        if error is not None:
            raise SaveFailed(f"promoting to {self._target.repo.url} failed: {error}") from error

    def raise_fenced(self) -> None:
        """Raise Fenced if a newer job has taken over the tier."""
        if isinstance(self._error, Fenced):
            raise self._error

    def close(self, wait: bool) -> None:
        """End the thread after the current copy.

        wait: whether to wait for that. Otherwise the thread ends with the process at the latest.
        """
        with self._condition:
            self._closing = True
            self._condition.notify_all()
            if wait and not self._wait_for_progress(lambda: self._thread is None):
                log.error("%s", self._stalled_message())

    def _wait_for_progress(self, ended: Callable[[], bool]) -> bool:
        """Wait until `ended`, and return True; return False if a copy makes no progress for too long. Needs `_condition`."""
        stall_timer = StallTimer(self._progress_count)
        while not ended():
            if self._condition.wait(wait_seconds := stall_timer.next_wait_seconds()):
                continue
            if self._current_step is None:
                stall_timer = StallTimer(self._progress_count)
            elif stall_timer.has_timed_out(wait_seconds, self._progress_count):
                return ended()
        return True

    def _stalled_message(self) -> str:
        return (
            f"promoting step {self._current_step} to {self._target.repo.url} has made no progress for "
            f"{store_timeout_seconds():g} s: check whether both stores answer ({STORE_TIMEOUT_VARIABLE} sets the seconds)"
        )

    def _record_progress(self) -> None:
        self._progress_count += 1
        self._progress_callback()

    # --- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        lower_thread_priority()
        try:
            self._copy_all()
        except Exception as error:  # a lack of memory while the failure of a copy was recorded
            with self._condition:
                self._error = error
                if self._waiting_step is None:
                    self._waiting_step = self._current_step
                self._current_step = None
        finally:
            with self._condition:
                self._thread = None
                self._condition.notify_all()

    def _copy_all(self) -> None:
        while (offered := self._next_step()) is not None:
            step, line = offered
            began = time.monotonic()
            error: Exception | None = None
            try:
                promote(self._source, step, self._target, self._keep, self._orphaned_files, self._record_progress, line)
                self.last_copy_seconds = time.monotonic() - began
                self._on_copied(step, line)
            except StepNotFound as absent:
                error = self._explain_absence(step, line, absent)
            except Exception as failed:
                error = failed
            self._copy_ended(step, error)

    def _explain_absence(self, step: int, line: int, absent: StepNotFound) -> Exception | None:
        """Return the error for a step that no nearer tier has; None if the target has it, for example by a direct save."""
        try:
            if self._target.repo.record(step).line >= line:
                return None
        except NotFound:
            pass
        except Exception as failed:
            return failed
        return StepNotFound(f"step {step} is in no nearer tier any more: {absent}")

    def _next_step(self) -> tuple[int, int] | None:
        """Wait for the next step to copy; return it and its training line, or None at the end."""
        with self._condition:
            while not self._closing:
                wait_seconds = self._retry_at - time.monotonic()
                if self._waiting_step is not None and wait_seconds <= 0:
                    self._current_step, self._waiting_step = self._waiting_step, None
                    return self._current_step, self._offered_line
                self._condition.wait(None if self._waiting_step is None else wait_seconds)
            return None

    def _copy_ended(self, step: int, error: Exception | None) -> None:
        if isinstance(error, IntegrityError):
            mark_damaged_in_all_tiers(self._source, [step])  # the next save must not refer to its blocks
        self._log_failure(step, error)  # before those who wait see the error
        with self._condition:
            self._current_step = None
            self._attempt_count += 1
            self._error = error
            if error is None:
                self._retry_seconds = _RETRY_SECONDS[0]
            elif isinstance(error, Fenced):
                self._closing, self._waiting_step = True, None
            elif not isinstance(error, _FINAL_ERRORS):
                if self._waiting_step is None:
                    self._waiting_step = step
                self._retry_at = time.monotonic() + self._retry_seconds
                self._retry_seconds = min(2 * self._retry_seconds, _RETRY_SECONDS[1])
            self._condition.notify_all()

    def _log_failure(self, step: int, error: Exception | None) -> None:
        """Log the failure of a copy, unless the copy before it failed in the same way."""
        before, self._logged_failure = self._logged_failure, ""
        if error is None:
            return
        self._logged_failure = f"{type(error).__name__} {step}" if isinstance(error, _FINAL_ERRORS) else type(error).__name__
        if self._logged_failure != before:
            log.warning(
                "step %d could not be promoted to %s: %s%s", step, self._target.repo.url, error, _continuation(error)
            )  # fmt: skip
