"""`RankMonitor`, which watches the ranks of one attempt on this host: their progress and their first failure."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from typing import Literal

from ckpt.recovery.goodput.time_category import TimeCategory, rank_time_category
from ckpt.recovery.policy.failure import Cause
from ckpt.recovery.policy.hang_limits import HangLimits
from ckpt.recovery.policy.stragglers import PaceMeter, RankPace
from ckpt.recovery.ranks import processes, rank_stacks
from ckpt.recovery.ranks.hang_detection import HangDetector, find_slowest_rank
from ckpt.recovery.ranks.rank_exit_text import describe_end
from ckpt.recovery.ranks.rank_process import RankProcess
from ckpt.recovery.run_log.agent_reports import HostFailure, SlowestRank, pause_seconds
from ckpt.training.heartbeat_records import RankHeartbeat

_SIGTERM_SECONDS = 1.0
"""If SIGTERM was sent to all processes of a job, it reaches `ckpt-run` within this time, too."""

_PACE_SECONDS = 10.0
"""The duration of a step is measured over this many recent seconds."""

_OOM_DETAIL = "was killed by the kernel, as there was no memory left (SIGKILL)"


class RankMonitor:
    """Watches the ranks of one attempt. The agent calls `poll` several times a second.

    The main thread owns it. Other threads may read `heartbeats`: the ranks stay the same, and each heartbeat is replaced as a
    whole.

    best_step: the newest step that any attempt has done; steps up to it count as repeated.
    straggler_seconds: the time window in which the pace of the ranks is measured.
    """

    def __init__(self, ranks: Sequence[RankProcess], limits: HangLimits, best_step: int, straggler_seconds: float) -> None:
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
        self._hangs = HangDetector(ranks, limits, self._heartbeats)
        self._pace_meters = {rank.number: PaceMeter(rank.number, straggler_seconds) for rank in ranks}
        self._running = {rank.number: rank for rank in ranks}
        self._oom_kills = processes.oom_kill_count()
        self._has_stacks = False
        self._sent_sigterm = False
        self._polled_at = time.monotonic()
        self._step_times: deque[tuple[float, int]] = deque()
        """The times at which the newest step grew, and the steps."""

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
        """The recent duration of a step, including the saves between steps.

        Before the second step it is the usual time between heartbeats, and at least a second: the time between a first step
        and its save is not the duration of a step.
        """
        if len(self._step_times) < 2:
            return max(1.0, self._limits.usual_step_seconds())
        (began, first), *_, (ended, last) = self._step_times
        return (ended - began) / (last - first)

    @property
    def newest_committed(self) -> tuple[int, int]:
        """Training line and number of the newest committed step; (0, -1) if there is none."""
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
        return rank_time_category(self._heartbeats[self.ranks[0].number], self._best_step)

    def slowest_rank(self, now: float) -> SlowestRank | None:
        """Return the rank that is behind the others; None if none uses ckpt."""
        return find_slowest_rank(self._heartbeats, self._running, now)

    @property
    def paces(self) -> tuple[RankPace, ...]:
        """The pace of the running ranks of which enough steps were observed."""
        found = (self._pace_meters[number].pace for number in self._running)
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
    def stop_progress(self) -> Literal["ahead", "acknowledged", "past"]:
        """The progress of the stop request, as in `AgentReport.stop`."""
        beats = [self._heartbeats[number] for number in self._running]
        if self.stop_step is None:
            return "ahead"
        if all(beat.acknowledged_stop == self.stop_step for beat in beats):
            return "acknowledged"
        return "past" if any(b.step >= self.stop_step and b.acknowledged_stop != self.stop_step for b in beats) else "ahead"

    # --- failures of ranks -------------------------------------------------------------------------------------

    def poll(self, now: float) -> list[RankProcess]:
        """Update the state of all ranks and return those that have ended since. now: the time by CLOCK_MONOTONIC."""
        pause = pause_seconds(now - self._polled_at)
        counted_from, self._polled_at = self._polled_at + pause, now
        self._hangs.add_pause(pause)
        ended = [rank for rank in self._running.values() if rank.has_ended()]
        for rank in ended:
            rank.heartbeat_page.publish_ended()
            del self._running[rank.number]
        self._read_heartbeats(counted_from)
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
                detail = _OOM_DETAIL if cause == "out of memory" else describe_end(failed[0])
                self.failure = HostFailure(cause, tuple(rank.number for rank in failed), detail)
            else:
                self.failure = self._find_signalled(now) or self._hangs.find(self._running, self._heartbeats, now)
        return ended

    def _read_heartbeats(self, counted_from: float) -> None:
        """Read the heartbeats, and learn how long phases and steps take.

        counted_from: the time of the last poll, later by the pause since.
        """
        for rank in self.ranks:
            before, beat = self._heartbeats[rank.number], rank.heartbeat_page.read()
            if beat.beats != before.beats:
                lasted = counted_from - self._hangs.silent_since[rank.number]
                took = self._hangs.note_heartbeat(rank.number, beat.since, counted_from)
                if before.pid:
                    # The average, if there were several beats since the last poll. The phase lasted at least until that poll.
                    self._limits.learn(before.phase, max(took / (beat.beats - before.beats), lasted))
                    self._pace_meters[rank.number].learn(before, beat)
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

    def _failure_order(self, rank: RankProcess) -> tuple[bool, bool]:
        """Return a sort key: ranks ended by a signal first, ranks that may have failed because of another one last."""
        return rank.status > 0, not self._heartbeats[rank.number].trouble

    def _failure_cause(self, rank: RankProcess) -> Cause:
        """Return the cause of the failure of a rank that has ended."""
        if rank.status == -signal.SIGKILL and processes.oom_kill_count() > self._oom_kills:
            return "out of memory"
        beat = self._heartbeats[rank.number]
        trouble = beat.trouble if beat.step < 0 else ""  # a program that has done steps was not stopped by the trouble
        return "signal" if rank.status < 0 else trouble or "exit"

    def save_stacks(self) -> None:
        """Write the stacks of all threads of all ranks next to their logs, before the ranks are killed."""
        if not self._has_stacks:
            self._has_stacks = True
            rank_stacks.save_stacks(list(self._running.values()), self._heartbeats)


def _fields_without_heartbeat(beat: RankHeartbeat) -> tuple[int, float, int, int]:
    """Return the fields that change without a heartbeat: at the opening of a Checkpointer, a signal, a background commit."""
    return beat.pid, beat.sigterm_at, beat.committed, beat.durable
