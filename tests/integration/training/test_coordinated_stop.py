"""All ranks stop after the same step, whoever requests it and whenever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.loop_runs import RANKS, Job
from helpers.loop_runs import job as job
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.recovery.policy.coordinated_stop import StopRequest, next_stop
from ckpt.training import heartbeat_page
from ckpt.training.heartbeat_page import HeartbeatPage


@pytest.mark.parametrize(("seconds", "every"), [(0.0, 5), (0.003, "auto"), (0.02, 3)])
def test_all_ranks_stop_after_the_same_step(job: Callable[..., Job], tmp_path: Path, seconds: float, every: Any) -> None:
    """The ranks step at different speeds, without messages to each other, while saves are under way."""
    ranks = job(1_000_000, seconds, every)
    ranks.until(lambda beats: min(b.step for b in beats) >= 10)
    asked = ranks.stop(0.02)
    outputs = ranks.end()
    assert all(f"step {asked.step} is saved, and the job ends as requested" in text for text in outputs)
    assert {b.step for b in ranks.beats()} == {asked.step}
    assert ckpt.open(tmp_path / "repo").steps()[-1] == asked.step
    assert ckpt.load(tmp_path / "repo", group=None)["step"] == asked.step
    again = job(asked.step + 3, 0.0, 1)
    again.end()
    assert {(tmp_path / f"start-{rank}").read_text() for rank in range(RANKS)} == {str(asked.step + 1)}


def test_ranks_asked_before_their_first_step_stop_after_it(job: Callable[..., Job], tmp_path: Path) -> None:
    ranks = job(1_000_000, 0.01, "auto")
    asked = ranks.stop(0.01)
    ranks.end()
    assert ckpt.open(tmp_path / "repo").steps()[-1] == asked.step == 0


def test_a_stop_is_acknowledged_before_the_step_is_published(tmp_path: Path) -> None:
    """A reader between the two does not take a rank for too late."""
    page = HeartbeatPage(tmp_path / "page", new=True)
    page.request_stop(3)
    page.acknowledge_stop(4)
    assert page.read().acknowledged_stop is None, "a step that is past is acknowledged"
    page.acknowledge_stop(3)
    heartbeat = page.read()
    assert (heartbeat.step, heartbeat.acknowledged_stop) == (-1, 3)
    assert next_stop(StopRequest(3), [(heartbeat.step, heartbeat.acknowledged_stop)]).agreed
    page.close()


def test_a_rank_does_not_wait_forever_for_a_dead_requester(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank continues where the step to stop after is never confirmed."""
    monkeypatch.setattr(heartbeat_page, "_STOP_CONFIRM_SECONDS", 0.2)
    page = HeartbeatPage(tmp_path / "p", new=True)
    page.request_stop(3)
    assert [page.should_stop(step) for step in (1, 2, 3)] == [False, False, True]
    page.close()


def test_a_heartbeat_page_agrees_on_the_step_to_stop_after(tmp_path: Path) -> None:
    rank, other = HeartbeatPage(tmp_path / "p", new=True), HeartbeatPage(tmp_path / "p")
    assert other.read().acknowledged_stop is None
    assert not rank.should_stop(10**9)
    other.request_stop(9)
    assert not rank.should_stop(8)
    assert other.read().acknowledged_stop == 9
    stopped: list[bool] = []
    waits = threading.Thread(target=lambda: stopped.append(rank.should_stop(9)))
    waits.start()
    other.request_stop(20)  # another rank was past 9
    waits.join(600)
    assert stopped == [False]
    assert other.read().acknowledged_stop == 20
    other.confirm_stop(20)
    assert [rank.should_stop(step) for step in (10, 19, 20, 21)] == [False, False, True, True]
    other.request_stop(15)
    assert not rank.should_stop(21), "the rank was past the step before it read the request"
    assert other.read().acknowledged_stop == 20


class Simulated:
    """A rank like HeartbeatPage, with one access to its page a turn. In lockstep it ends no step that another has not begun."""

    def __init__(self, others: list[Simulated], stride: int, lockstep: bool) -> None:
        self.others, self.stride, self.lockstep = others, stride, lockstep
        self.step, self.acknowledged = -1, None
        self.stop: int | None = None
        self.agreed: int | None = None
        self.does: str = "steps"

    def advance(self) -> None:
        if self.does == "steps" and all(not self.lockstep or other.began(self.step) for other in self.others):
            self.step += self.stride
            self.does = "looks"
        elif self.does == "looks":
            self.does = "ends" if self.stops() else self.does

    def began(self, after: int) -> bool:
        return self.step > after or (self.step == after and self.does == "steps")

    def stops(self) -> bool:
        self.does = "steps"
        if self.stop is None:
            return False
        if self.acknowledged != self.stop:
            if self.step > self.stop:
                return False
            self.acknowledged = self.stop
        if self.step < self.stop:
            return False
        if self.agreed != self.stop:
            self.does = "looks"  # again
        return self.agreed == self.stop


@given(st.data(), st.booleans())
@settings(deadline=None, max_examples=300)
def test_simulated_ranks_stop_after_the_same_step_in_any_order(data: st.DataObject, lockstep: bool) -> None:
    """Pages are read and written one by one, while any rank may continue, and steps are numbered by ones, twos or threes."""
    stride = data.draw(st.integers(1, 3))
    ranks: list[Simulated] = []
    ranks += [Simulated(ranks, stride, lockstep) for _ in range(data.draw(st.integers(1, 4)))]
    asked: StopRequest | None = None

    def some_steps() -> None:
        for _ in range(data.draw(st.integers(0, 4))):
            data.draw(st.sampled_from(ranks)).advance()

    def asks(meanwhile: Callable[[], None]) -> None:
        nonlocal asked
        seen = []
        for rank in ranks:
            meanwhile()
            seen.append((rank.step, rank.acknowledged))
        before, asked = asked, next_stop(asked, seen)
        for rank in ranks if asked != before else ():
            meanwhile()
            if asked.agreed:
                rank.agreed = asked.step
            else:
                rank.stop = asked.step

    for _ in range(data.draw(st.integers(0, 8))):
        some_steps()
        asks(some_steps)
    for _ in range(100):  # then all ranks continue in turn
        asks(lambda: None)
        for rank in ranks:
            rank.advance()
    assert [rank.does for rank in ranks] == ["ends"] * len(ranks)
    assert len({rank.step for rank in ranks}) == 1


def test_a_stop_is_not_agreed_before_any_rank_is_known() -> None:
    """The reports of an attempt that has just begun may be missing: its ranks have not acknowledged the step."""
    assert not next_stop(StopRequest(1), []).agreed
    assert next_stop(StopRequest(1), [(500, None)]).step > 500
