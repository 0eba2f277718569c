"""Looks after the ranks of one attempt on this host: what they do, and what goes wrong with them first."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from ckpt.pulse import STACKS, Beat
from ckpt.recovery import host
from ckpt.recovery.agents import Slowest, Wrong
from ckpt.recovery.decide import Cause
from ckpt.recovery.launch import Rank
from ckpt.recovery.ledger import Name
from ckpt.recovery.limits import Limits
from ckpt.recovery.straggle import Measure, Pace

_ABSENT_SECONDS = 1.0
"""Who has not looked for so long can't say who was silent."""
_SILENT_SECONDS = 0.1
"""Who has said something since is not stopped."""
_STOPPED_SECONDS = 0.5
"""A process may be stopped for a moment, as by a debugger that attaches."""

_ASKED_SECONDS = 1.0
"""Who sends SIGTERM to all processes of a job has sent it to `ckpt-run` by then, too."""

_PACE_SECONDS = 10.0
"""How fast the job goes on is that of this last time."""

_SPIES, _SPY_SECONDS = 8, 5.0
"""So many stacks are read at once, and so long at most."""

_NO_MEMORY = "was killed by the kernel, as there was no memory left (SIGKILL)"
_SAID = 400
"""Characters of the last line of a log. The names of long folders come first in it, and the reason after them."""

_NO_REASON = ("This typically refers to a problem with your application.", "Please see the FAQ page", "====")
"""How mpiexec of MPICH ends what it says of a rank that has failed."""


class Watch:
    """The ranks of one attempt. Call `look` often."""

    def __init__(self, ranks: Sequence[Rank], limits: Limits, best: int, straggler_seconds: float = 60.0) -> None:
        self.ranks = tuple(ranks)
        self.wrong: Wrong | None = None
        """What went wrong first."""
        self.stop_step: int | None = None
        """The step to stop after, where there is one."""
        self.leaving = False
        """Whether the agent was asked to end: a stop will come."""
        self._limits = limits
        self._best = best
        self._beats = {rank.number: rank.pulse.read() for rank in ranks}
        self._measures = {rank.number: Measure(rank.number, straggler_seconds) for rank in ranks}
        self._stopped: dict[int, float] = {}
        self._running = {rank.number: rank for rank in ranks}
        self._kills = host.memory_kills()
        self._has_stacks = False
        self._told_to_end = False
        self._looked = time.monotonic()
        self._forgiven = 0.0
        self._passed: deque[tuple[float, int]] = deque()  # when the newest step was seen to grow, and to what

    # --- what they do ------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether all have ended."""
        return not self._running

    @property
    def beats(self) -> dict[int, Beat]:
        """What each has said last, by number."""
        return dict(self._beats)

    @property
    def heard(self) -> bool:
        """Whether any of them uses ckpt."""
        return any(beat.pid for beat in self._beats.values())

    @property
    def step(self) -> int:
        """The last one that all have done."""
        return min(beat.step for beat in self._beats.values())

    @property
    def newest(self) -> int:
        """The last one that any has done."""
        return max(beat.step for beat in self._beats.values())

    @property
    def step_seconds(self) -> float:
        """What a step takes of late, with the saves between them; without, where none was seen yet."""
        if len(self._passed) < 2:
            return self._limits.usual_step()
        (began, first), *_, (ended, last) = self._passed
        return (ended - began) / (last - first)

    @property
    def newest_committed(self) -> tuple[int, int]:
        """Line of training and number of the newest step that is committed; (0, -1) where there is none."""
        return max((beat.line, beat.committed) for beat in self._beats.values())

    @property
    def durable(self) -> int:
        """The newest that is committed in another place than the memory of hosts; -1 none."""
        return max(beat.durable for beat in self._beats.values())

    @property
    def saved(self) -> int:
        """The newest that was committed in this attempt; -1 none."""
        _, committed = self.newest_committed
        return committed if committed > self.restored else -1

    @property
    def restored(self) -> int:
        """The step that this attempt went on from; -1 none."""
        return max(beat.restored for beat in self._beats.values())

    @property
    def spent(self) -> Name:
        """What the first of them does."""
        beat = self._beats[self.ranks[0].number]
        if beat.phase == "load":
            return "restore"
        if beat.phase == "save":
            return "stall"
        if beat.phase == "start" and beat.step < 0:
            return "spawn"
        return "redo" if beat.step + 1 <= self._best else "useful"

    def slowest(self, now: float, late: Collection[int] = ()) -> Slowest | None:
        """The one that is behind; None where none uses ckpt. late: of several at one step, one of these."""
        heard = [(number, beat) for number, beat in self._beats.items() if beat.pid and number in self._running]
        if not heard:
            return None
        number, beat = min(heard, key=lambda each: (each[1].step, each[0] not in late, each[1].since))
        if late and beat.step < 0:  # nobody has done a step: one that has not come so far as to open a Checkpointer is behind
            number = min((n for n in self._running if not self._beats[n].pid), default=number)
            beat = self._beats[number]
        return Slowest(number, beat.step, now - beat.since, beat.phase)

    @property
    def paces(self) -> tuple[Pace, ...]:
        """Of those that run, where enough was seen."""
        found = (self._measures[number].pace for number in self._running)
        return tuple(pace for pace in found if pace is not None)

    def stop(self, step: int, agreed: bool) -> None:
        """Ask them to save after this step, and to end; agreed: the ranks of all hosts have heard of it."""
        self.stop_step = step
        if not self.heard and not self._told_to_end:  # they may know what to do with a signal
            self._told_to_end = True
            for rank in self._running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.process.pid, signal.SIGTERM)
        for rank in self._running.values():
            rank.pulse.stop_at(step)
            if agreed:
                rank.pulse.stop_agreed(step)

    @property
    def stops(self) -> Literal["ahead", "heard", "past"]:
        """Of the step to stop after: as in agents.Report."""
        beats = [self._beats[number] for number in self._running]
        if self.stop_step is None:
            return "ahead"
        if all(beat.heard == self.stop_step for beat in beats):
            return "heard"
        return "past" if any(b.step >= self.stop_step and b.heard != self.stop_step for b in beats) else "ahead"

    # --- what goes wrong ---------------------------------------------------------------------------------------

    def look(self, now: float) -> list[Rank]:
        """See how they are; returns those that have ended since. now: by CLOCK_MONOTONIC."""
        before = self._looked
        if now - before > _ABSENT_SECONDS:  # it was this process, or the whole host, that stood still
            self._forgiven = now
            self._stopped.clear()
        self._looked = now
        ended = [rank for rank in self._running.values() if rank.ended()]
        for rank in ended:
            rank.pulse.ended()
            del self._running[rank.number]
        self._listen(before)
        if (newest := self.newest) >= 0 and (not self._passed or newest > self._passed[-1][1]):
            self._passed.append((now, newest))
            while len(self._passed) > 2 and now - self._passed[0][0] > _PACE_SECONDS:
                self._passed.popleft()
        failed = sorted((rank for rank in ended if rank.status != 0), key=self._order)
        if self.wrong is None:
            bad = self._bad()  # ranks whose loss was good fail, too, where another leaves out a save
            if bad is not None:
                self.wrong = bad
            elif failed:
                cause = self._cause(failed[0])
                detail = _NO_MEMORY if cause == "out of memory" else _end(failed[0])
                self.wrong = Wrong(cause, tuple(rank.number for rank in failed), detail)
            else:
                self.wrong = self._asked(now) or self._silent(now)
        return ended

    def _listen(self, looked: float) -> None:
        """What they say, and how long it took them. looked: when they were heard before."""
        for rank in self.ranks:
            before, beat = self._beats[rank.number], rank.pulse.read()
            if beat.beats != before.beats:
                if before.pid:  # on the average, where several came since the last look: the first lasted until that
                    took = (beat.since - before.since) / (beat.beats - before.beats)
                    if before.since >= self._forgiven:
                        self._limits.learn(before.phase, max(took, looked - before.since))
                    self._measures[rank.number].learn(before, beat)
                self._beats[rank.number] = beat
            elif _unasked(beat) != _unasked(before):
                self._beats[rank.number] = beat

    def _bad(self) -> Wrong | None:
        """The first loss by which one of them diverged."""
        found = [(beat.bad, number) for number, beat in self._beats.items() if beat.bad is not None]
        if not found:
            return None
        first = min(bad.step for bad, _ in found)
        ranks = tuple(number for bad, number in found if bad.step == first)
        bad = next(bad for bad, _ in found if bad.step == first)
        return Wrong("diverged", ranks, f"had a loss of {bad.loss:g} in step {bad.step}", bad=bad)

    def _asked(self, now: float) -> Wrong | None:
        """Ranks that were asked to end, where the job was not: they hold it back (Pulse.hold), and are ended here."""
        beats = {number: self._beats[number] for number in self._running}
        ranks = tuple(number for number, beat in beats.items() if 0 < beat.asked < now - _ASKED_SECONDS)
        if not ranks or self.leaving or self.stop_step is not None:
            return None
        return Wrong("signal", ranks, "was asked to end by SIGTERM")

    def _silent(self, now: float) -> Wrong | None:
        for rank in self._running.values():
            beat = self._beats[rank.number]
            if (beat.pid and self._silence(beat, now) < _SILENT_SECONDS) or not rank.pid or host.state(rank.pid) != "T":
                self._stopped.pop(rank.number, None)
                continue
            since = self._stopped.setdefault(rank.number, now)
            if now - since >= _STOPPED_SECONDS:
                detail = f"was stopped (SIGSTOP) and stayed so for {now - since:.1f} s"
                return Wrong("stopped", (rank.number,), detail, now - self._beats[rank.number].since)
        beats = {number: self._beats[number] for number in self._running}
        least = self._limits.floor
        late = {number: beat for number, beat in beats.items() if beat.pid and self._silence(beat, now) > least}
        late = {number: beat for number, beat in late.items() if self._silence(beat, now) > self._limits.of(beat.phase)}
        if not late:
            return None
        for beat in late.values():
            self._limits.cut_off(beat.phase, self._silence(beat, now))
        # Whoever is behind is the cause: the others wait for it, in a collective or for its part of a save.
        slow = self.slowest(now, late)
        assert slow is not None
        more = self._went_before(slow.step)
        if slow.phase == "end" and (line := _last_line(next(r.log for r in self.ranks if r.number == slow.rank))):
            more += f"; its log ends with: {line}"  # perhaps an exception that has taken it out of its loop
        detail = slow.in_words(str(self.ranks[0].log.parent), more)
        return Wrong("hang", (slow.rank,), detail, slow.silent_seconds)

    def _went_before(self, step: int) -> str:
        """Ranks that have left, and have done no more than those that wait now: perhaps for them."""
        said = ""
        for number, beat in self._beats.items():
            if beat.pid and beat.step <= step:
                if number not in self._running:
                    said += f"; rank {number} had ended after step {beat.step}, with status 0"
                elif beat.phase == "end":
                    said += f"; rank {number} had closed its Checkpointer after step {beat.step}"
        return said

    def _silence(self, beat: Beat, now: float) -> float:
        """Seconds, of which this process has seen all."""
        return now - max(beat.since, self._forgiven)

    def _order(self, rank: Rank) -> tuple[bool, bool]:
        """Signals first, and who fails as another has failed last."""
        return rank.status > 0, not self._beats[rank.number].trouble

    def _cause(self, rank: Rank) -> Cause:
        if rank.status == -signal.SIGKILL and host.memory_kills() > self._kills:
            return "out of memory"
        beat = self._beats[rank.number]
        trouble = beat.trouble if beat.step < 0 else ""  # else the program has found a way around it
        return "signal" if rank.status < 0 else trouble or "exit"

    def keep_stacks(self) -> None:
        """The stacks of all threads of all ranks, beside their logs, before they are killed."""
        if self._has_stacks:
            return
        self._has_stacks = True
        spy = _py_spy()
        with ThreadPoolExecutor(_SPIES) as pool:
            for rank in self._running.values():
                pool.submit(self._keep_stack, rank, spy)

    def _keep_stack(self, rank: Rank, spy: str | None) -> None:
        if spy is not None and _spied(spy, rank):
            return
        if self._beats[rank.number].pid == rank.pid and host.state(rank.pid) != "T":
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, STACKS)  # into its own log
                time.sleep(0.2)


def _unasked(beat: Beat) -> tuple[int, float, int, int]:
    """What changes without a beat: a Checkpointer is opened, a signal arrives, a save in the background is committed."""
    return beat.pid, beat.asked, beat.committed, beat.durable


def _spied(spy: str, rank: Rank) -> bool:
    """Whether py-spy has written the stacks of a rank; it may not be allowed to, or not know this Python."""
    command = [spy, "dump", "--nonblocking", "--pid", str(rank.pid)]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        with (rank.log.parent / f"rank-{rank.number}.stacks").open("wb") as out:
            done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=_SPY_SECONDS, check=False)
        return done.returncode == 0
    return False


def _py_spy() -> str | None:
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _end(rank: Rank) -> str:
    """In words, with the last thing that the rank has said."""
    code = rank.status
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"
    line = _last_line(rank.log)
    return f"exited with status {code} ({line})" if line else f"exited with status {code}"


def _last_line(log: Path) -> str:
    """That says something."""
    lines = [line.strip() for line in _tail(log).splitlines() if line.strip() and not line.startswith(_NO_REASON)]
    return lines[-1][:_SAID] if lines else ""


def _tail(path: Path, nbytes: int = 4096) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - nbytes))
        return file.read().decode("utf-8", "replace")
    return ""
