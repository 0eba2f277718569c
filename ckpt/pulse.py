"""What a rank tells whoever looks after it, and is told: one small page of shared memory a rank.

`ckpt-run` makes the page and names it in CKPT_PULSE; a rank without one does nothing here. Each field is eight bytes, written
in one piece; a beat costs a microsecond and no system call.

    0 beats   1 step   2 phase   3 since (ns, CLOCK_MONOTONIC)   4 committed step   5 loss (float)   6 pid   7 stop at step
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

VARIABLE = "CKPT_PULSE"
PHASES = ("start", "load", "step", "save", "eval", "compile", "end")
STACKS = signal.SIGUSR2
"""Makes a rank write the stacks of all its threads into its log."""

_BEATS, _STEP, _PHASE, _SINCE, _COMMITTED, _LOSS, _PID, _STOP = range(8)
_BYTES = 4096
_NEVER = -(1 << 62)


@dataclass(frozen=True, slots=True)
class Beat:
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
    pid: int


class Pulse:
    """The page at `path`, made where it is not there."""

    def __init__(self, path: str | os.PathLike[str], *, new: bool = False) -> None:
        flags = os.O_RDWR | (os.O_CREAT if new else 0)
        file = os.open(path, flags, 0o600)
        try:
            if new:
                os.ftruncate(file, _BYTES)
            self._map = mmap.mmap(file, _BYTES)
        finally:
            os.close(file)
        self._fields = memoryview(self._map).cast("q")
        if new:
            self._fields[_STEP] = self._fields[_COMMITTED] = -1
            self._fields[_STOP] = _NEVER
            self._fields[_SINCE] = time.monotonic_ns()

    # --- the rank ----------------------------------------------------------------------------------------------

    def beat(self, phase: int, step: int | None = None) -> None:
        """Say that this process is alive, and what it does now."""
        fields = self._fields
        if step is not None:
            fields[_STEP] = step
        fields[_PHASE] = phase
        fields[_SINCE] = time.monotonic_ns()
        fields[_BEATS] += 1

    def committed(self, step: int) -> None:
        """Say that a step is committed."""
        if step > self._fields[_COMMITTED]:
            self._fields[_COMMITTED] = step

    def loss(self, loss: float) -> None:
        self._fields[_LOSS] = struct.unpack("q", struct.pack("d", loss))[0]

    def should_stop(self, step: int) -> bool:
        """Whether the job is to be saved after this step, and to end."""
        stop = self._fields[_STOP]
        return stop != _NEVER and step >= stop

    def attach(self) -> None:
        """This process is the rank."""
        self._fields[_PID] = os.getpid()
        with contextlib.suppress(ValueError, OSError, AttributeError):  # no stderr, or not the main thread of it
            faulthandler.register(STACKS, file=sys.stderr, all_threads=True)

    # --- who looks after it ------------------------------------------------------------------------------------

    def read(self) -> Beat:
        fields = self._fields
        phase = fields[_PHASE]
        return Beat(
            fields[_BEATS], fields[_STEP], PHASES[phase] if 0 <= phase < len(PHASES) else "start", fields[_SINCE] / 1e9,
            fields[_COMMITTED], struct.unpack("d", struct.pack("q", fields[_LOSS]))[0], fields[_PID],
        )  # fmt: skip

    def stop_at(self, step: int) -> None:
        """Let the job be saved after this step, and end."""
        self._fields[_STOP] = step

    def close(self) -> None:
        self._fields.release()
        self._map.close()


_mine: Pulse | None = None
_looked = False


def mine() -> Pulse | None:
    """The page of this process; None where nobody looks after it."""
    global _mine, _looked
    if not _looked:
        _looked = True
        if path := os.environ.get(VARIABLE):
            with contextlib.suppress(OSError, ValueError):  # of a job that is over
                found = Pulse(path)
                if found.read().pid in (0, os.getpid()):  # else this is a helper that a rank has started
                    _mine = found
                    _mine.attach()
    return _mine


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Say that what is done here is no training step: "eval", "compile", "load" or "save". Each has a limit of its own."""
    pulse = mine()
    if pulse is None:
        yield
        return
    before = pulse.read().phase
    pulse.beat(PHASES.index(name))
    try:
        yield
    finally:
        pulse.beat(PHASES.index(before))


def look_again() -> None:
    """This process was forked, and is a rank all the same."""
    global _mine, _looked
    _mine, _looked = None, False


def _after_fork() -> None:
    """A child is not the rank."""
    global _mine, _looked
    _mine, _looked = None, True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
