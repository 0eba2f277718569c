"""What a failed save deletes, and what it leaves: the files of other attempts, and those of a step that exists after all."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.failing_store import failing
from helpers.rank_threads import all_well, on_ranks
from helpers.repositories import assert_clean, files
from helpers.states import assert_same, state_of

import ckpt
from ckpt.errors import RanksMissing, StepRefused
from ckpt.groups.base import Group
from ckpt.groups.threads import ThreadGroup
from ckpt.storage.base.errors import StoreError
from ckpt.storage.base.store import Buffer, Version
from ckpt.storage.local.directory import LocalStore


class _WaitsAndFails(LocalStore):
    """A directory in which the write of one file waits, and fails."""

    def __init__(self, path: Path, failing_file: str) -> None:
        super().__init__(path)
        self._failing_file = failing_file
        self.may_fail = threading.Event()

    def put(self, name: str, data: Buffer) -> None:
        if name == self._failing_file:
            assert self.may_fail.wait(600)
            raise StoreError(f"{name} can't be written")
        super().put(name, data)


@pytest.mark.slow
@pytest.mark.parametrize("later", [1, 9, 10])
def test_a_failed_save_leaves_the_files_of_a_later_save_of_its_step(tmp_path: Path, later: int) -> None:
    """The name of a later attempt may begin with that of the earlier one, as 0-1-10 does with 0-1-1.

    The later save begins when the failed one has ended.
    """
    store = _WaitsAndFails(tmp_path, "steps/50/manifest/0-1-1.parquet")
    with ckpt.Checkpointer(store, every=None, in_flight=3, group=None) as saver:
        saver.save(0, state_of(0, 50), blocking=True)
        failed = saver.save(50, state_of(1, 50))
        for step in range(1, later):
            saver.save(step, state_of(step, 50), blocking=True)
        assert not failed.done()
        threading.Timer(0.2, store.may_fail.set).start()
        later_save = saver.save(50, state_of(2, 50))
        assert failed.done()
        with pytest.raises(ckpt.CkptError, match="can't be written"):
            failed.result()
        later_save.result()
        assert_same(ckpt.load(tmp_path, step=50, strict=True), state_of(2, 50))
        saver.save(51, state_of(51, 50))
    assert_clean(tmp_path, folders=False)


class _LosesReply(LocalStore):
    """A directory that publishes a record and then fails, as if the answer were lost."""

    def publish(self, name: str, data: Buffer, confirm: Callable[[], None], replaces: Version | None = None) -> None:
        super().publish(name, data, confirm, replaces)
        raise StoreError("no answer")


def test_a_step_whose_reply_was_lost_keeps_its_files(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no answer"):
        ckpt.save(state_of(3, 50), _LosesReply(tmp_path), 3, group=None)
    assert_same(ckpt.load(tmp_path, strict=True), state_of(3, 50))
    assert_clean(tmp_path)


@pytest.mark.parametrize("point", ["save.manifest", "save.commit"])
def test_a_failed_save_deletes_its_own_files_and_leaves_the_step_that_it_would_replace(tmp_path: Path, point: str) -> None:
    ckpt.save(state_of(3, 50), tmp_path, 3, group=None)
    with failing(f"{point}=error"), pytest.raises(StoreError, match="injected"):
        ckpt.save(state_of(4, 50), tmp_path, 3, group=None, overwrite=True)
    assert_same(ckpt.load(tmp_path, strict=True), state_of(3, 50))
    assert_clean(tmp_path, folders=False)


class _RemovedRepository(LocalStore):
    """A directory that somebody deletes before the record is published."""

    def publish(self, name: str, data: Buffer, confirm: Callable[[], None], replaces: Version | None = None) -> None:
        shutil.rmtree(self.root)
        raise StoreError("no such folder")


def test_a_failed_save_writes_nothing_into_a_deleted_repository(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such folder"):
        ckpt.save(state_of(3, 50), _RemovedRepository(tmp_path / "run"), 3, group=None)
    assert not (tmp_path / "run").exists()


def test_a_rank_that_waited_in_vain_keeps_the_packs_that_rank_0_may_commit(tmp_path: Path) -> None:
    groups = ThreadGroup.make(2)
    all_well(on_ranks(2, lambda g: ckpt.save(own_half(g), tmp_path, 1, group=g), groups))
    with pytest.raises(RanksMissing, match="rank 0 of 2 has not committed step 2"):
        ckpt.save(own_half(groups[1], 7.0), tmp_path, 2, group=groups[1], timeout=0.1)
    names = sorted(name.split("/")[-1].split("-")[0] + name.split("/")[2] for name in files(tmp_path) if "steps/2/" in name)
    assert names == ["1pack", "1part"]


def test_ranks_whose_step_was_refused_delete_their_packs(tmp_path: Path) -> None:
    """Rank 0 has refused it, and commits nothing."""
    groups = ThreadGroup.make(2)
    all_well(on_ranks(2, lambda g: ckpt.save(own_half(g), tmp_path, 1, group=g), groups))
    gap = {"w": ckpt.Shard(np.ones((2, 5)), (5, 5), (0, 0))}
    found = on_ranks(2, lambda g: ckpt.save(gap, tmp_path, 2, group=g, timeout=20), groups)
    assert all(isinstance(error, StepRefused) and "step 2: leaf w: " in str(error) for error in found), found
    left = [name for name in files(tmp_path) if "steps/2/" in name]
    assert all(name.endswith("-failed.json") for name in left), left
    assert left, "a slow rank must find the reason"


def own_half(group: Group, value: float = 0.0) -> dict[str, object]:
    """Return the state of one of two ranks, with half of an array."""
    return {"w": ckpt.Shard(np.full((2, 5), value + group.rank), (4, 5), (2 * group.rank, 0))}
