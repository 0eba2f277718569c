"""Two saves of one process run at once: none deletes or replaces what the other has committed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from helpers.rank_threads import all_well, on_ranks, one_array
from helpers.states import assert_same, state_of

import ckpt
from ckpt.groups.base import Group
from ckpt.repository import retention
from ckpt.repository.file_names import commit_name
from ckpt.storage.base.store import Buffer, Version, Writer
from ckpt.storage.local.directory import LocalStore

RECORD = commit_name(6)


class MeetingStore(LocalStore):
    """A local directory in which the record of step 6 is replaced right before a sweep deletes it, if the sweep does so."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_armed = False
        self.sweep_has_begun, self.is_published = threading.Event(), threading.Event()

    def create(self, name: str, size_hint: int = 0) -> Writer:
        if self.is_armed and name.startswith("steps/6/"):
            self.sweep_has_begun.wait(2)  # a sweep that spares the step never begins to delete its record
        return super().create(name, size_hint)

    def delete(self, names: Iterable[str]) -> None:
        every = list(names)
        if self.is_armed and RECORD in every:
            self.sweep_has_begun.set()
            assert self.is_published.wait(300)
        super().delete(every)

    def publish(self, name: str, data: Buffer, confirm: Callable[[], None], replaces: Version | None = None) -> None:
        super().publish(name, data, confirm, replaces)
        if self.is_armed and name == RECORD:
            self.is_published.set()


def test_a_sweep_spares_the_record_of_a_step_that_is_saved_again(tmp_path: Path) -> None:
    """A loop goes back to an earlier step while two saves may run at once."""
    store = MeetingStore(tmp_path / "run")
    with ckpt.Checkpointer(store, every=None, keep=2, in_flight=2, group=None) as saver:
        for step in (6, 7):
            saver.save(step, state_of(step)).result()
        store.is_armed = True
        first, second = saver.save(5, state_of(5)), saver.save(6, state_of(16))
        first.result()
        second.result()
        assert_same(ckpt.load(tmp_path / "run", step=6), state_of(16))


class SlowFirstSaveStore(LocalStore):
    """A local directory in which the first pack is written only after a later save had time to be committed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_published = threading.Event()

    def create(self, name: str, size_hint: int = 0) -> Writer:
        if name.endswith("/pack/0-1-0-0.pack"):
            self.is_published.wait(2)
        return super().create(name, size_hint)

    def publish(self, name: str, data: Buffer, confirm: Callable[[], None], replaces: Version | None = None) -> None:
        super().publish(name, data, confirm, replaces)
        self.is_published.set()


def test_the_later_of_two_saves_of_one_step_is_kept(tmp_path: Path) -> None:
    store = SlowFirstSaveStore(tmp_path / "run")
    with ckpt.Checkpointer(store, every=None, in_flight=2, group=None) as saver:
        handles = [saver.save(6, state_of(6)), saver.save(6, state_of(16))]
        assert [handle.result().step for handle in handles] == [6, 6]
    assert_same(ckpt.load(tmp_path / "run"), state_of(16))


class ReplacedRecordStore(LocalStore):
    """A local directory of a rank that reads the first record only after a later save had time to replace it."""

    def __init__(self, path: Path, is_replaced: threading.Event) -> None:
        super().__init__(path)
        self.is_replaced = is_replaced

    def get_up_to(self, name: str, max_bytes: int) -> bytes:
        if name == RECORD:
            self.is_replaced.wait(2)
        return super().get_up_to(name, max_bytes)


class ReplacingStore(LocalStore):
    """A local directory of a rank, which sets an event when it has replaced a record."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_replaced = threading.Event()

    def publish(self, name: str, data: Buffer, confirm: Callable[[], None], replaces: Version | None = None) -> None:
        super().publish(name, data, confirm, replaces)
        if replaces is not None:
            self.is_replaced.set()


def test_each_rank_finds_the_commit_of_two_saves_of_one_step(tmp_path: Path) -> None:
    first = ReplacingStore(tmp_path)
    stores = [first, ReplacedRecordStore(tmp_path, first.is_replaced)]

    def work(group: Group) -> list[int]:
        with ckpt.Checkpointer(stores[group.rank], every=None, in_flight=2, group=group, timeout=10) as saver:
            handles = [saver.save(6, one_array(value)) for value in (1.0, 2.0)]
            return [handle.result().step for handle in handles]

    assert all_well(on_ranks(2, work)) == [[6, 6]] * 2
    assert_same(ckpt.load(tmp_path, group=None), one_array(2.0))


def test_a_lack_of_memory_in_a_sweep_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The step is committed before."""

    def fail(*_: object) -> bool:
        raise MemoryError

    ckpt.save(state_of(1), tmp_path, 1)
    monkeypatch.setattr(retention, "is_complete", fail)
    assert ckpt.save(state_of(2), tmp_path, 2, keep=1).step == 2
    assert "deleting old files" in caplog.text
    monkeypatch.undo()
    ckpt.save(state_of(3), tmp_path, 3, keep=1)
    assert ckpt.open(tmp_path).steps() == [3]
