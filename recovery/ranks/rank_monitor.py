"""`RankMonitor`, which watches the ranks of one attempt on this host and finds their first failure."""

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
from ckpt.recovery.run_log.agent_reports import UNOBSERVED_SECONDS, HostFailure, SlowestRank
from ckpt.training.heartbeat_page import STACKS_SIGNAL
from ckpt.training.rank_heartbeat import RankHeartbeat

_SILENT_SECONDS = 0.1
"""A rank with a heartbeat within this time is not stopped."""
_STOPPED_SECONDS = 0.5
"""A rank that is stopped for longer counts as failed. A debugger that attaches stops it only for a moment."""

_SIGTERM_SECONDS = 1.0
"""If SIGTERM was sent to all processes of a job, it reaches `ckpt-run` within this time, too."""

_PACE_SECONDS = 10.0
"""The duration of a step is measured over this last time."""

_STACK_READERS, _STACK_SECONDS = 8, 5.0
"""How many stacks are read at a time, and how long one may take."""

_OOM_DETAIL = "was killed by the kernel, as there was no memory left (SIGKILL)"
_LAST_LINE_CHARACTERS = 400
"""The most characters of the last line of a log. In it, long folder names may precede the reason."""

_MPIEXEC_NOISE = ("This typically refers to a problem with your application.", "Please see the FAQ page", "====")
"""The beginnings of the last lines that MPICH's mpiexec writes about a failed rank."""


class RankMonitor:
    """Watches the ranks of one attempt. The agent calls `poll` several times a second.

    best_step: the newest step that any attempt has done; steps up to it count as repeated.
    straggler_seconds: the time window in which the pace of the ranks is measured.
    """

    def __init__(
        self, ranks: Sequence[RankProcess], limits: HangLimits, best_step: int, straggler_seconds: float = 60.0
    ) -> None:
        self.ranks = tuple(ranks)
        self.failure: HostFailure | None = None
        """The first failure."""
        self.stop_step: int | None = None
        """The step to stop after; None if no stop is requested."""
        self.is_leaving = False
        """Whether the agent was requested to end, so that a stop request will follow."""
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
        self._step_times: deque[tuple[float, int]] = deque()  # the times at which the newest step grew, and the steps

    # --- progress of the ranks ---------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Whether all ranks have ended."""
        return not self._running

    @property
    def heartbeats(self) -> dict[int, RankHeartbeat]:
        """The last heartbeat of each rank, by its number."""
        return dict(self._heartbeats)

    @property
    def uses_ckpt(self) -> bool:
        """Whether any of the ranks uses ckpt."""
        return any(beat.pid for beat in self._heartbeats.values())

    @property
    def step(self) -> int:
        """The last step that all ranks have done."""
        return min(beat.step for beat in self._heartbeats.values())

    @property
    def newest(self) -> int:
        """The last step that any rank has done."""
        return max(beat.step for beat in self._heartbeats.values())

    @property
    def step_seconds(self) -> float:
        """The recent duration of a step, including the saves between steps; before the first steps, the usual duration."""
        if len(self._step_times) < 2:
            return self._limits.usual_step_seconds()
        (began, first), *_, (ended, last) = self._step_times
        return (ended - began) / (last - first)

    @property
    def newest_committed(self) -> tuple[int, int]:
        """Line of training and number of the newest committed step; (0, -1) if there is none."""
        return max((beat.line, beat.committed) for beat in self._heartbeats.values())

    @property
    def durable(self) -> int:
        """The newest step that is committed outside of the memory of hosts; -1 none."""
        return max(beat.durable for beat in self._heartbeats.values())

    @property
    def saved(self) -> int:
        """The newest step that was committed in this attempt; -1 none."""
        _, committed = self.newest_committed
        return committed if committed > self.restored else -1

    @property
    def restored(self) -> int:
        """The step that this attempt resumed from; -1 none."""
        return max(beat.restored for beat in self._heartbeats.values())

    @property
    def time_category(self) -> TimeCategory:
        """What the first rank of this host spends its time on."""
        beat = self._heartbeats[self.ranks[0].number]
        if beat.phase == "load":
            return "restore"
        if beat.phase == "save":
            return "stall"
        if beat.phase == "start" and beat.step < 0:
            return "spawn"
        return "redo" if beat.step + 1 <= self._best_step else "useful"

    def slowest_rank(self, now: float, late: Collection[int] = ()) -> SlowestRank | None:
        """Return the rank that is behind the others; None if none uses ckpt.

        late: of several ranks at the same step, one of these is chosen.
        """
        running = [(number, beat) for number, beat in self._heartbeats.items() if beat.pid and number in self._running]
        if not running:
            return None
        number, beat = min(running, key=lambda item: (item[1].step, item[0] not in late, item[1].since))
        if late and beat.step < 0:  # no rank has done a step, so one that has not opened a Checkpointer is behind
            number = min((n for n in self._running if not self._heartbeats[n].pid), default=number)
            beat = self._heartbeats[number]
        return SlowestRank(number, beat.step, now - beat.since, beat.phase)

    @property
    def paces(self) -> tuple[RankPace, ...]:
        """The pace of the running ranks of which enough steps were observed."""
        found = (self._measures[number].pace for number in self._running)
        return tuple(pace for pace in found if pace is not None)

    def request_stop(self, step: int, agreed: bool) -> None:
        """Request that the ranks save after this step and end. agreed: the ranks of all hosts have acknowledged it."""
        self.stop_step = step
        if not self.uses_ckpt and not self._sent_sigterm:  # a program without ckpt may handle the signal
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
        """The progress of the stop request, as in `AgentReport.stop`."""
        beats = [self._heartbeats[number] for number in self._running]
        if self.stop_step is None:
            return "ahead"
        if all(beat.acknowledged_stop == self.stop_step for beat in beats):
            return "heard"
        return "past" if any(b.step >= self.stop_step and b.acknowledged_stop != self.stop_step for b in beats) else "ahead"

    # --- failures of ranks -------------------------------------------------------------------------------------

    def poll(self, now: float) -> list[RankProcess]:
        """Update the state of all ranks and return those that have ended since. now: the time by CLOCK_MONOTONIC."""
        before = self._polled_at
        if now - before > UNOBSERVED_SECONDS:  # this process or the whole host was stopped
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
            # First, because ranks with a good loss fail too if another rank leaves out a save.
            bad = self._find_divergence()
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
        """Read the heartbeats, and learn how long phases and steps take. polled_at: the time of the poll before."""
        for rank in self.ranks:
            before, beat = self._heartbeats[rank.number], rank.heartbeat_page.read()
            if beat.beats != before.beats:
                if before.pid:
                    # The average, if there were several beats since the last poll. The phase lasted at least until that poll.
                    took = (beat.since - before.since) / (beat.beats - before.beats)
                    if before.since >= self._observed_since:
                        self._limits.learn(before.phase, max(took, polled_at - before.since))
                    self._measures[rank.number].learn(before, beat)
                self._heartbeats[rank.number] = beat
            elif _fields_without_heartbeat(beat) != _fields_without_heartbeat(before):
                self._heartbeats[rank.number] = beat

    def _find_divergence(self) -> HostFailure | None:
        """Return the earliest bad loss of the ranks as a failure."""
        found = [(beat.bad, number) for number, beat in self._heartbeats.items() if beat.bad is not None]
        if not found:
            return None
        first = min(bad.step for bad, _ in found)
        ranks = tuple(number for bad, number in found if bad.step == first)
        bad = next(bad for bad, _ in found if bad.step == first)
        return HostFailure("diverged", ranks, f"had a loss of {bad.loss:g} in step {bad.step}", bad=bad)

    def _find_signalled(self, now: float) -> HostFailure | None:
        """Return a failure for ranks that got SIGTERM although the job was not requested to end.

        Such ranks delay the signal (`HeartbeatPage.defer_sigterm`), so the agent ends them.
        """
        beats = {number: self._heartbeats[number] for number in self._running}
        ranks = tuple(number for number, beat in beats.items() if 0 < beat.sigterm_at < now - _SIGTERM_SECONDS)
        if not ranks or self.is_leaving or self.stop_step is not None:
            return None
        return HostFailure("signal", ranks, "was asked to end by SIGTERM")

    def _find_silent(self, now: float) -> HostFailure | None:
        """Return a failure for a rank that is stopped, or that has sent no heartbeat within the limit of its phase."""
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
        # The rank that is behind is the cause: the others wait for it, in a collective or for its part of a save.
        slowest = self.slowest_rank(now, late)
        assert slowest is not None
        more = self._describe_departed(slowest.step)
        if slowest.phase == "end" and (line := _last_line(next(r.log for r in self.ranks if r.number == slowest.rank))):
            more += f"; its log ends with: {line}"  # an exception may have ended its training loop
        detail = slowest.describe(str(self.ranks[0].log.parent), more)
        return HostFailure("hang", (slowest.rank,), detail, slowest.silent_seconds)

    def _describe_departed(self, step: int) -> str:
        """Return a text about ranks that left at `step` or before. Ranks that wait may wait for them."""
        text = ""
        for number, beat in self._heartbeats.items():
            if beat.pid and beat.step <= step:
                if number not in self._running:
                    text += f"; rank {number} had ended after step {beat.step}, with status 0"
                elif beat.phase == "end":
                    text += f"; rank {number} had closed its Checkpointer after step {beat.step}"
        return text

    def _silent_seconds(self, beat: RankHeartbeat, now: float) -> float:
        """Return the seconds since a heartbeat, without times in which this process did not run."""
        return now - max(beat.since, self._observed_since)

    def _failure_order(self, rank: RankProcess) -> tuple[bool, bool]:
        """Return a sort key: ranks ended by a signal first, ranks that may have failed because of another one last."""
        return rank.status > 0, not self._heartbeats[rank.number].trouble

    def _failure_cause(self, rank: RankProcess) -> Cause:
        if rank.status == -signal.SIGKILL and processes.oom_kill_count() > self._oom_kills:
            return "out of memory"
        beat = self._heartbeats[rank.number]
        trouble = beat.trouble if beat.step < 0 else ""  # a program that has done steps was not stopped by the trouble
        return "signal" if rank.status < 0 else trouble or "exit"

    def save_stacks(self) -> None:
        """Write the stacks of all threads of all ranks next to their logs, before the ranks are killed."""
        if self._has_stacks:
            return
        self._has_stacks = True
        py_spy = _find_py_spy()
        with ThreadPoolExecutor(_STACK_READERS) as pool:
            for rank in self._running.values():
                pool.submit(self._save_stack, rank, py_spy)

    def _save_stack(self, rank: RankProcess, py_spy: str | None) -> None:
        if py_spy is not None and _dump_stacks(py_spy, rank):
            return
        if self._heartbeats[rank.number].pid == rank.pid and processes.process_state(rank.pid) != "T":
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, STACKS_SIGNAL)  # the rank writes them into its own log
                time.sleep(0.2)


def _fields_without_heartbeat(beat: RankHeartbeat) -> tuple[int, float, int, int]:
    """Return the fields that change without a heartbeat: at the opening of a Checkpointer, a signal, a background commit."""
    return beat.pid, beat.sigterm_at, beat.committed, beat.durable


def _dump_stacks(py_spy: str, rank: RankProcess) -> bool:
    """Write the stacks of a rank by py-spy. Return False if it lacks the permission or does not support this Python."""
    command = [py_spy, "dump", "--nonblocking", "--pid", str(rank.pid)]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        with (rank.log.parent / f"rank-{rank.number}.stacks").open("wb") as out:
            done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=_STACK_SECONDS, check=False)
        return done.returncode == 0
    return False


def _find_py_spy() -> str | None:
    in_environment = Path(sys.executable).parent / "py-spy"
    return str(in_environment) if in_environment.exists() else shutil.which("py-spy")


def _describe_end(rank: RankProcess) -> str:
    """Return a text: how a rank has ended, with the last line of its log."""
    code = rank.status
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"
    line = _last_line(rank.log)
    return f"exited with status {code} ({line})" if line else f"exited with status {code}"


def _last_line(log: Path) -> str:
    """Return the last line of a log that is not empty and not noise of mpiexec."""
    lines = [line.strip() for line in _read_tail(log).splitlines() if line.strip() and not line.startswith(_MPIEXEC_NOISE)]
    return lines[-1][:_LAST_LINE_CHARACTERS] if lines else ""


def _read_tail(path: Path, nbytes: int = 4096) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - nbytes))
        return file.read().decode("utf-8", "replace")
    return ""
