"""Saves to a store that is full until files that no step needs are deleted."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from helpers.failing_store import FailingStore, failing
from helpers.rank_threads import all_well, on_ranks
from helpers.states import state_of
from helpers.tier_folders import shard_of

import ckpt
from ckpt.groups.base import Group
from ckpt.repository import writer_lease
from ckpt.repository.repository import Repository
from ckpt.repository.retention import sweep
from ckpt.saving import writer_session
from ckpt.storage.base.errors import NoSpace
from ckpt.storage.base.store import Writer
from ckpt.storage.local.directory import LocalStore


class FullWhileStore(FailingStore):
    """A local directory that is full while a file exists in it."""

    def __init__(self, root: Path, file: str) -> None:
        super().__init__(LocalStore(root))
        self._file = root / file

    def create(self, name: str, size_hint: int = 0) -> Writer:
        writer = super().create(name, size_hint)
        if self._file.exists():
            writer.abort()
            raise NoSpace(f"{self.url}/{name}: the disk is full")
        return writer


def leave_pack(root: Path, generation: int = 0) -> str:
    """Write the pack of a save that was killed in an earlier generation; return its name."""
    name = f"steps/9/pack/0-{generation}-0-0.pack"
    (root / name).parent.mkdir(parents=True)
    (root / name).write_bytes(bytes(4096))
    return name


@pytest.mark.parametrize("blocking", [True, False])
def test_a_save_deletes_leftovers_and_is_written(tmp_path: Path, blocking: bool) -> None:
    ckpt.save(state_of(1), tmp_path, 1)
    store = FullWhileStore(tmp_path, leave_pack(tmp_path))
    saved = ckpt.save(state_of(2), store, 2, blocking=blocking)
    if isinstance(saved, ckpt.SaveHandle):
        saved.result()
    assert store.calls["create"] == 2
    assert ckpt.open(tmp_path).steps() == [1, 2]


def test_a_save_to_a_full_store_makes_room_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The pack belongs to a writer of a later generation, so it stays."""
    ckpt.save(state_of(1), tmp_path, 1)
    store = FullWhileStore(tmp_path, leave_pack(tmp_path, generation=7))
    with pytest.raises(NoSpace):
        ckpt.save(state_of(2), store, 2)
    assert caplog.text.count("is full: ") == 1


def test_a_save_with_space_sweeps_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leftovers alone cause no sweep before the commit."""
    ckpt.save(state_of(1), tmp_path, 1)
    leftover = leave_pack(tmp_path)
    steps: list[list[int]] = []

    def record_sweep(repo: Repository, *args: Any) -> None:
        steps.append(repo.steps())
        sweep(repo, *args)

    monkeypatch.setattr(writer_session, "sweep", record_sweep)
    ckpt.save(state_of(2), tmp_path, 2)
    assert steps == [[1, 2]]
    assert not (tmp_path / leftover).exists()


def test_the_next_save_has_room_after_a_write_found_none(tmp_path: Path) -> None:
    """A store without reservations finds out only while it writes."""
    ckpt.save(state_of(1), tmp_path, 1)
    leftover = leave_pack(tmp_path)
    with failing("save.append=full"), pytest.raises(ckpt.StoreError):
        ckpt.save(state_of(2), tmp_path, 2)
    assert not (tmp_path / leftover).exists()
    ckpt.save(state_of(2), tmp_path, 2)
    assert ckpt.open(tmp_path).steps() == [1, 2]


class FullForSecondStep(LocalStore):
    """Full for step 2 once step 1 has written its pack; step 1 commits once step 2 has asked for space again."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.has_pack, self.may_commit = threading.Event(), threading.Event()

    def create(self, name: str, size_hint: int = 0) -> Any:
        if name.startswith("steps/2/") and not self.has_pack.is_set():
            assert self.has_pack.wait(600)
            raise NoSpace(f"{self.url}/{name}: the disk is full")
        if name.startswith("steps/2/"):
            self.may_commit.set()
        return super().create(name, size_hint)

    def put(self, name: str, data: Any) -> None:
        if name.startswith("steps/1/manifest/"):
            self.has_pack.set()
            assert self.may_commit.wait(600)
        super().put(name, data)


def test_another_save_in_flight_keeps_its_files(tmp_path: Path) -> None:
    leftover = leave_pack(tmp_path / "other")
    store = FullForSecondStep(tmp_path / "run")
    with ckpt.Checkpointer(store, every=1, in_flight=2, keep=2, group=None) as ck:
        leave_pack(tmp_path / "run")
        handles = [ck.step(step, state_of(step)) for step in (1, 2)]
        for handle in handles:
            assert handle is not None
            handle.result()
    assert not (tmp_path / "run" / leftover).exists()
    assert ckpt.open(tmp_path / "run").steps() == [1, 2]
    for step in (1, 2):
        assert ckpt.open(tmp_path / "run")[step].verify() > 0


@pytest.mark.parametrize("full_rank", [0, 1])
def test_rank_0_makes_room_for_the_next_save_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_rank: int
) -> None:
    """The job before was killed between a commit and the deletion of step 0, which another rank than 0 can't delete."""
    monkeypatch.setattr(writer_lease, "UNSEEN_SECONDS", 0.0)  # here, that job was a group of this process

    def save_old(group: Group) -> None:
        for step in range(3):
            ckpt.save(shard_of(group.rank, 2, step), tmp_path, step, group=group)

    def save_next(group: Group) -> list[str]:
        store = FullWhileStore(tmp_path, "steps/0/commit.json") if group.rank == full_rank else LocalStore(tmp_path)
        found = []
        for step in (3, 4):
            try:
                ckpt.save(shard_of(group.rank, 2, step), store, step, keep=2, group=group, timeout=60)
                found.append("saved")
            except ckpt.CkptError as error:
                found.append(type(error).__name__)
            group.all_gather(b"")
        return found

    all_well(on_ranks(2, save_old))
    found = all_well(on_ranks(2, save_next))
    assert found == ([["saved"] * 2] * 2 if full_rank == 0 else [["StepRefused", "saved"], ["NoSpace", "saved"]])
    assert ckpt.open(tmp_path).steps() == ([3, 4] if full_rank == 0 else [2, 4])


def test_ranks_delete_what_a_killed_job_has_left_before_they_write(tmp_path: Path) -> None:
    ckpt.save(shard_of(0, 1, 1), tmp_path, 1)
    leftover = leave_pack(tmp_path)

    def save_next(group: Group) -> int:
        store = FullWhileStore(tmp_path, leftover)
        ckpt.save(shard_of(group.rank, 2, 2), store, 2, group=group)
        return store.calls["create"]

    assert all_well(on_ranks(2, save_next)) == [1, 1]
    assert ckpt.open(tmp_path).steps() == [1, 2]
