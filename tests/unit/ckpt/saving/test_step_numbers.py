"""The number of a save without step=: no other save that has begun and not ended has it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.forked_child import in_forked_child
from helpers.gated_store import GatedStore
from helpers.processes import until
from helpers.rank_threads import all_well, on_ranks, one_array

import ckpt
from ckpt.adapters.dcp import Writer
from ckpt.groups.threads import ThreadGroup
from ckpt.saving import session_registry
from ckpt.storage.base.store import Store
from ckpt.storage.local.directory import LocalStore


class OverlappingSaves:
    """Saves to one store that all begin before the first can end, each in a thread, since it waits for the one before."""

    def __init__(self, folder: Path) -> None:
        self.store = GatedStore(folder)
        self._threads: list[threading.Thread] = []
        self._results: dict[int, int | Exception] = {}

    def begin(self, save: Callable[[Store], Any]) -> None:
        """Begin a save, and return when it has its number."""
        at = len(self._threads)

        def run() -> None:
            try:
                self._results[at] = save(self.store).step
            except Exception as error:
                self._results[at] = error

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()
        until(lambda: at in self._results or self._begun() > at, "the save begins")

    def _begun(self) -> int:
        leases = {session.writer_lease for session in [*session_registry._sessions.values()]}
        return sum(len(lease.active_attempts()) for lease in leases)

    def end(self) -> list[int | Exception]:
        """Let all saves end, and return their steps, or their errors, in the order in which they began."""
        self.store.gate.set()
        for thread in self._threads:
            thread.join()
        return [self._results[at] for at in range(len(self._threads))]


def test_overlapping_saves_get_their_own_numbers(tmp_path: Path) -> None:
    saves = OverlappingSaves(tmp_path)
    for i in range(3):
        saves.begin(lambda store: ckpt.save(one_array(i), store, blocking=False).result())  # noqa: B023
    assert saves.end() == [0, 1, 2]
    assert [ckpt.load(tmp_path, step=i)["a"][0] for i in range(3)] == [0, 1, 2]


def test_threads_that_save_at_the_same_time_get_their_own_numbers(tmp_path: Path) -> None:
    steps: list[int] = []

    def save() -> None:
        steps.extend(ckpt.save(one_array(1), tmp_path).step for _ in range(3))

    threads = [threading.Thread(target=save) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(steps) == ckpt.open(tmp_path).steps() == list(range(12))


def test_a_save_with_a_number_in_flight_counts(tmp_path: Path) -> None:
    saves = OverlappingSaves(tmp_path)
    for step in (5, None, 7, None):
        saves.begin(lambda store: ckpt.save(one_array(1), store, step))  # noqa: B023
    assert saves.end() == [5, 6, 7, 8]
    assert ckpt.save(one_array(1), saves.store).step == 9


class SlowListing(LocalStore):
    """A folder whose list of steps, as one thread gets it, arrives late."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.slow_thread: threading.Thread | None = None
        self.is_listed, self.may_return = threading.Event(), threading.Event()

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        names = [*super().list_folders(prefix)]
        if prefix == "steps" and threading.current_thread() is self.slow_thread:
            self.is_listed.set()
            assert self.may_return.wait(600)
        return iter(names)


def test_a_save_that_ends_while_the_steps_are_listed_counts(tmp_path: Path) -> None:
    store, steps = SlowListing(tmp_path), list[int]()
    with ckpt.Checkpointer(store, every=None) as ck:
        ck.save(0, one_array(0)).result()
        thread = store.slow_thread = threading.Thread(target=lambda: steps.append(ckpt.save(one_array(1), store).step))
        thread.start()
        assert store.is_listed.wait(600)
        ck.save(7, one_array(7)).result()
        store.may_return.set()
        thread.join()
    assert steps == [8]
    assert ckpt.open(tmp_path).steps() == [0, 7, 8]


def test_a_failed_save_keeps_no_number(tmp_path: Path) -> None:
    with pytest.raises(ckpt.errors.NotFinite):
        ckpt.save({"a": np.full(9, np.nan)}, tmp_path, nan="refuse")
    assert ckpt.save(one_array(1), tmp_path).step == 0


def test_a_group_begins_after_the_saves_in_flight_of_its_rank_0(tmp_path: Path) -> None:
    store = GatedStore(tmp_path)
    alone = ckpt.save(one_array(1), store, blocking=False, group=None)
    saved = on_ranks(2, lambda g: ckpt.save(one_array(2), store, blocking=False, group=g), ThreadGroup.make(2))
    handles = [alone, *all_well(saved)]
    assert [handle.step for handle in handles] == [0, 1, 1]
    store.gate.set()
    for handle in handles:
        handle.result()
    assert ckpt.open(tmp_path).steps() == [0, 1]


def test_dcp_counts_the_saves_in_flight(tmp_path: Path) -> None:
    saves = OverlappingSaves(tmp_path)

    def save_with_dcp(store: Store) -> Any:
        dcp.save({"t": torch.ones(3)}, storage_writer=Writer(store), no_dist=True)
        return ckpt.open(store).latest()

    saves.begin(lambda store: ckpt.save(one_array(1), store))
    saves.begin(save_with_dcp)
    assert saves.end() == [0, 1]


def test_a_forked_child_does_not_get_a_number_of_its_parent(tmp_path: Path) -> None:
    saves = OverlappingSaves(tmp_path)
    saves.begin(lambda store: ckpt.save(one_array(0), store))

    def save() -> None:
        with pytest.raises(ckpt.RepositoryBusy):
            ckpt.save(one_array(1), tmp_path)

    in_forked_child(save)
    saves.begin(lambda store: ckpt.save(one_array(0), store))
    assert saves.end() == [0, 1]


def test_a_session_that_takes_over_gets_the_number_of_a_fenced_save(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    store = GatedStore(tmp_path / "run")
    fenced = ckpt.save(one_array(1), store, blocking=False)
    assert ckpt.save(one_array(2), tmp_path / "link").step == 0
    store.gate.set()
    with pytest.raises(ckpt.Fenced):
        fenced.result()
    assert ckpt.load(tmp_path / "run")["a"][0] == 2
