"""The heartbeat page: a page of shared memory in which a rank and its agent exchange their state.

`ckpt-run` creates the page and sets CKPT_PULSE to its path. Without the variable, the functions here do nothing. Each field has
eight bytes, written in one piece. A heartbeat costs a microsecond and no system call.

    0 beats   1 step   2 phase   3 since (ns, CLOCK_MONOTONIC)   4 committed step   5 loss (float)   6 pid   7 stop step
    8 stop acknowledged   9 stop confirmed   10 batch   11 bad step   12 bad kind   13 bad batch   14 bad loss (float)
    15 limit of the bad loss (float)   16 compute time (ns, sum)   17 trouble   18 restored step   19 ended
    20 last SIGTERM (ns, CLOCK_MONOTONIC)   21 durable step   22 training line of the committed step
    23 training line of the durable step

Coordinated stop: all ranks must stop after the same step, and none may wait for another rank to learn which. The agent writes a
step into all pages (`request_stop`). A rank that has not passed that step acknowledges it, and does not continue beyond it.
When all ranks have acknowledged, the agent confirms the stop (`confirm_stop`), and each rank saves and ends there. If a rank
had already passed the step, the agent requests a later one, and ranks that wait at the earlier step continue.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import mmap
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from ckpt.storage.base.call_timeout import WaitTimer
from ckpt.storage.base.forks import fork_safe_rlock
from ckpt.training.heartbeat_records import BadLoss, BadLossKind, RankHeartbeat, Trouble

PAGE_VARIABLE = "CKPT_PULSE"
PHASES = ("start", "load", "step", "save", "eval", "compile", "end")
_START, _STEPPING, _SAVE = map(PHASES.index, ("start", "step", "save"))
STACKS_SIGNAL = signal.SIGUSR2
"""The signal on which a rank writes the stacks of all its threads into its log."""

_TROUBLES: tuple[Trouble, ...] = ("", "unusable", "damaged")
_BAD_LOSS_KINDS: tuple[BadLossKind, ...] = ("not finite", "spike")

_BEAT_COUNT, _STEP, _PHASE, _SINCE, _COMMITTED, _LOSS, _PID, _STOP_STEP = range(8)
_STOP_ACKNOWLEDGED, _STOP_CONFIRMED, _BATCH, _BAD_STEP, _BAD_KIND, _BAD_BATCH, _BAD_LOSS, _BAD_LIMIT = range(8, 16)
_COMPUTED, _TROUBLE, _RESTORED, _ENDED, _SIGTERM_AT, _DURABLE, _LINE, _DURABLE_LINE = range(16, 24)
_PAGE_BYTES = 4096
_NEVER = -(1 << 62)

_STOP_CONFIRM_SECONDS = 600.0
"""How long a rank waits at the stop step for the confirmation: the others acknowledge at the end of a step. After this time it
stops anyway, because the agent must be dead."""


class HeartbeatPage:
    """The heartbeat page of one rank, mapped from a file. Many threads may use it.

    It has no lock, because a heartbeat must not wait: each field is written in one piece, and a lost count of two heartbeats at
    the same time does no harm.
    """

    def __init__(self, path: str | os.PathLike[str], *, new: bool = False) -> None:
        """Map the page at `path`.

        new: create the page. Other processes then see the complete page or none.
        """
        self.path = os.fspath(path)
        made = f"{self.path}.new" if new else path
        file = os.open(made, os.O_RDWR | (os.O_CREAT if new else 0), 0o600)
        try:
            if new:
                _reserve(file, made)
            self._map = mmap.mmap(file, _PAGE_BYTES)
        finally:
            os.close(file)
        self._fields = memoryview(self._map).cast("q")
        self._floats = memoryview(self._map).cast("d")
        if new:
            self._reset_steps()
            self._fields[_BAD_STEP] = -1
            for field in (_STOP_STEP, _STOP_ACKNOWLEDGED, _STOP_CONFIRMED):
                self._fields[field] = _NEVER
            self._floats[_LOSS] = math.nan
            self._fields[_SINCE] = time.monotonic_ns()
            os.replace(made, path)

    def _reset_steps(self) -> None:
        for field in (_STEP, _COMMITTED, _BATCH, _RESTORED, _DURABLE):
            self._fields[field] = -1

    # --- called by the rank ------------------------------------------------------------------------------------

    def beat(self, phase: int, step: int | None = None) -> None:
        """Publish a heartbeat with the current phase.

        phase: index into PHASES.
        step: the step that is done; None leaves it unchanged.
        """
        fields = self._fields
        if step is not None:
            fields[_STEP] = step
        fields[_PHASE] = phase
        fields[_SINCE] = time.monotonic_ns()
        fields[_BEAT_COUNT] += 1

    def beat_if_idle(self, step: int, loss: Any, until_step: int, deadline_ns: int) -> bool:
        """Publish the heartbeat of a step that needs nothing else. Return False, and publish nothing, if it may need more.

        until_step: the next step that needs more.
        deadline_ns: the time from which a step needs more, in ns of CLOCK_MONOTONIC.

        The code is in one function, because each call costs microseconds: a training step leaves nothing of it in the caches.
        """
        fields = self._fields
        now = time.monotonic_ns()
        if step >= until_step or now >= deadline_ns or fields[_STOP_STEP] != _NEVER:
            return False
        if loss is not None:
            if type(loss) is not float or loss - loss != 0.0:  # on a device, or not finite
                return False
            self._floats[_LOSS] = loss
        fields[_STEP] = step
        fields[_PHASE] = _STEPPING
        fields[_SINCE] = now
        fields[_BEAT_COUNT] += 1
        return True

    def publish_committed(self, step: int, line: int = 0) -> None:
        """Publish that a step is committed. On a new training line it is the newest, whatever its number.

        A save that was still running when the loop went back belongs to an earlier line, and is not published any more.
        """
        if line > self._fields[_LINE]:
            self._fields[_COMMITTED] = step  # before the line, which `read` reads first
            self._fields[_LINE] = line
            if line > self._fields[_DURABLE_LINE]:  # the durable steps from this number on are abandoned
                self._fields[_DURABLE], self._fields[_DURABLE_LINE] = min(self._fields[_DURABLE], step - 1), line
        elif line == self._fields[_LINE] and step > self._fields[_COMMITTED]:
            self._fields[_COMMITTED] = step

    def publish_durable(self, step: int, line: int = 0) -> None:
        """Publish that a step is committed outside of the memory of hosts. On a new training line it is the newest."""
        before = self._fields[_DURABLE_LINE]
        if line > before or (line == before and step > self._fields[_DURABLE]):
            self._fields[_DURABLE], self._fields[_DURABLE_LINE] = step, line

    def publish_restored(self, step: int, again: bool = False) -> None:
        """Publish the step from which this rank continues; -1 if there is none. With several Checkpointers the newest step
        counts.

        again: whether this Checkpointer has already restored or saved a step.
        """
        self._fields[_RESTORED] = step if again else max(step, self._fields[_RESTORED])
        # After a roll-back, the durable steps above are abandoned, and say nothing about the new steps of these numbers.
        self._fields[_DURABLE] = min(self._fields[_DURABLE], self._fields[_RESTORED])
        self._fields[_TROUBLE] = _TROUBLES.index("")  # an earlier error did not prevent the restore
        self.publish_committed(step, self._fields[_LINE])

    def publish_loss(self, loss: float) -> None:
        """Publish the loss of the newest step that has one."""
        self._floats[_LOSS] = loss

    def publish_batch(self, batch: int) -> None:
        """Publish the global batch that the loop has taken."""
        self._fields[_BATCH] = batch

    def last_batch(self) -> int:
        """Return the global batch that the loop took last; -1 if none."""
        return self._fields[_BATCH]

    def publish_bad_loss(self, bad: BadLoss) -> None:
        """Publish a bad loss, if it is the first."""
        fields, floats = self._fields, self._floats
        if fields[_BAD_STEP] < 0:
            fields[_BAD_KIND], fields[_BAD_BATCH] = _BAD_LOSS_KINDS.index(bad.kind), bad.batch
            floats[_BAD_LOSS], floats[_BAD_LIMIT] = bad.loss, bad.limit
            fields[_BAD_STEP] = bad.step  # written last, because a reader uses the other fields only if this one is set

    def add_compute_ns(self, nanoseconds: int) -> None:
        """Add to the published time that this rank has computed without waiting for others."""
        self._fields[_COMPUTED] += nanoseconds

    def publish_trouble(self, trouble: Trouble) -> None:
        """Publish an error that a restart does not fix."""
        self._fields[_TROUBLE] = _TROUBLES.index(trouble)
        self.beat(self._fields[_PHASE])

    def acknowledge_stop(self, step: int) -> None:
        """Acknowledge a requested stop, unless this rank has passed its step.

        Call it before `step`, which is done, is published: the agent would otherwise see the step first, and count this rank as
        too late.
        """
        if step <= (stop := self._fields[_STOP_STEP]):
            self._fields[_STOP_ACKNOWLEDGED] = stop

    def should_stop(self, step: int) -> bool:
        """Return whether to save this step and end. It is true after the same step on all ranks."""
        return self._fields[_STOP_STEP] != _NEVER and self._wait_for_stop_confirmation(step)

    def _wait_for_stop_confirmation(self, step: int) -> bool:
        fields = self._fields
        next_beat = time.monotonic()
        timer = WaitTimer(_STOP_CONFIRM_SECONDS)
        while True:
            stop = fields[_STOP_STEP]
            if fields[_STOP_ACKNOWLEDGED] != stop:
                if step > stop:
                    return False  # too late, as the page shows: the agent will request a later step
                fields[_STOP_ACKNOWLEDGED] = stop
            if step < stop:
                return False
            if fields[_STOP_CONFIRMED] == stop or not timer.remaining_seconds():
                return True
            if time.monotonic() >= next_beat:  # a waiting rank must not look hung
                self.beat(_SAVE)
                next_beat = time.monotonic() + 1.0
            time.sleep(0.001)

    def attach_process(self) -> None:
        """Publish that this process is the rank. Its silence counts from now: earlier imports are not a hang."""
        self._fields[_SINCE] = time.monotonic_ns()
        self._fields[_PID] = os.getpid()
        with contextlib.suppress(ValueError, OSError, AttributeError):  # without stderr, or outside of the main thread
            faulthandler.register(STACKS_SIGNAL, file=sys.stderr, all_threads=True)

    def take_over(self) -> None:
        """Begin anew on the page of an earlier program of this rank, which has ended: a shell may run several in turn.

        A bad loss stays, as the agent may not have read it yet.
        """
        self._reset_steps()
        self._fields[_LINE] = self._fields[_DURABLE_LINE] = 0
        self._fields[_TROUBLE] = _TROUBLES.index("")
        self.beat(_START)

    def defer_sigterm(self) -> None:
        """Record SIGTERM in the page instead of ending: a SIGTERM to all processes of a job means that it should be saved
        first.

        If only this process got the signal, its agent ends it. A handler of the program itself is not replaced.
        """
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _record_sigterm)

    def detach_process(self) -> None:
        """Continue with a private copy of the page, in a forked child."""
        page = memoryview(bytearray(self._map))
        self._fields, self._floats = page.cast("q"), page.cast("d")
        # Ends the fast path of `beat_if_idle`, so that a Checkpointer in the child refuses the step.
        self._fields[_STOP_STEP] = -1

    # --- called by the agent -----------------------------------------------------------------------------------

    def read(self) -> RankHeartbeat:
        """Return what the rank has published."""
        fields, floats = self._fields, self._floats
        line = fields[_LINE]  # before the committed step: the step of an earlier line never counts as one of a later line
        phase = fields[_PHASE]
        bad = None
        if (step := fields[_BAD_STEP]) >= 0:
            bad = BadLoss(step, _BAD_LOSS_KINDS[fields[_BAD_KIND]], floats[_BAD_LOSS], floats[_BAD_LIMIT], fields[_BAD_BATCH])
        return RankHeartbeat(
            beats=fields[_BEAT_COUNT],
            step=fields[_STEP],
            phase=PHASES[phase] if 0 <= phase < len(PHASES) else "start",
            since=fields[_SINCE] / 1e9,
            committed=fields[_COMMITTED],
            loss=floats[_LOSS],
            pid=fields[_PID],
            acknowledged_stop=None if fields[_STOP_ACKNOWLEDGED] == _NEVER else fields[_STOP_ACKNOWLEDGED],
            bad=bad,
            compute_seconds=fields[_COMPUTED] / 1e9,
            trouble=_TROUBLES[fields[_TROUBLE]],
            restored=fields[_RESTORED],
            ended=bool(fields[_ENDED]),
            sigterm_at=fields[_SIGTERM_AT] / 1e9,
            durable=fields[_DURABLE],
            line=line,
        )

    def publish_ended(self) -> None:
        """Publish that the process of the rank has ended."""
        self._fields[_ENDED] = 1

    def request_stop(self, step: int) -> None:
        """Request that the rank saves this step and ends. recovery/policy/coordinated_stop.py chooses the step."""
        self._fields[_STOP_STEP] = step

    def confirm_stop(self, step: int) -> None:
        """Confirm that all ranks have acknowledged this stop step."""
        self._fields[_STOP_CONFIRMED] = step

    def close(self) -> None:
        """Unmap the page."""
        self._fields.release()
        self._floats.release()
        self._map.close()


def _reserve(file: int, path: str | os.PathLike[str]) -> None:
    """Allocate the bytes of a page; raise OSError with the path. Touching a page without them would kill the process."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, _PAGE_BYTES)
        else:
            os.ftruncate(file, _PAGE_BYTES)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


_own_page: HeartbeatPage | None = None
_is_looked_up = False
_look_up_lock = fork_safe_rlock()
"""Guards the look-up of the page. It is reentrant, because a signal handler may save in the middle of the look-up."""


def _record_sigterm(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM: record its time in the page."""
    if _own_page is not None:
        _own_page._fields[_SIGTERM_AT] = time.monotonic_ns()


def own_page() -> HeartbeatPage | None:
    """Return the heartbeat page of this process, or None if no agent monitors it. Safe to call from many threads."""
    if not _is_looked_up:
        with _look_up_lock:
            if not _is_looked_up:
                _look_up()
    return _own_page


def _look_up() -> None:
    """Find the page of this process. Needs `_look_up_lock`."""
    global _own_page, _is_looked_up
    if path := os.environ.get(PAGE_VARIABLE):
        try:
            found = HeartbeatPage(path)
            if (before := found.read().pid) not in (0, os.getpid()):
                from ckpt.groups.process_identity import process_exists  # seldom needed

                if process_exists(before):  # this is a helper process that a rank has started
                    _is_looked_up = True
                    return
                found.take_over()
            _own_page = found
            _own_page.attach_process()
        except (FileNotFoundError, ValueError):  # the page belonged to a job that has ended
            pass
        except OSError:  # e.g. too many open files now: the next call tries again
            return
    _is_looked_up = True


def reset_after_fork() -> None:
    """Let a forked process be a rank: it looks up its page again."""
    global _own_page, _is_looked_up
    _own_page, _is_looked_up = None, False


class _ForkingThread(threading.local):
    """What one thread keeps while it forks. Several threads may fork at the same time."""

    signal_mask: set[int] | None = None
    """The signal mask before the fork; None if the fork does not change it."""


_forking_thread = _ForkingThread()


def _before_fork() -> None:
    """Block SIGTERM until the child has removed the handler of its parent."""
    if signal.getsignal(signal.SIGTERM) is _record_sigterm:
        _forking_thread.signal_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork_in_parent() -> None:
    if (mask := _forking_thread.signal_mask) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _forking_thread.signal_mask = None


def _after_fork() -> None:
    """Detach a child, which is not the rank: its copies of the rank's objects then write into a private page."""
    global _own_page, _is_looked_up
    if _own_page is not None:
        _own_page.detach_process()
    _own_page, _is_looked_up = None, True
    if signal.getsignal(signal.SIGTERM) is _record_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _after_fork_in_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork)
