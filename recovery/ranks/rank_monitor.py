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

from ckpt.recovery.goodput.ledger import TimeCategory
from ckpt.recovery.policy.decide import Cause
from ckpt.recovery.policy.hang_limits import HangLimits
from ckpt.recovery.policy.stragglers import PaceMeter, RankPace
from ckpt.recovery.ranks import processes
from ckpt.recovery.ranks.launch import RankProcess
from ckpt.recovery.run_log.agent_reports import HostFailure, SlowestRank
from ckpt.training.heartbeat_page import STACKS_SIGNAL, RankHeartbeat

_UNOBSERVED_SECONDS = 1.0
"""Who has not looked for so long can't say who was silent."""
_SILENT_SECONDS = 0.1
"""Who has said something since is not stopped."""
_STOPPED_SECONDS = 0.5
"""A process may be stopped for a moment, as by a debugger that attaches."""

_SIGTERM_SECONDS = 1.0
"""Who sends SIGTERM to all processes of a job has sent it to `ckpt-run` by then, too."""

_PACE_SECONDS = 10.0
"""How fast the job goes on is that of this last time."""

_STACK_READERS, _STACK_SECONDS = 8, 5.0
"""So many stacks are read at once, and so long at most."""

_OOM_DETAIL = "was killed by the kernel, as there was no memory left (SIGKILL)"
_LAST_LINE_CHARACTERS = 400
"""Characters of the last line of a log. The names of long folders come first in it, and the reason after them."""

_MPIEXEC_NOISE = ("This typically refers to a problem with your application.", "Please see the FAQ page", "====")
"""How mpiexec of MPICH ends what it says of a rank that has failed."""


class RankMonitor:
    """The ranks of one attempt. Call `look` often."""

    def __init__(
        self, ranks: Sequence[RankProcess], limits: HangLimits, best_step: int, straggler_seconds: float = 60.0
    ) -> None:
        self.ranks = tuple(ranks)
        self.failure: HostFailure | None = None
        """What went wrong first."""
        self.stop_step: int | None = None
        """The step to stop after, where there is one."""
        self.is_leaving = False
        """Whether the agent was asked to end: a stop will come."""
        self._limits = limits
        self._best_step = best_step
        self._heartbeats = {rank.number: rank.heartbeat_page.read() for rank in ranks}
        self._measures = {rank.number: PaceMeter(rank.number, straggler_seconds) for rank in ranks}
        self._stopped: dict[int, float] = {}
        self._running = {rank.number: rank for rank in ranks}
        self._oom_kills = processes.oom_kill_count()
        self._has_stacks = False
        self._sent_sigterm = False
        self._polled_at = time.monotonic()
        self._observed_since = 0.0
        self._step_times: deque[tuple[float, int]] = deque()  # when the newest step was seen to grow, and to what

    # --- what they do ------------------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Whether all have ended."""
        return not self._running

    @property
    def heartbeats(self) -> dict[int, RankHeartbeat]:
        """What each has said last, by number."""
        return dict(self._heartbeats)

    @property
    def uses_ckpt(self) -> bool:
        """Whether any of them uses ckpt."""
        return any(beat.pid for beat in self._heartbeats.values())

    @property
    def step(self) -> int:
        """The last one that all have done."""
        return min(beat.step for beat in self._heartbeats.values())

    @property
    def newest(self) -> int:
        """The last one that any has done."""
        return max(beat.step for beat in self._heartbeats.values())

    @property
    def step_seconds(self) -> float:
        """What a step takes of late, with the saves between them; without, where none was seen yet."""
        if len(self._step_times) < 2:
            return self._limits.usual_step_seconds()
        (began, first), *_, (ended, last) = self._step_times
        return (ended - began) / (last - first)

    @property
    def newest_committed(self) -> tuple[int, int]:
        """Line of training and number of the newest step that is committed; (0, -1) where there is none."""
        return max((beat.line, beat.committed) for beat in self._heartbeats.values())

    @property
    def durable(self) -> int:
        """The newest that is committed in another place than the memory of hosts; -1 none."""
        return max(beat.durable for beat in self._heartbeats.values())

    @property
    def saved(self) -> int:
        """The newest that was committed in this attempt; -1 none."""
        _, committed = self.newest_committed
        return committed if committed > self.restored else -1

    @property
    def restored(self) -> int:
        """The step that this attempt went on from; -1 none."""
        return max(beat.restored for beat in self._heartbeats.values())

    @property
    def time_category(self) -> TimeCategory:
        """What the first of them does."""
        beat = self._heartbeats[self.ranks[0].number]
        if beat.phase == "load":
            return "restore"
        if beat.phase == "save":
            return "stall"
        if beat.phase == "start" and beat.step < 0:
            return "spawn"
        return "redo" if beat.step + 1 <= self._best_step else "useful"

    def slowest_rank(self, now: float, late: Collection[int] = ()) -> SlowestRank | None:
        """The one that is behind; None where none uses ckpt. late: of several at one step, one of these."""
        heard = [(number, beat) for number, beat in self._heartbeats.items() if beat.pid and number in self._running]
        if not heard:
            return None
        number, beat = min(heard, key=lambda each: (each[1].step, each[0] not in late, each[1].since))
        if late and beat.step < 0:  # nobody has done a step: one that has not come so far as to open a Checkpointer is behind
            number = min((n for n in self._running if not self._heartbeats[n].pid), default=number)
            beat = self._heartbeats[number]
        return SlowestRank(number, beat.step, now - beat.since, beat.phase)

    @property
    def paces(self) -> tuple[RankPace, ...]:
        """Of those that run, where enough was seen."""
        found = (self._measures[number].pace for number in self._running)
        return tuple(pace for pace in found if pace is not None)

    def request_stop(self, step: int, agreed: bool) -> None:
        """Ask them to save after this step, and to end; agreed: the ranks of all hosts have heard of it."""
        self.stop_step = step
        if not self.uses_ckpt and not self._sent_sigterm:  # they may know what to do with a signal
            self._sent_sigterm = True
            for rank in self._running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.process.pid, signal.SIGTERM)
        for rank in self._running.values():
            rank.heartbeat_page.request_stop(step)
            if agreed:
                rank.heartbeat_page.confirm_stop(step)

    @property
    def stop_progress(self) -> Literal["ahead", "heard", "past"]:
        """Of the step to stop after: as in agents.Report."""
        beats = [self._heartbeats[number] for number in self._running]
        if self.stop_step is None:
            return "ahead"
        if all(beat.acknowledged_stop == self.stop_step for beat in beats):
            return "heard"
        return "past" if any(b.step >= self.stop_step and b.acknowledged_stop != self.stop_step for b in beats) else "ahead"

    # --- what goes wrong ---------------------------------------------------------------------------------------

    def poll(self, now: float) -> list[RankProcess]:
        """See how they are; returns those that have ended since. now: by CLOCK_MONOTONIC."""
        before = self._polled_at
        if now - before > _UNOBSERVED_SECONDS:  # it was this process, or the whole host, that stood still
            self._observed_since = now
            self._stopped.clear()
        self._polled_at = now
        ended = [rank for rank in self._running.values() if rank.has_ended()]
        for rank in ended:
            rank.heartbeat_page.publish_ended()
            del self._running[rank.number]
        self._read_heartbeats(before)
        if (newest := self.newest) >= 0 and (not self._step_times or newest > self._step_times[-1][1]):
            self._step_times.append((now, newest))
            while len(self._step_times) > 2 and now - self._step_times[0][0] > _PACE_SECONDS:
                self._step_times.popleft()
        failed = sorted((rank for rank in ended if rank.status != 0), key=self._failure_order)
        if self.failure is None:
            bad = self._find_divergence()  # ranks whose loss was good fail, too, where another leaves out a save
            if bad is not None:
                self.failure = bad
            elif failed:
                cause = self._failure_cause(failed[0])
                detail = _OOM_DETAIL if cause == "out of memory" else _describe_end(failed[0])
                self.failure = HostFailure(cause, tuple(rank.number for rank in failed), detail)
            else:
                self.failure = self._find_signalled(now) or self._find_silent(now)
        return ended

    def _read_heartbeats(self, polled_at: float) -> None:
        """What they say, and how long it took them. looked: when they were heard before."""
        for rank in self.ranks:
            before, beat = self._heartbeats[rank.number], rank.heartbeat_page.read()
            if beat.beats != before.beats:
                if before.pid:  # on the average, where several came since the last look: the first lasted until that
                    took = (beat.since - before.since) / (beat.beats - before.beats)
                    if before.since >= self._observed_since:
                        self._limits.learn(before.phase, max(took, polled_at - before.since))
                    self._measures[rank.number].learn(before, beat)
                self._heartbeats[rank.number] = beat
            elif _fields_without_heartbeat(beat) != _fields_without_heartbeat(before):
                self._heartbeats[rank.number] = beat

    def _find_divergence(self) -> HostFailure | None:
        """The first loss by which one of them diverged."""
        found = [(beat.bad, number) for number, beat in self._heartbeats.items() if beat.bad is not None]
        if not found:
            return None
        first = min(bad.step for bad, _ in found)
        ranks = tuple(number for bad, number in found if bad.step == first)
        bad = next(bad for bad, _ in found if bad.step == first)
        return HostFailure("diverged", ranks, f"had a loss of {bad.loss:g} in step {bad.step}", bad=bad)

    def _find_signalled(self, now: float) -> HostFailure | None:
        """Ranks that were asked to end, where the job was not: they hold it back (Pulse.hold), and are ended here."""
        beats = {number: self._heartbeats[number] for number in self._running}
        ranks = tuple(number for number, beat in beats.items() if 0 < beat.sigterm_at < now - _SIGTERM_SECONDS)
        if not ranks or self.is_leaving or self.stop_step is not None:
            return None
        return HostFailure("signal", ranks, "was asked to end by SIGTERM")

    def _find_silent(self, now: float) -> HostFailure | None:
        for rank in self._running.values():
            beat = self._heartbeats[rank.number]
            if (
                (beat.pid and self._silent_seconds(beat, now) < _SILENT_SECONDS)
                or not rank.pid
                or processes.process_state(rank.pid) != "T"
            ):
                self._stopped.pop(rank.number, None)
                continue
            since = self._stopped.setdefault(rank.number, now)
            if now - since >= _STOPPED_SECONDS:
                detail = f"was stopped (SIGSTOP) and stayed so for {now - since:.1f} s"
                return HostFailure("stopped", (rank.number,), detail, now - self._heartbeats[rank.number].since)
        beats = {number: self._heartbeats[number] for number in self._running}
        least = self._limits.floor_seconds
        late = {number: beat for number, beat in beats.items() if beat.pid and self._silent_seconds(beat, now) > least}
        late = {
            number: beat
            for number, beat in late.items()
            if self._silent_seconds(beat, now) > self._limits.limit_seconds(beat.phase)
        }
        if not late:
            return None
        for beat in late.values():
            self._limits.learn_hang(beat.phase, self._silent_seconds(beat, now))
        # Whoever is behind is the cause: the others wait for it, in a collective or for its part of a save.
        slow = self.slowest_rank(now, late)
        assert slow is not None
        more = self._describe_departed(slow.step)
        if slow.phase == "end" and (line := _last_line(next(r.log for r in self.ranks if r.number == slow.rank))):
            more += f"; its log ends with: {line}"  # perhaps an exception that has taken it out of its loop
        detail = slow.describe(str(self.ranks[0].log.parent), more)
        return HostFailure("hang", (slow.rank,), detail, slow.silent_seconds)

    def _describe_departed(self, step: int) -> str:
        """Ranks that have left, and have done no more than those that wait now: perhaps for them."""
        text = ""
        for number, beat in self._heartbeats.items():
            if beat.pid and beat.step <= step:
                if number not in self._running:
                    text += f"; rank {number} had ended after step {beat.step}, with status 0"
                elif beat.phase == "end":
                    text += f"; rank {number} had closed its Checkpointer after step {beat.step}"
        return text

    def _silent_seconds(self, beat: RankHeartbeat, now: float) -> float:
        """Seconds, of which this process has seen all."""
        return now - max(beat.since, self._observed_since)

    def _failure_order(self, rank: RankProcess) -> tuple[bool, bool]:
        """Signals first, and who fails as another has failed last."""
        return rank.status > 0, not self._heartbeats[rank.number].trouble

    def _failure_cause(self, rank: RankProcess) -> Cause:
        if rank.status == -signal.SIGKILL and processes.oom_kill_count() > self._oom_kills:
            return "out of memory"
        beat = self._heartbeats[rank.number]
        trouble = beat.trouble if beat.step < 0 else ""  # else the program has found a way around it
        return "signal" if rank.status < 0 else trouble or "exit"

    def save_stacks(self) -> None:
        """The stacks of all threads of all ranks, beside their logs, before they are killed."""
        if self._has_stacks:
            return
        self._has_stacks = True
        spy = _find_py_spy()
        with ThreadPoolExecutor(_STACK_READERS) as pool:
            for rank in self._running.values():
                pool.submit(self._save_stack, rank, spy)

    def _save_stack(self, rank: RankProcess, spy: str | None) -> None:
        if spy is not None and _dump_stacks(spy, rank):
            return
        if self._heartbeats[rank.number].pid == rank.pid and processes.process_state(rank.pid) != "T":
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, STACKS_SIGNAL)  # into its own log
                time.sleep(0.2)


def _fields_without_heartbeat(beat: RankHeartbeat) -> tuple[int, float, int, int]:
    """What changes without a beat: a Checkpointer is opened, a signal arrives, a save in the background is committed."""
    return beat.pid, beat.sigterm_at, beat.committed, beat.durable


def _dump_stacks(spy: str, rank: RankProcess) -> bool:
    """Whether py-spy has written the stacks of a rank; it may not be allowed to, or not know this Python."""
    command = [spy, "dump", "--nonblocking", "--pid", str(rank.pid)]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        with (rank.log.parent / f"rank-{rank.number}.stacks").open("wb") as out:
            done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=_STACK_SECONDS, check=False)
        return done.returncode == 0
    return False


def _find_py_spy() -> str | None:
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _describe_end(rank: RankProcess) -> str:
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
    lines = [line.strip() for line in _read_tail(log).splitlines() if line.strip() and not line.startswith(_MPIEXEC_NOISE)]
    return lines[-1][:_LAST_LINE_CHARACTERS] if lines else ""


def _read_tail(path: Path, nbytes: int = 4096) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - nbytes))
        return file.read().decode("utf-8", "replace")
    return ""
