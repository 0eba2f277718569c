"""Steps of successive jobs of many ranks: parts of an earlier job are ignored, and a newer job fences an older one."""

from __future__ import annotations

import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.processes import finish, python
from helpers.rank_threads import all_well, on_ranks, one_array
from helpers.repositories import assert_clean
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt.groups.base import Group
from ckpt.groups.threads import ThreadGroup
from ckpt.storage.base.failpoints import set_failpoints
from ckpt.training.save_schedule import LEAD_SECONDS, next_step


def test_parts_of_an_earlier_generation_are_ignored(tmp_path: Path) -> None:
    """Rank 1 of a killed job left its part; rank 1 of the next job never saves."""

    def stale(group: Group) -> Any:
        return ckpt.save({"a": np.full(2000, 1.0)}, tmp_path, 0, group=group, timeout=0.3)

    set_failpoints("save.commit=error")
    try:
        first = on_ranks(2, stale)
    finally:
        set_failpoints("")
    assert isinstance(first[0], ckpt.StoreError)
    keep = list((tmp_path / "steps/0/part").glob("1-*"))
    part = tmp_path / "steps/0/part" / "1-1-0-0-0123456789abcdef0123456789abcdef.arrow"
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(keep[0].read_bytes() if keep else b"x")
    groups = ThreadGroup.make(2)

    def work(group: Group) -> Any:
        saver = ckpt.Checkpointer(tmp_path, every=None, group=group, timeout=0.3)
        return saver.save(0, {"a": np.full(2000, 2.0)}, blocking=True).result() if group.rank == 0 else None

    found = on_ranks(2, work, groups)
    assert isinstance(found[0], ckpt.RanksMissing), found
    assert ckpt.open(tmp_path).steps() == []


def test_a_second_job_fences_the_first(tmp_path: Path) -> None:
    groups = ThreadGroup.make(2)
    all_well(on_ranks(2, lambda g: ckpt.save({"a": np.zeros(10)}, tmp_path, 0, group=g), groups))
    record = tmp_path / "generations" / "00000009.json"
    record.write_bytes(sorted((tmp_path / "generations").iterdir())[-1].read_bytes())
    found = on_ranks(2, lambda g: ckpt.save({"a": np.zeros(10)}, tmp_path, 1, group=g), groups)
    assert isinstance(found[0], ckpt.Fenced)
    assert isinstance(found[1], (ckpt.Fenced, ckpt.StepRefused))
    assert ckpt.open(tmp_path).steps() == [0]


def test_a_rank_is_fenced_when_a_newer_job_has_its_step(tmp_path: Path) -> None:
    """It does not take another step number."""
    groups = ThreadGroup.make(2)
    all_well(on_ranks(2, lambda g: ckpt.save(one_array(0), tmp_path, 0, group=g), groups))
    mine = sorted((tmp_path / "generations").iterdir())[-1]
    mine.with_name("00000009.json").write_bytes(mine.read_bytes())
    for error in on_ranks(2, lambda g: ckpt.save(one_array(1), tmp_path, 0, group=g), groups):
        assert isinstance(error, ckpt.Fenced)


def test_unchanged_blocks_are_referenced_and_old_steps_deleted(tmp_path: Path) -> None:
    """Half of the state never changes; with keep=2 only the files that the last two steps need are left."""
    groups = ThreadGroup.make(3)
    frozen = np.random.default_rng(1).standard_normal((3, 200_000))

    def work(group: Group) -> None:
        with ckpt.Checkpointer(tmp_path, every=1, keep=2, group=group, codec="none") as saver:
            state = {
                "frozen": ckpt.Shard(frozen[group.rank : group.rank + 1].copy(), frozen.shape, (group.rank, 0)),
                "moving": ckpt.Shard(np.zeros((1, 1000), np.float32), (3, 1000), (group.rank, 0)),
            }
            for step in range(6):
                state["moving"].local += 1
                saver.step(step, state)

    all_well(on_ranks(3, work, groups))
    repo = ckpt.open(tmp_path)
    assert repo.steps() == [4, 5]
    assert repo[5].commit.written_bytes < frozen.nbytes / 10
    loaded = ckpt.load(tmp_path)
    assert np.array_equal(loaded["frozen"], frozen)
    assert (loaded["moving"] == 6).all()
    assert_clean(tmp_path, folders=False)


@pytest.mark.slow
def test_steps_counted_in_seconds_are_the_same_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks whose clocks and speeds differ save the same steps."""
    monkeypatch.setattr("ckpt.training.save_schedule.LEAD_SECONDS", 0.2)

    def work(group: Group) -> list[int]:
        saved = []
        with ckpt.Checkpointer(tmp_path, every=timedelta(seconds=0.05), group=group) as saver:
            for step in range(20_000):
                if step >= 120 and len(saved) >= 2:  # a busy machine may be slow to end the first save
                    break
                time.sleep(0.004 + 0.002 * group.rank)
                if saver.step(step, {"a": np.full(100, float(step))}) is not None:
                    saved.append(step)
        return saved

    saved = all_well(on_ranks(3, work))
    assert saved[0][0] == 0
    assert len(saved[0]) >= 2
    assert saved[0] == saved[1] == saved[2] == ckpt.open(tmp_path).steps()


@given(st.integers(0, 10**6), st.floats(1e-4, 100), st.floats(0.01, 10**5))
def test_the_next_save_is_far_enough_ahead_and_near_its_interval(now: int, step_seconds: float, interval: float) -> None:
    step = next_step(now, step_seconds, interval)
    assert (step - now) * step_seconds >= LEAD_SECONDS
    assert abs((step - now) * step_seconds - interval) <= max(step_seconds, LEAD_SECONDS + 4 * step_seconds)


def test_all_ranks_fall_back_to_the_same_older_step(tmp_path: Path) -> None:
    """The newest step is damaged where only rank 1 reads: every rank loads the step before it."""
    full = np.random.default_rng(3).integers(0, 1000, (2, 300_000)).astype(float)

    def state(rank: int, fill: bool = True) -> dict[str, Any]:
        local = full[rank : rank + 1].copy() if fill else np.zeros((1, 300_000))
        return {"w": ckpt.Shard(local, full.shape, (rank, 0)), "step": 0}

    for step in (0, 1):
        both = on_ranks(2, lambda g, n=step: ckpt.save(state(g.rank) | {"step": n}, tmp_path, n, group=g, codec="none"))
        all_well(both)
        full += 1
    full -= 2
    pack = next((tmp_path / "steps/1/pack").glob("1-*.pack"))
    data = bytearray(pack.read_bytes())
    data[1000] ^= 1
    pack.write_bytes(data)

    def load(group: Group) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = ckpt.load(tmp_path, state(group.rank, False), group=group)
        assert np.array_equal(loaded["w"].local, full[group.rank : group.rank + 1])
        return int(loaded["step"])

    assert all_well(on_ranks(2, load)) == [0, 0]
    for error in on_ranks(2, lambda g: ckpt.load(tmp_path, state(g.rank, False), group=g, step=1)):
        assert isinstance(error, ckpt.IntegrityError)
    next((tmp_path / "steps/0/pack").glob("0-*.pack")).unlink()
    for error in on_ranks(2, lambda g: ckpt.load(tmp_path, state(g.rank, False), group=g)):
        assert isinstance(error, ckpt.IntegrityError)
        assert "every step of " in str(error)
        assert " is damaged (steps 0, 1); the newest: leaf w of step 1" in str(error)


EXIT = """
import sys, threading
import numpy as np
import ckpt
from ckpt.groups.threads import ThreadGroup

groups = ThreadGroup.make(2)

def work(group):
    ckpt.save({"a": np.ones(3_000_000)}, sys.argv[1], 0, group=group, blocking=False)

threads = [threading.Thread(target=work, args=(g,)) for g in groups]
for t in threads:
    t.start()
for t in threads:
    t.join()
"""


@pytest.mark.slow
def test_a_save_in_flight_when_the_program_ends_is_committed(tmp_path: Path) -> None:
    finish(python(EXIT, tmp_path / "run", env={"CKPT_FAILPOINTS": "ranks.gather=sleep:0.5"}))
    assert ckpt.load(tmp_path / "run")["a"].sum() == 3_000_000
