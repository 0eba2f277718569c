"""Decides that a rank hangs or is stopped, by its heartbeats and the limits that `policy/hang_limits.py` has learned."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ckpt.recovery.policy.hang_limits import HangLimits
from ckpt.recovery.ranks import processes
from ckpt.recovery.ranks.rank_exit_text import last_line
from ckpt.recovery.ranks.rank_process import RankProcess
from ckpt.recovery.run_log.agent_reports import UNOBSERVED_SECONDS, HostFailure, SlowestRank
from ckpt.training.heartbeat_records import RankHeartbeat

_SILENT_SECONDS = 0.1
"""A rank with a heartbeat within this time is not stopped."""
_STOPPED_SECONDS = 0.5
"""A rank that is stopped for longer counts as failed. A debugger that attaches stops it only for a moment."""
_STOPPED_GAP_SECONDS = 0.25
"""How much of a gap with a pause counts as the time of a stopped rank. When a suspended job continues, the agent may run before
its ranks."""


class HangDetector:
    """Finds the first rank of a host that is stopped or hangs.

    heartbeats: the first heartbeat of each rank, by its number.
    """

    def __init__(self, ranks: Sequence[RankProcess], limits: HangLimits, heartbeats: Mapping[int, RankHeartbeat]) -> None:
        self._ranks = tuple(ranks)
        self._limits = limits
        self.silent_since = {number: beat.since for number, beat in heartbeats.items()}
        """The time of the last heartbeat of each rank, later by the pauses since."""
        self._stopped: dict[int, float] = {}
        """Since when a rank is stopped, later by the pauses since."""

    def add_pause(self, seconds: float) -> None:
        """Count this much less of the time until now as silence: this process or the whole host was stopped."""
        for number in self.silent_since:
            self.silent_since[number] += seconds
        if seconds:
            for number in self._stopped:
                self._stopped[number] += seconds + UNOBSERVED_SECONDS - _STOPPED_GAP_SECONDS

    def note_heartbeat(self, number: int, since: float, earliest: float) -> float:
        """Note a new heartbeat of a rank. Returns the time since the one before, without pauses.

        since: the time of the heartbeat by CLOCK_MONOTONIC.
        earliest: the time of the poll before, later by the pause since, as that may have followed the heartbeat.
        """
        before, self.silent_since[number] = self.silent_since[number], max(since, earliest)
        return self.silent_since[number] - before

    def find(
        self, running: Mapping[int, RankProcess], heartbeats: Mapping[int, RankHeartbeat], now: float
    ) -> HostFailure | None:
        """Return a failure for a rank that is stopped, or that has sent no heartbeat within the limit of its phase."""
        for rank in running.values():
            beat = heartbeats[rank.number]
            if (
                (beat.pid and now - self.silent_since[rank.number] < _SILENT_SECONDS)
                or not rank.pid
                or processes.process_state(rank.pid) != "T"
            ):
                self._stopped.pop(rank.number, None)
                continue
            since = self._stopped.setdefault(rank.number, now)
            if now - since >= _STOPPED_SECONDS:
                detail = f"was stopped (SIGSTOP) and stayed so for {now - since:.1f} s"
                return HostFailure("stopped", (rank.number,), detail, now - heartbeats[rank.number].since)
        beats = {number: heartbeats[number] for number in running}
        least = self._limits.floor_seconds
        silent = {number: now - self.silent_since[number] for number, beat in beats.items() if beat.pid}
        silent = {number: seconds for number, seconds in silent.items() if seconds > least}
        late = {n: beats[n] for n, seconds in silent.items() if seconds > self._limits.limit_seconds(beats[n].phase)}
        if not late:
            return None
        for number, beat in late.items():
            self._limits.learn_hang(beat.phase, silent[number])
        # The rank that is behind is the cause: the others wait for it, in a collective or for its part of a save.
        slowest = find_slowest_rank(heartbeats, running, now, late)
        assert slowest is not None
        more = _describe_departed(heartbeats, running, slowest.step)
        if slowest.phase == "end" and (line := last_line(next(r for r in self._ranks if r.number == slowest.rank))):
            more += f"; its log ends with: {line}"  # an exception may have ended its training loop
        detail = slowest.describe(str(self._ranks[0].log.parent), more)
        return HostFailure("hang", (slowest.rank,), detail, slowest.silent_seconds)


def find_slowest_rank(
    heartbeats: Mapping[int, RankHeartbeat], running: Collection[int], now: float, late: Collection[int] = ()
) -> SlowestRank | None:
    """Return the rank that is behind the others; None if none uses ckpt.

    running: the numbers of the ranks that have not ended. late: of several ranks at the same step, one of these is chosen.
    """
    using = [(number, beat) for number, beat in heartbeats.items() if beat.pid and number in running]
    if not using:
        return None
    number, beat = min(using, key=lambda item: (item[1].step, item[0] not in late, item[1].since))
    if late and beat.step < 0:  # no rank has done a step, so one that has not opened a Checkpointer is behind
        number = min((n for n in running if not heartbeats[n].pid), default=number)
        beat = heartbeats[number]
    return SlowestRank(number, beat.step, now - beat.since, beat.phase)


def _describe_departed(heartbeats: Mapping[int, RankHeartbeat], running: Collection[int], step: int) -> str:
    """Return a text about ranks that left at `step` or before. Ranks that wait may wait for them."""
    text = ""
    for number, beat in heartbeats.items():
        if beat.pid and beat.step <= step:
            if number not in running:
                text += f"; rank {number} had ended after step {beat.step}, with status 0"
            elif beat.phase == "end":
                text += f"; rank {number} had closed its Checkpointer after step {beat.step}"
    return text
