"""The training loop under somebody's eyes: losses that go wrong, how often to save, a stop at one step on all ranks."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import math
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import bypasses_cache, drop_cache, is_cached

import ckpt
from ckpt.recovery.policy.coordinated_stop import StopRequest, next_stop
from ckpt.recovery.policy.loss_rollback import MAX_SKIPS, RollBack, roll_back, rollback_environment
from ckpt.storage.base.errors import InvalidArgument
from ckpt.storage.local.writer import O_DIRECT
from ckpt.training import heartbeat_page as pulses
from ckpt.training import loss_spikes
from ckpt.training.data_position import SKIP_VARIABLE, is_in_ranges, parse_ranges
from ckpt.training.heartbeat_page import RESTORE_LIMIT_VARIABLE, BadLoss, HeartbeatPage, RankHeartbeat
from ckpt.training.loss_monitor import LossMonitor
from ckpt.training.loss_spikes import SpikeDetector
from ckpt.training.save_interval import (
    DEFAULT_MTBF_SECONDS,
    MTBF_VARIABLE,
    daly_interval_seconds,
    mtbf_seconds_from_env,
    posterior_mtbf_seconds,
)

PROGRAM = str(Path(__file__).parent / "loop_program.py")

RANKS = 4


class Job:
    """Ranks as processes, and their pages; the test looks after them."""

    def __init__(self, folder: Path, *arguments: object, size: int = RANKS, **environ: str) -> None:
        self.folder = folder
        self.pages = [HeartbeatPage(folder / f"page-{rank}", new=True) for rank in range(size)]
        self.processes = [
            subprocess.Popen(
                [sys.executable, PROGRAM, str(folder), *map(str, arguments)], stderr=subprocess.PIPE, text=True,
                env=os.environ | environ | {
                    "RANK": str(rank), "WORLD_SIZE": str(size), "TORCHELASTIC_RUN_ID": str(time.monotonic_ns()),
                    "CKPT_RUN_ID": f"{folder}{id(self)}", pulses.PAGE_VARIABLE: str(folder / f"page-{rank}"),
                },
            )
            for rank in range(size)
        ]  # fmt: skip

    def beats(self) -> list[RankHeartbeat]:
        return [page.read() for page in self.pages]

    def until(self, reached: Callable[[list[RankHeartbeat]], bool]) -> None:
        until = time.monotonic() + 90
        while not reached(self.beats()):
            assert time.monotonic() < until
            assert all(p.poll() is None for p in self.processes), [p.communicate()[1] for p in self.processes]
            time.sleep(0.005)

    def stop(self, look_seconds: float) -> StopRequest:
        """Ask it to stop, as a coordinator does that looks every so many seconds, and writes page after page."""
        asked: StopRequest | None = None
        while asked is None or not asked.agreed:
            before, running = asked, [page for page, p in zip(self.pages, self.processes, strict=True) if p.poll() is None]
            asked = next_stop(before, [(b.step, b.acknowledged_stop) for b in (page.read() for page in running)])
            for page in running if asked != before else ():
                if asked.agreed:
                    page.confirm_stop(asked.step)
                else:
                    page.request_stop(asked.step)
                time.sleep(0.002)
            time.sleep(look_seconds)
        return asked

    def end(self) -> list[str]:
        said = [p.communicate(timeout=120)[1] for p in self.processes]
        assert [p.returncode for p in self.processes] == [0] * len(self.processes), said
        return said

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        for page in self.pages:
            page.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def begin(*arguments: object, **options: Any) -> Job:
        made.append(Job(tmp_path, *arguments, **options))
        return made[-1]

    yield begin
    for one in made:
        one.close()


# --- a stop at the same step -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "every"), [(0.0, 5), (0.003, "auto"), (0.02, 3)])
def test_all_ranks_stop_after_the_same_step(job: Callable[..., Job], tmp_path: Path, seconds: float, every: Any) -> None:
    """They step at speeds of their own, without a word to each other, while saves are under way."""
    ranks = job(1_000_000, seconds, every)
    ranks.until(lambda beats: min(b.step for b in beats) >= 10)
    asked = ranks.stop(0.02)
    said = ranks.end()
    assert all(f"step {asked.step} is saved, and the job ends as it was asked to" in text for text in said)
    assert {b.step for b in ranks.beats()} == {asked.step}
    assert ckpt.open(tmp_path / "repo").steps()[-1] == asked.step
    assert ckpt.load(tmp_path / "repo", group=None)["step"] == asked.step
    again = job(asked.step + 3, 0.0, 1)
    again.end()
    assert {(tmp_path / f"start-{rank}").read_text() for rank in range(RANKS)} == {str(asked.step + 1)}


def test_asked_before_the_first_step(job: Callable[..., Job], tmp_path: Path) -> None:
    ranks = job(1_000_000, 0.01, "auto")
    asked = ranks.stop(0.01)
    ranks.end()
    assert ckpt.open(tmp_path / "repo").steps()[-1] == asked.step == 0


def test_a_stop_is_heard_before_the_step_is_told(tmp_path: Path) -> None:
    """Whoever looks between the two takes no rank for too late."""
    page = HeartbeatPage(tmp_path / "page", new=True)
    page.request_stop(3)
    page.acknowledge_stop(4)
    assert page.read().acknowledged_stop is None, "it is past it"
    page.acknowledge_stop(3)
    told = page.read()
    assert (told.step, told.acknowledged_stop) == (-1, 3)
    assert next_stop(StopRequest(3), [(told.step, told.acknowledged_stop)]).agreed
    page.close()


def test_whoever_asked_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank does not wait for the word for ever."""
    monkeypatch.setattr(pulses, "_STOP_CONFIRM_SECONDS", 0.2)
    page = HeartbeatPage(tmp_path / "p", new=True)
    page.request_stop(3)
    assert [page.should_stop(step) for step in (1, 2, 3)] == [False, False, True]
    page.close()


def test_a_page_between_two(tmp_path: Path) -> None:
    rank, other = HeartbeatPage(tmp_path / "p", new=True), HeartbeatPage(tmp_path / "p")
    assert other.read().acknowledged_stop is None
    assert not rank.should_stop(10**9)
    other.request_stop(9)
    assert not rank.should_stop(8)
    assert other.read().acknowledged_stop == 9
    told: list[bool] = []
    waits = threading.Thread(target=lambda: told.append(rank.should_stop(9)))
    waits.start()
    other.request_stop(20)  # another rank was past 9
    waits.join(60)
    assert told == [False]
    assert other.read().acknowledged_stop == 20
    other.confirm_stop(20)
    assert [rank.should_stop(step) for step in (10, 19, 20, 21)] == [False, False, True, True]
    other.request_stop(15)
    assert not rank.should_stop(21), "it was past it before it heard"
    assert other.read().acknowledged_stop == 20


class Simulated:
    """A rank as Pulse has it, one access to its page a turn. In lockstep it ends no step that another has not begun."""

    def __init__(self, others: list[Simulated], stride: int, lockstep: bool) -> None:
        self.others, self.stride, self.lockstep = others, stride, lockstep
        self.step, self.heard = -1, None
        self.stop: int | None = None
        self.agreed: int | None = None
        self.does: str = "steps"

    def turn(self) -> None:
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
        if self.heard != self.stop:
            if self.step > self.stop:
                return False
            self.heard = self.stop
        if self.step < self.stop:
            return False
        if self.agreed != self.stop:
            self.does = "looks"  # again
        return self.agreed == self.stop


@given(st.data(), st.booleans())
@settings(deadline=None, max_examples=300)
def test_ranks_and_whoever_asks_in_any_order(data: st.DataObject, lockstep: bool) -> None:
    """Pages are read and written one by one, while any rank may go on, and steps are numbered by ones, twos or threes."""
    stride = data.draw(st.integers(1, 3))
    ranks: list[Simulated] = []
    ranks += [Simulated(ranks, stride, lockstep) for _ in range(data.draw(st.integers(1, 4)))]
    asked: StopRequest | None = None

    def some_turns() -> None:
        for _ in range(data.draw(st.integers(0, 4))):
            data.draw(st.sampled_from(ranks)).turn()

    def asks(meanwhile: Callable[[], None]) -> None:
        nonlocal asked
        seen = []
        for rank in ranks:
            meanwhile()
            seen.append((rank.step, rank.heard))
        before, asked = asked, next_stop(asked, seen)
        for rank in ranks if asked != before else ():
            meanwhile()
            if asked.agreed:
                rank.agreed = asked.step
            else:
                rank.stop = asked.step

    for _ in range(data.draw(st.integers(0, 8))):
        some_turns()
        asks(some_turns)
    for _ in range(100):  # then everybody goes on in turn
        asks(lambda: None)
        for rank in ranks:
            rank.turn()
    assert [rank.does for rank in ranks] == ["ends"] * len(ranks)
    assert len({rank.step for rank in ranks}) == 1


# --- steps at which nothing is due -------------------------------------------------------------------------------


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeartbeatPage]:
    """That of this process."""
    page = HeartbeatPage(tmp_path / "page", new=True)
    monkeypatch.setenv(pulses.PAGE_VARIABLE, str(tmp_path / "page"))
    pulses.reset_after_fork()
    yield page
    monkeypatch.undo()
    pulses.reset_after_fork()


def test_damage_that_a_program_finds_a_way_around(tmp_path: Path, page: HeartbeatPage) -> None:
    """It is told where nothing can be restored, and no more once something was."""
    for step in (3, 4):
        ckpt.save({"x": np.arange(5000.0)}, tmp_path / "repo", step, group=None)
    good = {path: path.read_bytes() for path in (tmp_path / "repo/steps").rglob("commit.json")}
    for path in good:
        path.write_bytes(b"damaged")
    with ckpt.Checkpointer(tmp_path / "repo", every=7, group=None) as ck:
        with pytest.raises(ckpt.IntegrityError):
            ck.restore({"x": np.zeros(5000)})
        assert page.read().trouble == "damaged"
        path = tmp_path / "repo/steps/3/commit.json"
        path.write_bytes(good[path])
        assert ck.restore({"x": np.zeros(5000)}, step=3)[1] == 4
        assert page.read().trouble == ""


def test_a_device_that_is_away_is_no_damage(tmp_path: Path, page: HeartbeatPage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives EIO as a bad sector does; but for all steps, and for as long as it is away."""

    def away(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    ckpt.save({"x": np.arange(5000.0)}, tmp_path / "repo", 3, group=None)
    with ckpt.Checkpointer(tmp_path / "repo", every=7, group=None) as ck:
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", away)
            with pytest.raises(ckpt.CkptError):
                ck.restore({"x": np.zeros(5000)})
        assert page.read().trouble == ""
        assert ck.restore({"x": np.zeros(5000)})[1] == 4


def test_a_second_checkpointer_of_a_rank_hides_nothing(tmp_path: Path, page: HeartbeatPage) -> None:
    """What a job went on from is what the one with the newest step went on from."""
    ckpt.save({"x": np.zeros(3)}, tmp_path / "repo", 7, group=None)
    with ckpt.Checkpointer(tmp_path / "repo", group=None) as main, ckpt.Checkpointer(tmp_path / "ema", group=None) as other:
        assert main.restore({"x": np.ones(3)})[1] == 8
        assert other.restore({"x": np.ones(3)})[1] == 0
    assert (page.read().restored, page.read().committed) == (7, 7)


def test_each_step_beats_whether_or_not_something_is_due(tmp_path: Path, page: HeartbeatPage) -> None:
    state, beats = {"x": np.zeros(3)}, 0
    with ckpt.Checkpointer(tmp_path / "repo", every=7, group=None) as ck:
        for step in range(60):
            assert (ck.step(step, state, loss=step / 2) is not None) == (step % 7 == 6)
            beat = page.read()
            assert (beat.step, beat.loss, beat.phase) == (step, step / 2, "step")
            assert beat.beats > beats
            beats = beat.beats
            if step % 7 == 6:
                ck.wait()
        assert ck._idle_window is not None, "nothing was left out"
        page.request_stop(60)
        page.confirm_stop(60)
        with pytest.raises(SystemExit):
            ck.step(60, state, loss=0.0)
    assert ckpt.open(tmp_path / "repo").steps() == [*range(6, 60, 7), 60]


def test_what_is_seen_between_two_saves(tmp_path: Path, page: HeartbeatPage) -> None:
    state = {"x": np.zeros(3)}
    with ckpt.Checkpointer(tmp_path / "repo", every=100, group=None) as ck:
        for step in (0, 1, 2):
            ck.step(step, state, loss=1.0)
        assert ck._idle_window is not None
        ck.step(1, state, loss=2.0)  # a step before: the loop went back
        assert page.read().step == 1
        for step in (2, 3):
            ck.step(step, state)
        assert ck._idle_window is not None
        ck.save(3, state)  # without waiting
        assert ck._idle_window is None
        ck.wait()
        for step in (4, 5, 6):
            ck.step(step, state, loss=1.0)
        assert ck._idle_window is not None
        ck.step(7, state, loss=math.inf)
        bad = page.read().bad
        assert bad is not None
        assert (bad.step, bad.loss) == (7, math.inf)
        assert ck.step(99, state, loss=1.0) is None
    assert ckpt.open(tmp_path / "repo").steps() == [3]
    with pytest.raises(ckpt.CkptError, match="closed"):
        ck.step(8, state)


def test_a_save_that_is_due_by_time(tmp_path: Path, page: HeartbeatPage) -> None:
    step, began = 0, time.monotonic()
    with ckpt.Checkpointer(tmp_path / "repo", every=timedelta(seconds=0.2), group=None) as ck:
        while ck.step(step, {"x": np.zeros(3)}) is None:
            step += 1
            assert time.monotonic() - began < 60
    assert time.monotonic() - began >= 0.2
    assert ckpt.open(tmp_path / "repo").steps() == [step]


# --- losses ----------------------------------------------------------------------------------------------------


def page_of(beats: list[RankHeartbeat]) -> list[BadLoss | None]:
    return [beat.bad for beat in beats]


def test_after_a_bad_loss_nothing_is_saved(job: Callable[..., Job], tmp_path: Path) -> None:
    """Not on one rank, so not at all; and the page says where it began."""
    losses = tmp_path / "losses"
    losses.write_text(json.dumps({"7": math.nan, "9": math.inf}))
    ranks = job(16, 0.0, 3, losses, size=2)
    said = ranks.end()
    assert ckpt.open(tmp_path / "repo").steps() == [2, 5]
    assert all("step 8 is not saved: the loss of step 7 is nan" in text for text in said)
    for bad in page_of(ranks.beats()):
        assert bad is not None
        assert (bad.step, bad.kind, bad.limit, bad.batch) == (7, "not finite", math.inf, -1)
        assert math.isnan(bad.loss)


def test_a_spike(job: Callable[..., Job], tmp_path: Path) -> None:
    losses = tmp_path / "losses"
    losses.write_text(json.dumps({"30": 4.0, "10": 0.2}))
    ranks = job(40, 0.0, 10, losses, size=1, CKPT_SPIKE="10")
    (said,) = ranks.end()
    assert ckpt.open(tmp_path / "repo").steps() == [9, 19, 29]
    assert "step 39 is not saved: the loss of step 30 jumped to 4.0" in said
    (bad,) = page_of(ranks.beats())
    assert bad is not None
    assert (bad.step, bad.kind, bad.loss) == (30, "spike", 4.0)
    assert 1.0 < bad.limit < 1.5


def test_a_spike_just_after_a_restart(job: Callable[..., Job], tmp_path: Path) -> None:
    losses = tmp_path / "losses"
    losses.write_text(json.dumps({"3": 4.0}))
    ranks = job(5, 0.0, 1, losses, size=1, CKPT_SPIKE="10", CKPT_SPIKE_LIMIT="1.2")
    ranks.end()
    assert ckpt.open(tmp_path / "repo").steps() == [0, 1, 2]


def test_without_ckpt_run_only_a_step_that_is_not_finite_is_left_out(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path / "repo", every=1, group=None) as ck:
        for step, loss in enumerate([1.0, math.nan, 1.0, 100.0]):
            ck.step(step, {"x": np.zeros(3)}, loss=loss)
    assert ckpt.open(tmp_path / "repo").steps() == [0, 2, 3]


def test_a_loss_on_a_device_is_not_waited_for(tmp_path: Path) -> None:
    """As jax gives them: an array that is not there yet. The page hears of it when it is."""

    class Later:
        def __init__(self, value: float) -> None:
            self.value, self.there, self.asked = value, False, 0

        def copy_to_host_async(self) -> None:
            self.asked += 1

        def is_ready(self) -> bool:
            return self.there

        def item(self) -> float:
            assert self.there, "it was waited for"
            return self.value

    page = HeartbeatPage(tmp_path / "p", new=True)
    losses = LossMonitor(page, None)
    given = [Later(1.0), Later(math.nan), Later(2.0)]
    for step, loss in enumerate(given):
        page.publish_batch(10 + step)
        losses.add(step, loss)
    assert [loss.asked for loss in given] == [1, 1, 1]
    assert page.read().bad is None
    given[0].there = given[1].there = True
    late = Later(3.0)
    losses.add(3, late)
    bad = page.read().bad
    assert bad is not None
    assert losses.bad_loss is not None
    assert (bad.step, bad.batch) == (1, 11), "the batch of its own step"
    given[2].there = late.there = True
    losses.wait()
    assert page.read().loss == 3.0
    page.close()


@pytest.mark.parametrize("library", ["torch", "jax", "numpy"])
def test_losses_of_the_libraries(tmp_path: Path, library: str) -> None:
    module = pytest.importorskip({"jax": "jax.numpy"}.get(library, library))
    page = HeartbeatPage(tmp_path / "p", new=True)
    losses = LossMonitor(page, None)
    make = functools.partial(module.tensor, requires_grad=True) if library == "torch" else module.asarray
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses.add(0, make(1.5))
        losses.add(1, make(math.inf))
        losses.wait()
    assert page.read().loss == math.inf
    assert losses.bad_loss == BadLoss(1, "not finite", math.inf, math.inf, -1)
    page.close()


# --- spikes ----------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e3, 1e3), max_size=200), st.floats(2, 30))
def test_spikes_by_the_definition(losses: list[float], factor: float) -> None:
    """The incremental window is the plain one."""
    watched, window = SpikeDetector(factor), []
    for loss in losses:
        limit = math.inf
        if len(window) >= 16:
            found = sorted(window)
            middle, low, high = (found[len(found) * part // 4] for part in (2, 1, 3))
            limit = middle + factor * max((high - low) / 1.349, 0.01 * abs(middle))
        assert watched.limit() == limit
        assert watched.observe(loss) == (loss > limit)
        if loss <= limit:
            window = [*window, loss][-64:]


def test_spikes_of_a_usual_training() -> None:
    """Noise of 5 % on a falling curve is none; four times the loss is one, and stays one however long it lasts."""
    noise = np.random.default_rng(0)
    watched = SpikeDetector(10)
    for step in range(5000):
        assert not watched.observe(8 / (1 + step / 100) ** 0.5 * (1 + 0.05 * noise.standard_normal()))
    assert all(watched.observe(4.0 + 0.01 * step) for step in range(200))
    assert not watched.observe(1.1)


@pytest.mark.parametrize(
    "environ",
    [
        {loss_spikes.FACTOR_VARIABLE: "x"},
        {loss_spikes.FACTOR_VARIABLE: "-1"},
        {loss_spikes.FACTOR_VARIABLE: "9", loss_spikes.LIMIT_VARIABLE: "y"},
    ],
)
def test_spikes_asked_for_wrongly(environ: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument):
        loss_spikes.spike_detector_from_env(environ)


def test_spikes_are_not_looked_for_unasked() -> None:
    assert loss_spikes.spike_detector_from_env({}) is None


# --- roll-back -------------------------------------------------------------------------------------------------


def bad(batch: int, step: int | None = None, kind: Any = "not finite") -> BadLoss:
    return BadLoss(batch if step is None else step, kind, math.nan if kind == "not finite" else 9.0, 3.0, batch)


def told(decision: RollBack) -> dict[str, str]:
    """What the ranks of the next attempt are told."""
    return rollback_environment(decision.skip, decision.before, decision.limit)


def test_first_the_same_again_then_others() -> None:
    history, skip, actions = [], (), []
    for turn in range(10):
        history.append(bad(120 + turn))
        decision = roll_back(history, skip)
        actions.append(decision.action)
        if decision.action == "skip":
            assert all(is_in_ranges(decision.skip, n) for n in (119 + turn, 120 + turn))
            assert decision.before is not None
            assert decision.before < 120 + turn
            assert parse_ranges(told(decision)[SKIP_VARIABLE]) == decision.skip
            assert told(decision)[RESTORE_LIMIT_VARIABLE] == str(decision.before)
            width = [last - first for first, last in (*skip, *decision.skip)]
            assert width == sorted(width), "more each time"
        skip = decision.skip
        if decision.action == "halt":
            break
    assert actions == ["retry", *["skip"] * MAX_SKIPS, "halt"]
    assert decision.reason.startswith("the loss of step 124 (batch 124) was nan; the 5th time there, and batches ")


def test_words_and_limits() -> None:
    assert told(roll_back([bad(5)])) == {}
    found = roll_back([bad(-1, 50, "spike"), bad(-1, 51, "spike")])
    assert found.reason == "the loss of step 51 jumped to 9, above 3; the 2nd time there: batches 50 to 51 are passed over"
    assert told(found) == {SKIP_VARIABLE: "50-51", RESTORE_LIMIT_VARIABLE: "50", loss_spikes.LIMIT_VARIABLE: "3.0"}


@given(st.lists(st.tuples(st.integers(0, 400), st.sampled_from(["not finite", "spike"])), min_size=1, max_size=12))
def test_any_history_ends(places: list[tuple[int, Any]]) -> None:
    """What is passed over only grows, batches far from any bad one never are, and no place is tried for ever."""
    history, skip = [], ()
    for place, kind in places:
        history.append(bad(place, kind=kind))
        found = roll_back(history, skip)
        near = sum(abs(p.batch - place) <= 32 for p in history)
        assert found.action == ("retry" if near == 1 else "halt" if near > MAX_SKIPS + 1 else "skip")
        before = {n for n in range(500) if is_in_ranges(skip, n)}
        after = {n for n in range(500) if is_in_ranges(found.skip, n)}
        assert before <= after
        assert all(any(abs(n - p.batch) <= 16 for p in history) for n in after)
        assert str(place) in found.reason
        skip = found.skip


def test_a_step_that_may_be_spoiled_is_not_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not count as one to keep."""
    url = tmp_path / "repo"
    for step in range(6):
        ckpt.save({"x": np.full(3, float(step))}, url, step=step, group=None)
    monkeypatch.setenv(RESTORE_LIMIT_VARIABLE, "4")
    with ckpt.Checkpointer(url, every=1, keep=2, group=None) as ck:
        state, start = ck.restore({"x": np.zeros(3)})
        assert (state["x"][0], start) == (3.0, 4)
        ck.save(4, {"x": np.full(3, 44.0)}, blocking=True).result()
        assert ckpt.open(url).steps() == [3, 4], "5 may be spoiled: it is abandoned, and goes first"
    monkeypatch.setenv(RESTORE_LIMIT_VARIABLE, "1")
    with ckpt.Checkpointer(url, group=None) as ck:
        assert ck.restore({"x": np.zeros(3)})[1] == 5, "where there is no older one, the newest is better than nothing"
    monkeypatch.setenv(RESTORE_LIMIT_VARIABLE, "x")
    with pytest.raises(InvalidArgument, match="is no step"), ckpt.Checkpointer(url, group=None) as ck:
        ck.restore({"x": np.zeros(3)})
    monkeypatch.delenv(RESTORE_LIMIT_VARIABLE)
    assert ckpt.load(url, group=None)["x"][0] == 44.0


def test_a_batch_that_spoils_the_weights_is_passed_over(tmp_path: Path) -> None:
    """The spoiled weights are saved before a loss shows it. What comes out in the end never saw that batch."""
    history: list[BadLoss] = []
    actions: list[str] = []
    environ: dict[str, str] = {}
    for attempt in range(6):
        page = HeartbeatPage(tmp_path / f"page-{attempt}", new=True)
        command = [sys.executable, str(Path(PROGRAM).with_name("spoiled_program.py")), str(tmp_path / "repo"), "20", "13"]
        environ[pulses.PAGE_VARIABLE] = str(tmp_path / f"page-{attempt}")
        subprocess.run(command, env=os.environ | environ, check=True, timeout=60, stderr=subprocess.DEVNULL)
        beat = page.read()
        page.close()
        if beat.bad is None:
            break
        history.append(beat.bad)
        decision = roll_back(history, parse_ranges(environ.get(SKIP_VARIABLE, "")))
        actions.append(decision.action)
        environ |= told(decision)
    assert actions == ["retry", "skip"]
    assert environ[SKIP_VARIABLE] == "13-14"
    assert [(bad.step, bad.batch) for bad in history] == [(14, 14)] * 2
    batches = [n for n in range(22) if n not in (13, 14)]
    want = np.zeros(3)
    for n in batches:
        want += np.sin([2 * n, 2 * n + 1]).sum()
    found = ckpt.load(tmp_path / "repo", group=None)
    assert np.array_equal(found["w"], want)
    assert ckpt.open(tmp_path / "repo").steps()[-1] == 19


# --- how often to save -----------------------------------------------------------------------------------------


@given(st.floats(0, 1e7), st.integers(0, 1000))
def test_mean_time_to_failure(uptime: float, failures: int) -> None:
    found = posterior_mtbf_seconds(uptime, failures)
    assert posterior_mtbf_seconds(uptime, failures + 1) < found
    assert posterior_mtbf_seconds(uptime + 1, failures) > found
    assert posterior_mtbf_seconds(0, 0, 77) == 77
    if failures > 100:
        assert found == pytest.approx(uptime / failures, rel=0.02, abs=DEFAULT_MTBF_SECONDS / failures)


def test_the_mean_time_that_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mtbf_seconds_from_env({}) == DEFAULT_MTBF_SECONDS
    assert mtbf_seconds_from_env({MTBF_VARIABLE: "60"}) == 60
    for text in ("x", "-1", "nan", "inf", "0"):
        with pytest.raises(InvalidArgument, match=text):
            mtbf_seconds_from_env({MTBF_VARIABLE: text})
    intervals = []
    for seconds in ("100000", "100", "1"):
        monkeypatch.setenv(MTBF_VARIABLE, seconds)
        with ckpt.Checkpointer(tmp_path / "repo", every="auto", group=None) as ck:
            intervals.append(ck._interval())
            assert intervals[-1] == daly_interval_seconds(ck._cost_seconds, float(seconds))
    assert intervals == sorted(intervals, reverse=True)
    assert len(set(intervals)) == 3


def test_every_order_of_steps_to_try() -> None:
    from ckpt.format.training_lines import order_by_number

    for numbers in itertools.permutations([1, 4, 7, 9]):
        assert order_by_number(numbers).newest_first(None) == [9, 7, 4, 1]
        assert order_by_number(numbers).newest_first(7) == [4, 1, 9, 7]
        assert order_by_number(numbers).newest_first(0) == [9, 7, 4, 1]


@pytest.mark.skipif(not O_DIRECT, reason="no O_DIRECT on this system")
def test_a_restore_passes_the_page_cache_by(tmp_path: Path) -> None:
    """It happens once; what is loaded for a look may be loaded again."""
    values = np.random.default_rng(3).standard_normal(1 << 20)
    with ckpt.Checkpointer(tmp_path, codec="none") as saver:
        saver.save(0, {"w": values}).result()
    (pack,) = tmp_path.rglob("*.pack")
    drop_cache(pack)
    if is_cached(pack, 1 << 20):
        pytest.skip("a file system that is all in memory")

    def restore() -> None:
        with ckpt.Checkpointer(tmp_path) as saver:
            restored, start = saver.restore({"w": np.zeros(1 << 20)})
        assert start == 1
        assert np.array_equal(restored["w"], values)

    assert bypasses_cache([pack], restore, lambda: is_cached(pack, 5 << 20))
    assert np.array_equal(ckpt.load(tmp_path)["w"], values)
    assert is_cached(pack, 6 << 20)
