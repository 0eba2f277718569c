"""Which steps a loop saves and keeps."""

import os
import random
import time
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.rank_threads import all_well, on_ranks
from helpers.tier_folders import shard_of

import ckpt
from ckpt.training import save_schedule
from ckpt.training.save_interval import daly_interval_seconds
from ckpt.training.save_schedule import SaveSchedule


def test_keep_last_and_every_combine(tmp_path):
    with ckpt.Checkpointer(tmp_path / "r", every=1, keep=ckpt.Keep(last=2, every=5)) as ck:
        for step in range(13):
            ck.step(step, {"x": np.full(10, step)})
            ck.wait()
    assert ckpt.open(tmp_path / "r").steps() == [0, 5, 10, 11, 12]


def test_keep_every_counts_steps_as_the_loop_does(tmp_path):
    """Number 99 is the 100th step, and a loop with every=10 saves no multiple of 100."""
    with ckpt.Checkpointer(tmp_path / "r", every=10, keep=ckpt.Keep(last=2, every=100)) as ck:
        for step in range(350):
            if ck.step(step, {"x": np.full(10, step)}) is not None:
                ck.wait()
    assert ckpt.open(tmp_path / "r").steps() == [9, 99, 199, 299, 339, 349]


@pytest.mark.slow
def test_of_steps_that_are_saved_by_time_the_first_of_each_window_is_kept(tmp_path):
    seed = int.from_bytes(os.urandom(4))
    print(f"seed {seed}")
    rng, saved, step = random.Random(seed), list[int](), 0
    with ckpt.Checkpointer(tmp_path / "r", every=timedelta(milliseconds=2), keep=ckpt.Keep(last=2, every=100)) as ck:
        while step < 1500:
            time.sleep(0.0005)
            step += rng.randint(1, 9)
            if ck.step(step, {"x": np.full(10, step)}) is not None:
                ck.wait()
                saved.append(step)
    kept = ckpt.open(tmp_path / "r").steps()
    assert len({s // 100 for s in saved}) > 10, f"seed {seed}: too few steps are saved"
    of_window = {(s + ((s + 1) % 100 == 0 and s + 1 not in saved)) // 100: s for s in reversed(saved)}
    assert kept == sorted({*of_window.values(), *saved[-2:]}), f"seed {seed}"


def test_of_steps_that_grow_by_more_than_one_the_first_of_each_window_is_kept(tmp_path):
    """The steps are the ends of epochs of 37 steps, and the loop is started again in between."""
    for end in (12, 20, 30):
        with ckpt.Checkpointer(tmp_path / "r", every=1, keep=ckpt.Keep(last=2, every=100)) as ck:
            state, start = ck.restore({"x": np.zeros(3)})
            for step in range(start + 36, 37 * end, 37):
                state["x"] += 1
                ck.step(step, state)
                ck.wait()
    firsts = [36, 110, 221, 332, 406, 517, 628, 702, 813, 924, 1035]
    assert ckpt.open(tmp_path / "r").steps() == [*firsts, 1072, 1109]


def test_a_step_is_replaced_only_on_request(tmp_path):
    ckpt.save({"x": np.zeros(3)}, tmp_path / "r", step=5)
    with pytest.raises(ckpt.AlreadyExists, match=r"step 5 .* overwrite=True"):
        ckpt.save({"x": np.ones(3)}, tmp_path / "r", step=5)
    ckpt.save({"x": np.ones(3)}, tmp_path / "r", step=5, overwrite=True)
    assert ckpt.load(tmp_path / "r")["x"].tolist() == [1, 1, 1]
    assert len(list((tmp_path / "r/steps/5/pack").iterdir())) == 1


def test_a_restarted_loop_saves_every_third_step_and_continues(tmp_path):
    for begin in (0, 7, 14):
        with ckpt.Checkpointer(tmp_path / "r", every=3, keep=3) as ck:
            state, start = ck.restore({"w": np.zeros(5), "step": -1})
            assert start == (0 if not begin else begin - begin % 3)
            assert state["step"] == start - 1
            for step in range(start, begin + 7):
                state["w"] += 1
                state["step"] = step
                ck.step(step, state, loss=1.0)
    assert ckpt.open(tmp_path / "r").steps() == [14, 17, 20]
    assert ckpt.load(tmp_path / "r")["w"].tolist() == [21.0] * 5
    with ckpt.Checkpointer(tmp_path / "r", every=1) as ck:
        assert ck.step(30, {"w": np.zeros(1)}, loss=float("nan")) is None
        assert ck.step(31, {"w": np.zeros(1)}, loss=torch.tensor(2.0)) is not None
    assert ckpt.open(tmp_path / "r").steps()[-1] == 31


def test_steps_that_grow_by_more_than_one(tmp_path):
    """The first step at or after each multiple is saved, as with several optimizers of one batch."""
    with ckpt.Checkpointer(tmp_path / "r", every=5) as ck:
        _, start = ck.restore({"x": np.zeros(1)})
        for done in range(start + 3, 31, 3):
            ck.step(done - 1, {"x": np.zeros(1)})
            ck.wait()
    assert [step + 1 for step in ckpt.open(tmp_path / "r").steps()] == [6, 12, 15, 21, 27, 30]


def test_schedule_of_a_group_begins_anew_after_a_restore():
    """The due step may be far ahead of the restored one."""
    schedule = SaveSchedule(lambda: 0.0)
    assert schedule.is_due(5000)
    schedule.save_skipped(5000)
    assert schedule.next_due_step() == 5100
    schedule.restored()
    assert schedule.is_due(101)


def test_schedule_of_a_group_begins_anew_at_an_older_step():
    """A loop in a notebook is run again, without a restore: it may never reach the due step."""
    schedule = SaveSchedule(lambda: 0.0)
    assert schedule.is_due(4990)
    schedule.save_skipped(4990)
    assert not schedule.is_due(5000)
    assert not schedule.is_due(4995), "a later step than the last save"
    assert schedule.next_due_step() == 5090
    assert schedule.is_due(51)
    schedule.save_skipped(51)
    assert not schedule.is_due(54)
    assert schedule.propose_next_step() % 3 == 0, "the steps that the loop reported before do not count"
    assert schedule.next_due_step() == 151


def test_ranks_that_save_by_time_save_the_first_step_of_a_loop_that_is_run_again(tmp_path):
    def work(group):
        with ckpt.Checkpointer(tmp_path / "r", every=timedelta(hours=1), group=group, timeout=60) as ck:
            saved = [ck.step(step, shard_of(group.rank, 2, step)) is not None for step in (100, 101)]
            ck.wait()
            return saved + [ck.step(step, shard_of(group.rank, 2, step)) is not None for step in (5, 6)]

    assert all_well(on_ranks(2, work)) == [[True, False, True, False]] * 2
    assert ckpt.open(tmp_path / "r").steps() == [100, 5], "in the order of training lines"


def test_ranks_that_save_by_time_save_the_first_step_after_a_restore(tmp_path):
    def work(group):
        with ckpt.Checkpointer(tmp_path / "r", every=timedelta(hours=1), group=group, timeout=60) as ck:
            ck.step(0, shard_of(group.rank, 2, 0))
            ck.step(1, shard_of(group.rank, 2, 1))
            ck.wait()
            ck.save(50, shard_of(group.rank, 2, 50))
            ck.restore(shard_of(group.rank, 2, 0), step=0)
            return [ck.step(step, shard_of(group.rank, 2, step)) is not None for step in (1, 2)]

    assert all_well(on_ranks(2, work)) == [[True, False]] * 2


def test_schedule_of_a_group_names_a_step_that_is_reported():
    schedule = SaveSchedule(lambda: 0.0)
    for step in (3, 6, 12):  # multiples of 3; some are left out
        schedule.is_due(step)
    assert schedule.propose_next_step() % 3 == 0


def test_ranks_whose_first_save_ends_before_their_second_step_save_again_soon(tmp_path):
    """No step has been measured then: the time of the save is not a guess for the time of a step, which may be much longer."""

    def work(group):
        with ckpt.Checkpointer(tmp_path / "r", every=timedelta(hours=1), group=group, timeout=60) as ck:
            for step in range(30):
                ck.step(step, shard_of(group.rank, 2, step))
                ck.wait()

    all_well(on_ranks(2, work))
    assert ckpt.open(tmp_path / "r").steps() == [0, 20]


def test_a_pause_does_not_make_a_group_save_more_often(monkeypatch):
    schedule, clock = SaveSchedule(lambda: 2.0), [100.0]
    monkeypatch.setattr(save_schedule, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    named, pauses = list[int](), [0.0, 2.0, 0.0]
    for save, pause in enumerate(pauses):
        for step in range(20 * save, 20 * save + 20):
            schedule.is_due(step)
            clock[0] += 0.002
        clock[0] += pause
        named.append(schedule.propose_next_step() - step)
    assert named[0] > 900
    assert min(named[1:]) >= named[0]


def test_a_save_is_due_by_time_by_default_or_never(tmp_path):
    state = {"x": np.zeros(1)}
    with ckpt.Checkpointer(tmp_path / "r", every=timedelta(seconds=0)) as ck:
        assert ck.step(0, state) is not None
    with ckpt.Checkpointer(tmp_path / "r", every=timedelta(hours=1)) as ck:
        assert ck.step(1, state) is None
    with ckpt.Checkpointer(tmp_path / "r") as ck:
        assert ck.step(2, state) is None  # "auto" means minutes for a save that costs so little
    with ckpt.Checkpointer(tmp_path / "r", every=None) as ck:
        assert ck.step(3, state) is None
        assert ck.save(3, state).result().step == 3
    with pytest.raises(ckpt.CkptError, match="closed"):
        ck.step(4, state)
    for wrong in ({"every": 0}, {"in_flight": 0}):
        with pytest.raises(ValueError):
            ckpt.Checkpointer(tmp_path / "r", **wrong)


def test_the_interval_agrees_with_daly():
    assert daly_interval_seconds(1, 7200) == pytest.approx(120, rel=0.02)
    assert daly_interval_seconds(60, 7200) == pytest.approx(889, rel=0.02)
    assert daly_interval_seconds(1e9, 60) == 60
    assert daly_interval_seconds(0.1) < daly_interval_seconds(1) < daly_interval_seconds(10)
