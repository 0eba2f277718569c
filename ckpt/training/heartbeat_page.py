"""What a rank tells whoever looks after it, and is told: one small page of shared memory a rank.

`ckpt-run` makes the page and names it in CKPT_PULSE; a rank without one does nothing here. Each field is eight bytes, written
in one piece; a beat costs a microsecond and no system call.

    0 beats   1 step   2 phase   3 since (ns, CLOCK_MONOTONIC)   4 committed step   5 loss (float)   6 pid   7 stop at step
    8 stop heard   9 stop agreed   10 batch   11 bad step   12 bad kind   13 bad batch   14 bad loss, 15 its limit (floats)
    16 computed (ns, sum)   17 trouble   18 restored step   19 ended   20 asked to end (ns, CLOCK_MONOTONIC)
    21 durable step   22 line of training of the committed step

All ranks must stop after the same step, and none may wait for another to find out which. Who looks after them writes a step
into all pages (`stop_at`). A rank that comes by in time writes down that it has heard, and goes no further than that step. Once
all have heard, they are told so (`stop_agreed`), and each saves and ends there. Where one was past it already, a later
step is named; those that wait at the earlier one go on then.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import math
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

from ckpt.storage.base.errors import InvalidArgument
from ckpt.training import cuda_timer

PAGE_VARIABLE = "CKPT_PULSE"
RESTORE_LIMIT_VARIABLE = "CKPT_BEFORE"
"""The environment variable by which `ckpt-run` lets a job restore a step below a number, where later ones may be spoiled."""
PHASES = ("start", "load", "step", "save", "eval", "compile", "end")
_STEPPING, _SAVE = map(PHASES.index, ("step", "save"))
STACKS_SIGNAL = signal.SIGUSR2
"""Makes a rank write the stacks of all its threads into its log."""

Trouble = Literal["", "unusable", "damaged"]
"""unusable: what a rank was given, such as the URL. damaged: all steps that are saved."""
_TROUBLES: tuple[Trouble, ...] = ("", "unusable", "damaged")

BadLossKind = Literal["not finite", "spike"]
_BAD_LOSS_KINDS: tuple[BadLossKind, ...] = ("not finite", "spike")

_BEAT_COUNT, _STEP, _PHASE, _SINCE, _COMMITTED, _LOSS, _PID, _STOP_STEP = range(8)
_STOP_ACKNOWLEDGED, _STOP_CONFIRMED, _BATCH, _BAD_STEP, _BAD_KIND, _BAD_BATCH, _BAD_LOSS, _BAD_LIMIT = range(8, 16)
_COMPUTED, _TROUBLE, _RESTORED, _ENDED, _SIGTERM_AT, _DURABLE, _LINE = range(16, 23)
_PAGE_BYTES = 4096
_NEVER = -(1 << 62)

_STOP_CONFIRM_SECONDS = 600.0
"""A rank that was asked to stop after a step waits there so long for the word that all have heard: the others hear at the end
of a step. Then it stops all the same, for whoever asked is dead."""


@dataclass(frozen=True, slots=True)
class BadLoss:
    """A loss that shows that training has gone wrong."""

    step: int
    kind: BadLossKind
    loss: float
    limit: float
    """What it should have stayed below; infinite where it was not even finite."""
    batch: int
    """The global batch that was handed out last (`ckpt.training.data`); -1 where that is not known."""


@dataclass(frozen=True, slots=True)
class RankHeartbeat:
    """What a rank said last."""

    beats: int
    step: int
    """Done last; -1 before the first."""
    phase: str
    since: float
    """When it said so, by CLOCK_MONOTONIC."""
    committed: int
    """Newest step that it knows to be committed; -1 none."""
    loss: float
    """Of the newest step that one was given for; not a number before the first."""
    pid: int
    acknowledged_stop: int | None = None
    """The step to stop after that it has heard of."""
    bad: BadLoss | None = None
    """The first bad loss of this process."""
    compute_seconds: float = 0.0
    """In all that was marked by `compute`."""
    trouble: Trouble = ""
    """Where it fails for what a restart hardly changes."""
    restored: int = -1
    """The step that it went on from; -1 none."""
    ended: bool = False
    """Its process is over. Who looks after it says so."""
    sigterm_at: float = 0.0
    """When it was sent SIGTERM last, by CLOCK_MONOTONIC; 0 never."""
    durable: int = -1
    """Newest step that it knows to be committed in another place than the memory of hosts; -1 none."""
    line: int = 0
    """The line of training of the step that it has committed last; 0 before that."""


class HeartbeatPage:
    """The page at `path`. new: it is made; whoever looks for it finds all of it, or nothing."""

    def __init__(self, path: str | os.PathLike[str], *, new: bool = False) -> None:
        made = f"{os.fspath(path)}.new" if new else path
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
            for field in (_STEP, _COMMITTED, _BATCH, _BAD_STEP, _RESTORED, _DURABLE):
                self._fields[field] = -1
            for field in (_STOP_STEP, _STOP_ACKNOWLEDGED, _STOP_CONFIRMED):
                self._fields[field] = _NEVER
            self._floats[_LOSS] = math.nan
            self._fields[_SINCE] = time.monotonic_ns()
            os.replace(made, path)

    # --- the rank ----------------------------------------------------------------------------------------------

    def beat(self, phase: int, step: int | None = None) -> None:
        """Say that this process is alive, and what it does now."""
        fields = self._fields
        if step is not None:
            fields[_STEP] = step
        fields[_PHASE] = phase
        fields[_SINCE] = time.monotonic_ns()
        fields[_BEAT_COUNT] += 1

    def beat_if_idle(self, step: int, loss: Any, until_step: int, deadline_ns: int) -> bool:
        """The beat of a step at which nothing else is to be done; False, and nothing said, where something may be.

        until_step: the next one at which something is. until: the moment of that, in ns of CLOCK_MONOTONIC. In one piece, as
        a training step leaves nothing in the caches: each function that is called costs microseconds.
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
        """Publish that a step is committed. On a new line of training it is the newest, whatever its number."""
        if line > self._fields[_LINE]:
            self._fields[_COMMITTED] = step
            self._fields[_LINE] = line
        elif step > self._fields[_COMMITTED]:
            self._fields[_COMMITTED] = step

    def publish_durable(self, step: int) -> None:
        """Publish that a step is committed in another place than the memory of hosts."""
        if step > self._fields[_DURABLE]:
            self._fields[_DURABLE] = step

    def publish_restored(self, step: int, again: bool = False) -> None:
        """Publish that this rank goes on from a step; -1 where there is none yet. Of several Checkpointers the newest counts.

        again: this Checkpointer has restored a step before, or saved one.
        """
        self._fields[_RESTORED] = step if again else max(step, self._fields[_RESTORED])
        self._fields[_TROUBLE] = _TROUBLES.index("")  # what it met before it could get around
        self.publish_committed(step)

    def publish_loss(self, loss: float) -> None:
        self._floats[_LOSS] = loss

    def publish_batch(self, batch: int) -> None:
        """Say that the loop has taken this global batch."""
        self._fields[_BATCH] = batch

    def last_batch(self) -> int:
        """What was taken last; -1 nothing."""
        return self._fields[_BATCH]

    def publish_bad_loss(self, bad: BadLoss) -> None:
        """Say that a loss is bad. Only the first is kept."""
        fields, floats = self._fields, self._floats
        if fields[_BAD_STEP] < 0:
            fields[_BAD_KIND], fields[_BAD_BATCH] = _BAD_LOSS_KINDS.index(bad.kind), bad.batch
            floats[_BAD_LOSS], floats[_BAD_LIMIT] = bad.loss, bad.limit
            fields[_BAD_STEP] = bad.step  # last: by it the others are read

    def add_compute_ns(self, nanoseconds: int) -> None:
        """Say that this rank has worked so long by itself."""
        self._fields[_COMPUTED] += nanoseconds

    def publish_trouble(self, trouble: Trouble) -> None:
        """Say what is wrong for as long as nobody mends it."""
        self._fields[_TROUBLE] = _TROUBLES.index(trouble)
        self.beat(self._fields[_PHASE])

    def acknowledge_stop(self, step: int) -> None:
        """Write down the stop that is asked for, where it is not before this step, which is done and not told yet: who sees
        the step first would take this rank for too late."""
        if step <= (stop := self._fields[_STOP_STEP]):
            self._fields[_STOP_ACKNOWLEDGED] = stop

    def should_stop(self, step: int) -> bool:
        """Whether the job is to be saved after this step, and to end. Every rank is told so after the same step."""
        return self._fields[_STOP_STEP] != _NEVER and self._wait_for_stop_confirmation(step)

    def _wait_for_stop_confirmation(self, step: int) -> bool:
        fields = self._fields
        next_beat = time.monotonic()
        until = next_beat + _STOP_CONFIRM_SECONDS
        while True:
            stop = fields[_STOP_STEP]
            if fields[_STOP_ACKNOWLEDGED] != stop:
                if step > stop:
                    return False  # too late, as the page shows: another step will be named
                fields[_STOP_ACKNOWLEDGED] = stop
            if step < stop:
                return False
            if fields[_STOP_CONFIRMED] == stop or time.monotonic() > until:
                return True
            if time.monotonic() >= next_beat:  # it is alive, and waits
                self.beat(_SAVE)
                next_beat = time.monotonic() + 1.0
            time.sleep(0.001)

    def attach_process(self) -> None:
        """This process is the rank. What it has done before, such as imports, is no silence."""
        self._fields[_SINCE] = time.monotonic_ns()
        self._fields[_PID] = os.getpid()
        with contextlib.suppress(ValueError, OSError, AttributeError):  # no stderr, or not the main thread of it
            faulthandler.register(STACKS_SIGNAL, file=sys.stderr, all_threads=True)

    def defer_sigterm(self) -> None:
        """From now on SIGTERM does not end this process, but is told: who sends it to all of a job wants it to be saved.

        Who looks after it ends it where nobody else was asked to end. What the program itself does with SIGTERM goes before.
        """
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _record_sigterm)

    def detach_process(self) -> None:
        """For a forked child: go on with a copy of the page."""
        page = memoryview(bytearray(self._map))
        self._fields, self._floats = page.cast("q"), page.cast("d")
        self._fields[_STOP_STEP] = -1  # no step of a training loop `passes`: a Checkpointer is to refuse it

    # --- who looks after it ------------------------------------------------------------------------------------

    def read(self) -> RankHeartbeat:
        fields, floats = self._fields, self._floats
        phase = fields[_PHASE]
        bad = None
        if (step := fields[_BAD_STEP]) >= 0:
            bad = BadLoss(step, _BAD_LOSS_KINDS[fields[_BAD_KIND]], floats[_BAD_LOSS], floats[_BAD_LIMIT], fields[_BAD_BATCH])
        return RankHeartbeat(
            fields[_BEAT_COUNT],
            fields[_STEP],
            PHASES[phase] if 0 <= phase < len(PHASES) else "start",
            fields[_SINCE] / 1e9,
            fields[_COMMITTED],
            floats[_LOSS],
            fields[_PID],
            None if fields[_STOP_ACKNOWLEDGED] == _NEVER else fields[_STOP_ACKNOWLEDGED],
            bad,
            fields[_COMPUTED] / 1e9,
            _TROUBLES[fields[_TROUBLE]],
            fields[_RESTORED],
            bool(fields[_ENDED]),
            fields[_SIGTERM_AT] / 1e9,
            fields[_DURABLE],
            fields[_LINE],
        )

    def publish_ended(self) -> None:
        """Note that its process is over."""
        self._fields[_ENDED] = 1

    def request_stop(self, step: int) -> None:
        """Ask the job to be saved after this step, and to end. See recovery/policy/coordinated_stop.py for which."""
        self._fields[_STOP_STEP] = step

    def confirm_stop(self, step: int) -> None:
        """Tell that all ranks have heard of this step."""
        self._fields[_STOP_CONFIRMED] = step

    def close(self) -> None:
        self._fields.release()
        self._floats.release()
        self._map.close()


def _reserve(file: int, path: str | os.PathLike[str]) -> None:
    """Let a page have its bytes for certain: one that can't be had when it is touched kills the process. An error names it."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, _PAGE_BYTES)
        else:
            os.ftruncate(file, _PAGE_BYTES)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


_own_page: HeartbeatPage | None = None
_is_looked_up = False


def _record_sigterm(number: int, frame: FrameType | None) -> None:
    """A signal has asked this process to end."""
    if _own_page is not None:
        _own_page._fields[_SIGTERM_AT] = time.monotonic_ns()


def own_page() -> HeartbeatPage | None:
    """The page of this process; None where nobody looks after it."""
    global _own_page, _is_looked_up
    if not _is_looked_up:
        _is_looked_up = True
        if path := os.environ.get(PAGE_VARIABLE):
            with contextlib.suppress(OSError, ValueError):  # of a job that is over
                found = HeartbeatPage(path)
                if found.read().pid in (0, os.getpid()):  # else this is a helper that a rank has started
                    _own_page = found
                    _own_page.attach_process()
    return _own_page


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Say that what is done here is no training step: "eval", "compile", "load" or "save". Each has a limit of its own."""
    pulse = own_page()
    if pulse is None:
        yield
        return
    before = pulse.read().phase
    pulse.beat(PHASES.index(name))
    try:
        yield
    finally:
        pulse.beat(PHASES.index(before))


@contextlib.contextmanager
def compute() -> Iterator[None]:
    """Mark what a rank does in a step without waiting for other ranks: load a batch, forward, backward but for its collectives.

    Where the steps of all ranks end together, this shows `ckpt-run` for which rank the others wait. Several in a step add up.
    Where torch uses a CUDA device, it is the time on its current stream, which is not waited for. With jax wait for the result.
    """
    pulse = own_page()
    if pulse is None:
        yield
        return
    began, device = time.monotonic_ns(), cuda_timer.begin()
    try:
        yield
    finally:
        if device is None:
            pulse.add_compute_ns(time.monotonic_ns() - began)
        else:
            pulse.add_compute_ns(cuda_timer.end(device))


@contextlib.contextmanager
def publish_trouble_on(trouble: Trouble, *kinds: type[Exception]) -> Iterator[None]:
    """Say of these errors, and of what comes of them, that another start would meet them, too. Not where a device could not be
    read (EIO): it may be a server that is away."""
    try:
        yield
    except Exception as error:
        found = list(_causes(error))
        is_transient = any(getattr(cause, "errno", None) == errno.EIO for cause in found)
        if any(isinstance(cause, kinds) for cause in found) and not is_transient and (pulse := own_page()) is not None:
            pulse.publish_trouble(trouble)
        raise


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def restore_limit_from_env(environ: Mapping[str, str] = os.environ) -> int | None:
    """The number below which to restore; None where the newest step is wanted."""
    if not (text := environ.get(RESTORE_LIMIT_VARIABLE)):
        return None
    if not text.isdecimal():
        raise InvalidArgument(
            f"{RESTORE_LIMIT_VARIABLE}={text!r} is no step; unset it, or give the number below which to restore"
        )
    return int(text)


def reset_after_fork() -> None:
    """This process was forked, and is a rank all the same."""
    global _own_page, _is_looked_up
    _own_page, _is_looked_up = None, False


_blocked_signal_mask: set[int] | None = None


def _before_fork() -> None:
    """A signal that comes to the child before it has let go of the handler waits until it has."""
    global _blocked_signal_mask
    if signal.getsignal(signal.SIGTERM) is _record_sigterm:
        _blocked_signal_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork_in_parent() -> None:
    global _blocked_signal_mask
    if _blocked_signal_mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _blocked_signal_mask)
        _blocked_signal_mask = None


def _after_fork() -> None:
    """A child is not the rank. What it has of the rank's objects writes into a page of its own, which nobody reads."""
    global _own_page, _is_looked_up
    if _own_page is not None:
        _own_page.detach_process()
    _own_page, _is_looked_up = None, True
    if signal.getsignal(signal.SIGTERM) is _record_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _after_fork_in_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork)
