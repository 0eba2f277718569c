"""A save that has stalled: what the other ranks learn of it, and what becomes of it when the store answers again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from helpers.rank_threads import all_well, lease_owner, on_ranks, one_array

import ckpt
from ckpt.groups.base import Group
from ckpt.groups.threads import ThreadGroup
from ckpt.storage.base.call_timeout import STORE_TIMEOUT_VARIABLE
from ckpt.storage.base.store import Entry
from ckpt.storage.local.directory import LocalStore


class Hanging(LocalStore):
    """A directory whose mount hangs after a rank has stored its last file of step 1, until `answers` is set."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._hangs = False
        self.answers = threading.Event()

    def put(self, name: str, data: Any) -> None:
        self._call()
        super().put(name, data)
        self._hangs = self._hangs or (name.startswith("steps/1/part/1-") and name.endswith(".arrow"))

    def publish(self, name: str, *args: Any) -> None:
        self._call()
        super().publish(name, *args)
        self._hangs = self._hangs or name == "steps/1/commit.json"

    def list(self, prefix: str = "") -> Iterator[Entry]:
        self._call()
        return super().list(prefix)

    def get(self, name: str) -> bytes:
        self._call()
        return super().get(name)

    def delete(self, *args: Any) -> None:
        self._call()
        super().delete(*args)

    def _call(self) -> None:
        if self._hangs:
            assert self.answers.wait(600)


@pytest.mark.parametrize("stalled_rank", [0, 1])
@pytest.mark.parametrize("how", ["save", "Checkpointer", "tiers"])
@pytest.mark.slow
def test_other_ranks_get_the_reason_of_a_rank_whose_earlier_save_has_stalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, stalled_rank: int
) -> None:
    monkeypatch.setenv(STORE_TIMEOUT_VARIABLE, "1")
    folder = tmp_path / "near"
    store = Hanging(folder)

    def work(group: Group) -> list[BaseException | None]:
        url = store if group.rank == stalled_rank else folder
        if how == "save":
            return saves(group.rank, lambda s: ckpt.save(one_array(s), url, s, blocking=False, group=group, timeout=300))
        tiers = [ckpt.Tier(url)] if how == "tiers" else ()
        main = tmp_path / "main" if tiers else url
        saver = ckpt.Checkpointer(main, every=None, group=group, timeout=300, tiers=tiers)
        errors = saves(group.rank, lambda step: saver.save(step, one_array(step)))
        if saver._tiers is not None:
            assert [tier.saves_to_skip for tier in saver._tiers._open_tiers] == [0, 0], "all ranks choose the same tier next"
        with suppress(ckpt.RanksMissing, ckpt.SaveFailed):
            saver._close(False)
        return errors

    def saves(rank: int, save: Any) -> list[BaseException | None]:
        first = save(1)
        if rank == stalled_rank:
            with pytest.raises(ckpt.SaveFailed, match="saving step 1 has made no progress"):
                save(2)
            first.result(600)
            return []
        first.result(600)
        second = save(2)
        assert second.wait(600)
        store.answers.set()
        return [second.take_error()]

    (error,) = all_well(on_ranks(2, work, ThreadGroup.make(2)))[1 - stalled_rank]
    assert isinstance(error, ckpt.RanksMissing)
    reason = f"step 2 is given up because rank {stalled_rank} failed: saving step 1 has made no progress for 1 s"
    assert str(error).startswith(reason)
    assert not list(folder.glob(f"steps/2/part/{stalled_rank}-*-failed.json")), "the stalled rank calls no store"


class HangingPublication(LocalStore):
    """A directory whose mount hangs before a step is published, until `answers` is set; then it may fail."""

    def __init__(self, path: Path, fails: bool) -> None:
        super().__init__(path)
        self._fails = fails
        self.answers = threading.Event()

    def publish(self, name: str, *args: Any) -> None:
        assert self.answers.wait(600)
        if self._fails:
            raise ckpt.StoreError("the mount has an error")
        super().publish(name, *args)


@pytest.mark.parametrize("fails", [False, True])
def test_a_stalled_save_that_ends_releases_the_lease_and_reports_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setenv(STORE_TIMEOUT_VARIABLE, "1")
    store = HangingPublication(tmp_path, fails)
    handle = ckpt.save(one_array(1), store, 1, blocking=False, group=None)
    with pytest.raises(ckpt.SaveFailed, match="saving step 1 has made no progress"):
        handle.result()
    store.answers.set()
    assert handle.wait(300)
    assert lease_owner(tmp_path) is None
    if fails:
        with pytest.raises(ckpt.SaveFailed, match="the mount has an error"):
            ckpt.save(one_array(2), tmp_path, 2, group=None)
    ckpt.save(one_array(3), tmp_path, 3, group=None)
    assert ckpt.open(tmp_path).steps() == ([3] if fails else [1, 3])
