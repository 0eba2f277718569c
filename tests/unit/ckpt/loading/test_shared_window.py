"""The memory through which the ranks of one host share the blocks that they read."""

from __future__ import annotations

import gc
import os
import platform
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.rank_threads import CountingStore, all_well, on_ranks
from helpers.shared_windows import empty, mappings, saved, window_of
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.block_io.block_reader import BlockReader
from ckpt.groups.base import Group
from ckpt.groups.threads import ThreadGroup
from ckpt.loading.shared_window import RankFailed, SharedWindow
from ckpt.storage.base.failpoints import set_failpoints
from ckpt.storage.base.store import Store
from ckpt.storage.local.directory import LocalStore
from ckpt.storage.local.shared_memory import MemoryStore

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create") or platform.machine() not in ("x86_64", "AMD64"),
    reason="no memory in common on this system",
)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 5), st.integers(2, 4), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 31)), max_size=40))
def test_each_block_reaches_the_ranks_that_need_it_whole(size: int, slots: int, blocks: list[tuple[int, int]]) -> None:
    """Each block has one reader, which needs it, and maybe other ranks: they get this block, however few the slots."""
    blocks = [(reader % size, takers | 1 << reader % size) for reader, takers in blocks]
    seen_blocks: defaultdict[int, dict[int, int]] = defaultdict(dict)

    def work(group: Group) -> None:
        window = window_of(group, slots, len(blocks))

        def read() -> None:
            for block, (reader, _) in enumerate(blocks):
                if reader == group.rank:
                    window.wait_for_free_slot(block)[:] = block % 251
                    window.mark_ready(block)

        reading = threading.Thread(target=read)
        reading.start()
        for block, (reader, takers) in enumerate(blocks):
            if takers >> group.rank & 1:
                window.wait_until_ready(block, reader)
                seen = window.slot(block)
                seen_blocks[group.rank][block] = int(seen[0]) if (seen == seen[0]).all() else -1
            window.release(block)
        reading.join()

    all_well(on_ranks(size, work))
    for rank in range(size):
        assert seen_blocks[rank] == {b: b % 251 for b, (_, takers) in enumerate(blocks) if takers >> rank & 1}


def test_a_failed_rank_ends_the_waits_of_the_others() -> None:
    def work(group: Group) -> None:
        window = window_of(group, 2, 3)
        if group.rank == 1:
            window.mark_failed()
        elif group.rank == 0:
            window.wait_until_ready(0, reader=1)
        else:
            window.wait_for_free_slot(2)

    assert [type(found) for found in on_ranks(3, work)] == [RankFailed, type(None), RankFailed]


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", {"id": "zstd", "level": 1}])
@pytest.mark.parametrize("messages", [True, False])
def test_blocks_that_all_ranks_need_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: Any, messages: bool
) -> None:
    """This holds also where the group has no messages, like a group of the environment."""
    monkeypatch.setattr(ThreadGroup, "can_exchange", messages)
    monkeypatch.setattr("ckpt.loading.shared_read.MIN_WINDOW_BYTES", 0)
    monkeypatch.setattr("ckpt.loading.shared_read.MAX_WINDOW_BYTES", 3 << 23)  # three slots
    state = saved(tmp_path, codec)
    stored = sum(file.stat().st_size for file in tmp_path.rglob("*.pack"))
    progress: list[int] = []

    def load(group: Group) -> None:
        loaded = ckpt.load(CountingStore(tmp_path), empty(state), group=group, progress=progress.append)
        assert all(np.array_equal(loaded[name], array) for name, array in state.items())

    for size in (2, 3):
        CountingStore.read = 0
        progress.clear()
        all_well(on_ranks(size, load))
        assert 0.9 * stored <= CountingStore.read <= 1.05 * stored
        assert 0.9 * stored <= sum(progress) <= 1.05 * stored


@pytest.mark.slow
@pytest.mark.parametrize("lacking", ["memfd_create", "the way to it"])
def test_ranks_without_common_memory_read_for_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    """The system may have no such memory, or one rank a container of its own: then all ranks do without."""
    state = saved(tmp_path)
    if lacking == "memfd_create":
        monkeypatch.delattr(os, "memfd_create")
    else:
        opened, is_missing = SharedWindow.create.__globals__["_map_memory_of_rank_0"], iter([False, True, False])
        monkeypatch.setattr(
            "ckpt.loading.shared_window._map_memory_of_rank_0", lambda *a: None if next(is_missing) else opened(*a)
        )
    windows: list[Any] = []
    create = SharedWindow.create
    monkeypatch.setattr(SharedWindow, "create", lambda *a: windows.append(create(*a)) or windows[-1])

    def load(group: Group) -> None:
        loaded = ckpt.load(tmp_path, empty(state), group=group)
        assert all(np.array_equal(loaded[name], array) for name, array in state.items())

    all_well(on_ranks(3, load))
    assert windows == [None] * 3


@pytest.mark.parametrize("kind", [LocalStore, MemoryStore])
def test_a_store_in_memory_is_read_without_a_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Store]) -> None:
    """Each rank can copy from it directly."""
    state = saved(tmp_path)
    created_by: list[int] = []
    create = SharedWindow.create
    monkeypatch.setattr(SharedWindow, "create", lambda group, *a: created_by.append(group.rank) or create(group, *a))

    def load(group: Group) -> None:
        loaded = ckpt.load(kind(tmp_path), empty(state), group=group)  # type: ignore[call-arg]
        assert all(np.array_equal(loaded[name], array) for name, array in state.items())

    all_well(on_ranks(2, load))
    assert sorted(created_by) == ([] if kind is MemoryStore else [0, 1])


@pytest.mark.slow
@pytest.mark.parametrize("point", ["local.read=error@3", "load.window=error@2"])
def test_an_error_of_one_rank_ends_the_load_on_all(tmp_path: Path, point: str) -> None:
    state = saved(tmp_path)
    set_failpoints(point)
    try:
        found = on_ranks(3, lambda g: ckpt.load(tmp_path, empty(state), group=g))
    finally:
        set_failpoints("")
    assert all(isinstance(error, Exception) for error in found), found
    assert any("injected at fail point" in str(error) or "I/O error" in str(error) for error in found), found
    all_well(on_ranks(3, lambda g: ckpt.load(tmp_path, empty(state), group=g)))


def test_different_share_reads_options_of_ranks_are_refused(tmp_path: Path) -> None:
    state = saved(tmp_path)
    options: list[Any] = ["auto", False, "auto"]
    for error in on_ranks(3, lambda g: ckpt.load(tmp_path, empty(state), group=g, share_reads=options[g.rank])):
        assert isinstance(error, ckpt.InvalidArgument)
        assert "share_reads='auto' on rank 0 and False on rank 1" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["accept", "fetch"])
def test_an_interrupt_or_damage_leaves_no_mapping_of_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The garbage collector is off and all ranks keep their errors, like a loop that falls back to an older step."""
    state = saved(tmp_path)
    kind: type[BaseException] = KeyboardInterrupt if where == "accept" else ckpt.IntegrityError
    calls = iter(range(1000))
    work = getattr(BlockReader, where)

    def fail(self: BlockReader, *args: Any) -> None:
        if next(calls) == 5:
            raise kind("now")
        work(self, *args)

    monkeypatch.setattr(BlockReader, where, fail)

    def load(group: Group) -> BaseException | None:
        try:
            ckpt.load(tmp_path, empty(state), group=group, strict=True)
        except BaseException as error:
            return error
        return None

    gc.collect()
    before = mappings()
    gc.disable()
    try:
        errors = on_ranks(3, load)
        assert mappings() == before
    finally:
        gc.enable()
    expected = {ckpt.GroupError, KeyboardInterrupt} if kind is KeyboardInterrupt else {ckpt.IntegrityError}
    assert {type(error) for error in errors} == expected
