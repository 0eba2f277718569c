"""Keeps a job running: starts its ranks, notices what goes wrong, decides, and starts them again from what is saved."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from ckpt.pulse import STACKS
from ckpt.recovery import host, launch
from ckpt.recovery.decide import Budget, Cause, Failure, decide
from ckpt.recovery.guardian import Guardian
from ckpt.recovery.launch import Rank
from ckpt.recovery.ledger import Ledger, Name
from ckpt.recovery.limits import Limits
from ckpt.recovery.record import Record
from ckpt.storage.errors import CkptError

log = logging.getLogger("ckpt.run")

_TICK_SECONDS = 0.05
_STOPPED_SECONDS = 0.5
"""A process may be stopped for a moment, as by a debugger that attaches."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to run, and how."""

    command: tuple[str, ...]
    ranks: int
    folder: Path
    """Of the run: its record, its ledger, the logs."""
    grace_seconds: float = 30.0
    """From a signal to the end: time to save."""
    restarts: int = 10
    """In a row, without a newer step."""
    limits: Limits = field(default_factory=Limits)
    show: str = "0"
    """Whose output goes to the console: "0", "all" or "none"."""


class Coordinator:
    """One run of a job on this host, from the main thread."""

    def __init__(self, job: Job, say: Callable[[str], None]) -> None:
        self._job = job
        self._say = say
        self._lock = _lock(job.folder)
        self._record = Record(job.folder)
        self._ledger = Ledger(job.folder)
        before = [entry.attempt for entry in self._record.entries()]
        self._attempt = max(before, default=-1) + 1
        self._run = secrets.token_hex(6)
        shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._pages = Path(tempfile.mkdtemp(prefix="ckpt-run-", dir=shared))
        self._best = -1
        self._asked: int | None = None
        self._asked_at = 0.0
        self._signals = 0

    def run(self) -> int:
        """The exit status: 0 the job has ended well, 1 it was given up, 128 + n it was asked to end by signal n."""
        host.adopt_orphans()
        guardian = Guardian()
        wake, woken = socket.socketpair()
        woken.setblocking(False)
        previous = {n: signal.signal(n, self._signalled) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        wakeup = signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        try:
            return self._attempts(guardian, wake)
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in previous.items():  # who asks again while it ends changes nothing
                signal.signal(number, handler if self._asked is None else signal.SIG_IGN)
            guardian.close()
            self._ledger.close()
            self._record.close()
            os.close(self._lock)
            shutil.rmtree(self._pages, ignore_errors=True)
            wake.close()
            woken.close()

    def _attempts(self, guardian: Guardian, wake: socket.socket) -> int:
        job = self._job
        budget, failures = Budget(job.restarts, job.restarts), []
        while True:
            logs = job.folder / "logs" / str(self._attempt)
            self._record.add(
                self._attempt, "start", f"{job.ranks} ranks: {' '.join(job.command)}", ranks=job.ranks,
                command=list(job.command), pages=str(self._pages), logs=str(logs), pid=os.getpid(),
            )  # fmt: skip
            began = time.monotonic()
            ranks = launch.start(job.command, job.ranks, self._attempt, self._run, self._pages, logs)
            for rank in ranks:
                guardian.add(rank.pid)
            try:
                failure = _Watch(self, ranks, wake, began).until_over()
            finally:
                self._ledger.now("stop", self._attempt)
                launch.stop(ranks)
                for rank in ranks:
                    guardian.remove(rank.pid)
            self._ledger.now("stop", self._attempt)
            if failure is None:
                self._record.add(self._attempt, "end", "all ranks have ended well")
                return 0
            failures.append(failure)
            decision = decide(failures, budget)
            budget = decision.budget
            self._best = max(self._best, failure.step)
            self._record.add(
                self._attempt, "failure", failure.detail, cause=failure.cause, ranks=list(failure.ranks), step=failure.step,
                committed=failure.committed,
            )  # fmt: skip
            self._record.add(
                self._attempt, "decision", decision.reason, action=decision.action, wait=decision.wait_seconds
            )
            self._ledger.now("decide", self._attempt)
            self._say(decision.reason)
            if decision.action == "halt":
                self._record.add(self._attempt, "end", decision.reason)
                return 128 + self._asked if self._asked is not None else 1
            until = time.monotonic() + decision.wait_seconds
            while time.monotonic() < until and self._asked is None:
                time.sleep(_TICK_SECONDS)
            self._ledger.now("wait", self._attempt)
            if self._asked is not None:
                self._record.add(self._attempt, "end", "it was asked to end")
                return 128 + self._asked
            self._attempt += 1

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._asked is None:
            self._asked, self._asked_at = number, time.monotonic()


class _Watch:
    """Looks after the ranks of one attempt."""

    def __init__(self, run: Coordinator, ranks: Sequence[Rank], wake: socket.socket, began: float) -> None:
        self._run = run
        self._ranks = ranks
        self._began = began
        self._beats = {rank.number: rank.pulse.read() for rank in ranks}
        self._stopped: dict[int, float] = {}
        self._running = {rank.number: rank for rank in ranks}
        self._kills = host.memory_kills()
        self._shown: dict[int, int] = {}
        self._stopping = False
        self._wake = wake
        self._select = selectors.DefaultSelector()
        self._select.register(wake, selectors.EVENT_READ, None)
        for rank in ranks:
            self._select.register(rank.pidfd, selectors.EVENT_READ, rank)

    def until_over(self) -> Failure | None:
        """Why it has ended; None where all ranks ended well."""
        try:
            while True:
                failure = self._look()
                self._show()
                if failure is not None or not self._running:
                    return failure
        finally:
            self._select.close()

    def _look(self) -> Failure | None:
        for key, _ in self._select.select(_TICK_SECONDS):
            if key.data is None:
                self._wake.recv(4096)
        ended = [rank for rank in self._running.values() if rank.process.poll() is not None]
        failed = [rank for rank in ended if rank.process.returncode != 0]
        for rank in ended:
            self._select.unregister(rank.pidfd)
            del self._running[rank.number]
        now = time.monotonic()
        self._read()
        self._run._ledger.now(self._doing(), self._run._attempt)
        if failed and not self._stopping:
            return self._failure(_cause(failed[0], self._kills), failed, _end(failed[0]))
        host.reap()
        return self._asked_to_end(now) or self._silent(now)

    def _read(self) -> None:
        """What the ranks say, and how long it took them."""
        for rank in self._running.values():
            before, beat = self._beats[rank.number], rank.pulse.read()
            if beat.beats != before.beats:
                if before.pid:  # on the average, where several came since the last look
                    took = (beat.since - before.since) / (beat.beats - before.beats)
                    self._run._job.limits.learn(before.phase, took)
                self._beats[rank.number] = beat

    def _doing(self) -> Name:
        beat = self._beats[0]
        if not beat.pid and not beat.beats:
            return "spawn"
        if beat.phase == "load":
            return "restore"
        if beat.phase == "save":
            return "stall"
        if beat.step < 0 and beat.phase == "start":
            return "spawn"
        return "redo" if beat.step + 1 <= self._run._best else "useful"

    # --- what goes wrong ---------------------------------------------------------------------------------------

    def _silent(self, now: float) -> Failure | None:
        for rank in self._running.values():
            if host.state(rank.pid) == "T":
                since = self._stopped.setdefault(rank.number, now)
                if now - since >= _STOPPED_SECONDS:
                    self._stacks([rank])
                    return self._failure(
                        "stopped", [rank], f"was stopped (SIGSTOP) and stayed so for {now - since:.1f} s"
                    )
            else:
                self._stopped.pop(rank.number, None)
        limits = self._run._job.limits
        heard = [(self._beats[rank.number], rank) for rank in self._running.values() if self._beats[rank.number].pid]
        if not any(now - beat.since > limits.of(beat.phase) for beat, _ in heard):
            return None
        # Whoever is behind is the cause: the others wait for it, in a collective or for its part of a save.
        beat, suspect = min(heard, key=lambda each: (each[0].step, each[0].since))
        self._stacks([rank for _, rank in heard])
        return self._failure(
            "hang", [suspect],
            f"said nothing for {now - beat.since:.1f} s in phase {beat.phase!r}; the stacks are in {suspect.log.parent}",
        )  # fmt: skip

    def _asked_to_end(self, now: float) -> Failure | None:
        run = self._run
        if run._asked is None:
            return None
        name = signal.Signals(run._asked).name
        if not self._stopping:
            self._stopping = True
            # A step that no rank has begun: far enough ahead that each hears of it in time.
            newest = max(beat.step for beat in self._beats.values())
            for rank in self._running.values():
                rank.pulse.stop_at(newest + 2)
            run._say(f"{name}: the ranks save and end, within {run._job.grace_seconds:g} s")
        if not self._running:
            return self._failure("asked", self._ranks, f"have saved and ended, as {name} asked")
        heard = any(beat.pid for beat in self._beats.values())
        if run._signals > 1 or not heard or now - run._asked_at > run._job.grace_seconds:
            why = (
                "do not use ckpt"
                if not heard
                else "had no time to save"
                if run._signals <= 1
                else "were not waited for"
            )
            return self._failure("asked", list(self._running.values()), f"were ended by {name}; they {why}")
        return None

    def _failure(self, cause: Cause, ranks: Sequence[Rank], detail: str) -> Failure:
        now = time.monotonic()
        self._read()
        beats = list(self._beats.values())
        if cause in ("hang", "stopped"):
            self._run._ledger.instead("detect", now - self._beats[ranks[0].number].since)
        return Failure(
            cause, tuple(rank.number for rank in ranks), detail, min(b.step for b in beats),
            max(b.committed for b in beats), now - self._began,
        )  # fmt: skip

    def _stacks(self, ranks: Sequence[Rank]) -> None:
        """Keep the stacks of all threads of a suspect, before it is killed."""
        for rank in ranks:
            spy = _py_spy()
            if spy is not None:
                command = [spy, "dump", "--nonblocking", "--pid", str(rank.pid)]
                with (
                    (rank.log.parent / f"rank-{rank.number}.stacks").open("wb") as out,
                    contextlib.suppress(OSError, subprocess.TimeoutExpired),
                ):
                    subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=5, check=False)
            elif self._beats[rank.number].pid == rank.pid and host.state(rank.pid) != "T":
                with contextlib.suppress(OSError):
                    os.kill(rank.pid, STACKS)  # into its own log
                    time.sleep(0.2)

    # --- the console -------------------------------------------------------------------------------------------

    def _show(self) -> None:
        which = self._run._job.show
        for rank in self._ranks if which == "all" else self._ranks[:1] if which == "0" else ():
            done = self._shown.get(rank.number, 0)
            with rank.log.open("rb") as file:
                file.seek(done)
                data = file.read()
            if data:
                self._shown[rank.number] = done + len(data)
                sys.stdout.buffer.write(data)
                sys.stdout.flush()


def _lock(folder: Path) -> int:
    """Keep other runs out of a folder until this process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise CkptError(f"another ckpt-run works in {folder}; wait for its end, or give another --run-dir") from error
    except OSError as error:
        raise CkptError(f"{folder} can't be used: {error.strerror}; give another --run-dir") from error
    return lock


def _py_spy() -> str | None:
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _cause(rank: Rank, kills: int) -> Cause:
    code = rank.process.returncode
    if code == -signal.SIGKILL and host.memory_kills() > kills:
        return "out of memory"
    return "signal" if code < 0 else "exit"


def _end(rank: Rank) -> str:
    """In words, with the last thing that the rank has said."""
    code = rank.process.returncode
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"
    lines = [line.strip() for line in _tail(rank.log).splitlines() if line.strip()]
    said = f" ({lines[-1][:200]})" if lines else ""
    return f"exited with status {code}{said}"


def _tail(path: Path, nbytes: int = 4096) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - nbytes))
        return file.read().decode("utf-8", "replace")
    return ""
