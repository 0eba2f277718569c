"""Two saves of one process run at once: none deletes or replaces what the other has committed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from helpers.states import assert_same, state_of

import ckpt
from ckpt.repository import retention
from ckpt.repository.repository import commit_name
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
