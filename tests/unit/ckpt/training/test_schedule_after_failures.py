"""After a scheduled save that failed or was left out, all ranks attempt the same steps, whenever each learns of it."""

import os
import random
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
from helpers.rank_threads import all_well, on_ranks
from helpers.tier_folders import shard_of

import ckpt
from ckpt.training.save_schedule import SaveSchedule


def test_a_rank_that_learns_late_of_a_skipped_save_does_not_let_the_others_wait(tmp_path):
    """Rank 1 leaves out step 0, and rank 0 learns of it only after it has passed the next step that is due for rank 1."""
    rank_0_is_ahead = threading.Event()

    def work(group):
        with ckpt.Checkpointer(tmp_path / "r", every=timedelta(hours=1), group=group, timeout=300) as ck:
            if group.rank:
                assert rank_0_is_ahead.wait(300)
                assert ck.step(0, shard_of(1, 2, 0), loss=float("nan")) is None
            else:
                first = ck.step(0, shard_of(0, 2, 0))
                for step in range(1, 99):
                    assert ck.step(step, shard_of(0, 2, step)) is None
                rank_0_is_ahead.set()
                with pytest.raises(ckpt.StepSkipped):
                    first.result(300)
            handles = [ck.step(step, shard_of(group.rank, 2, step)) for step in range(1 if group.rank else 99, 250)]
            for handle in filter(None, handles):
                try:
                    handle.result(300)
                except ckpt.StepSkipped:
                    pass
            return [handle.step for handle in handles if handle is not None and not handle.failed()]

    assert all_well(on_ranks(2, work)) == [[100]] * 2


def test_a_rank_whose_save_fails_when_it_begins_keeps_the_schedule_of_the_others(tmp_path):
    """The call raises on that rank, whose program continues; the handle of the other rank fails."""
    has_failed = threading.Event()

    def work(group):
        saved = []
        with ckpt.Checkpointer(tmp_path / "r", every=timedelta(hours=1), group=group, timeout=300) as ck:
            if group.rank:
                with pytest.raises(ckpt.UnsupportedLeaf):
                    ck.step(0, {"f": lambda: 0})
                has_failed.set()
            else:
                first = ck.step(0, shard_of(0, 2, 0))
                assert has_failed.wait(300)
                with pytest.raises(ckpt.StepRefused, match="rank 1 failed"):
                    first.result(300)
            for step in range(1, 250):
                if (handle := ck.step(step, shard_of(group.rank, 2, step))) is not None:
                    saved.append(step)
                    handle.result(300)
        return saved

    assert all_well(on_ranks(2, work)) == [[100]] * 2


class _Save:
    """A save of whose end a rank learns at a later step; it fails unless it schedules the next one."""

    current_step = 0

    def __init__(self, learned_at: int, next_step: int | None) -> None:
        self._learned_at = learned_at
        self._next_step = next_step

    def done(self) -> bool:
        return self.current_step >= self._learned_at

    def failed(self) -> bool:
        return self._next_step is None

    def has_error_to_raise(self) -> bool:
        return False

    def result(self) -> SimpleNamespace:
        return SimpleNamespace(commit=SimpleNamespace(next_save=self._next_step))


@pytest.mark.parametrize("number", range(50))
def test_all_ranks_attempt_the_same_steps(number):
    """Each rank attempts each step by a save or by a report, in the same order, whenever it learns of a failure."""
    seed = int.from_bytes(os.urandom(4))
    print(f"seed {seed}")
    rng = random.Random(seed)
    gap, delay = rng.choice([1, 2, 4, 7, 50, 300]), rng.choice([0, 1, 10, 1000])
    attempts = [_attempted_steps(rng, gap, delay) for _ in range(rng.randint(2, 4))]
    shortest = min(map(len, attempts))
    assert shortest > 1, f"seed {seed}"
    assert {tuple(each[:shortest]) for each in attempts} == {tuple(range(0, gap * shortest, gap))}, f"seed {seed}: {attempts}"


def _attempted_steps(rng: random.Random, gap: int, delay: int) -> list[int]:
    """Return the steps that one rank saves, leaves out or reports as missed. Only the first save succeeds."""
    schedule, found = SaveSchedule(lambda: 0.0), list[int]()
    pending = _Save(0, gap)
    for step in range(5000):
        pending.current_step = step
        if schedule.is_due(step):
            if found and rng.random() < 0.3:
                schedule.save_skipped(step)
            else:
                pending = _Save(step + rng.randint(0, delay), None) if found else _Save(1, gap)
                schedule.save_started(step, pending)
            found.append(step)
        elif (missed := schedule.take_missed_step()) is not None:
            schedule.save_skipped(missed)
            found.append(missed)
    return found
