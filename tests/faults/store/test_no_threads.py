"""A process that gets no thread: its saves, loads and copies end, harm no later ones, and work again with the next thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.folders import fast_folder
from helpers.nodes import directories
from helpers.processes import until
from helpers.repositories import assert_all_load
from helpers.states import assert_same, state_of
from helpers.thread_limits import NO_THREAD, refused_threads

import ckpt
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.block_io import read_threads, staging_arena
from ckpt.format.manifest import Saved
from ckpt.loading.leaf_stream import stream_leaves
from ckpt.saving import block_plan, staging
from ckpt.state.leaves.numpy import NumpyLeaf
from ckpt.storage.base import call_timeout
from ckpt.storage.base.errors import NotFound, is_transient

BLOCKS = 12
BLOCK_BYTES = 256 << 10
MANY = 1000


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let several threads share the work on a small state."""
    monkeypatch.setattr(block_plan, "BLOCK_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(staging, "processor_count", lambda: 4)
    monkeypatch.setattr(read_threads, "_MIN_PART_BYTES", BLOCK_BYTES)


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[Path]:
    with fast_folder(tmp_path) as folder:
        yield folder


def blocks_of(step: int) -> dict[str, np.ndarray[Any, Any]]:
    """A state whose copy is shared by several threads."""
    return {f"leaf{i}": np.full(BLOCK_BYTES // 8, 100 * step + i, np.int64) for i in range(BLOCKS)}


def ckpt_threads(*prefixes: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(prefixes or ("ckpt-",))]


@dataclass
class Copies:
    """The copies of a save into its memory, of which those of helper threads are slow while `are_slow`."""

    are_slow: bool = False
    late: list[str] = field(default_factory=list)
    """The threads that still copied when the memory of a save was returned."""


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    copy, give_back = staging.stage_block, staging_arena.pool.give_back
    found, local = Copies(), threading.local()

    def copy_slowly(*args: Any) -> None:
        if found.are_slow and threading.current_thread().name == "ckpt-stage" and not hasattr(local, "has_copied"):
            local.has_copied = True
            time.sleep(0.5)
        copy(*args)

    def give_back_checked(arena: staging_arena.Arena) -> None:
        found.late.extend(ckpt_threads("ckpt-stage", "ckpt-write"))
        give_back(arena)

    monkeypatch.setattr(staging, "stage_block", copy_slowly)
    monkeypatch.setattr(staging_arena.pool, "give_back", give_back_checked)
    return found


@pytest.mark.parametrize("last", [None, MANY])
@pytest.mark.parametrize("blocking", [True, False])
def test_a_save_without_a_thread_leaves_no_thread_that_copies(
    fast: Path, copies: Copies, blocking: bool, last: int | None
) -> None:
    """The next save takes the memory of a failed one, so nothing may write into it any more."""
    refused: set[str] = set()
    ckpt.save(blocks_of(0), fast, 0)
    for first in range(1, 100):
        copies.are_slow = True
        with refused_threads(first, last) as starts:
            try:
                saved = ckpt.save(blocks_of(1), fast, 1, blocking=blocking, overwrite=True)
                if isinstance(saved, ckpt.SaveHandle):
                    saved.result()
            except RuntimeError as error:
                assert NO_THREAD in str(error)
            except ckpt.CkptError as error:
                assert NO_THREAD in str(error.__cause__ or error)
        copies.are_slow = False
        assert copies.late == []
        refused.update(starts.names)
        if not starts.names:
            break
        ckpt.save(blocks_of(2), fast, 2, overwrite=True)
        assert_all_load(fast, 2, blocks_of)
    assert refused >= ({"ckpt-stage"} if blocking else {"ckpt-stage", "ckpt-save-1"})


@pytest.mark.parametrize("last", [None, MANY])
def test_a_load_needs_no_further_thread(fast: Path, last: int | None) -> None:
    ckpt.save(blocks_of(0), fast, 0)
    like = blocks_of(1)
    for first in range(1, 100):
        with refused_threads(first, last) as starts:
            assert_same(ckpt.load(fast, like), blocks_of(0))
        if not starts.names:
            break
        like["leaf1"][:] = 0
    assert first > 1


@pytest.mark.parametrize("last", [None, MANY])
def test_a_step_is_copied_to_the_next_tier_once_there_is_a_thread(tmp_path: Path, fast: Path, last: int | None) -> None:
    for first in range(1, 100):
        run = tmp_path / f"run{first}"
        tiers = [ckpt.Tier(str(fast / f"near{first}"), every=1, keep=2)]
        with ckpt.Checkpointer(run, every=1, tiers=tiers) as ck:
            with refused_threads(first, last) as starts:
                for step in range(2):
                    try:
                        ck.step(step, state_of(step))
                        ck.wait()
                    except RuntimeError as error:
                        assert NO_THREAD in str(error)
                    except ckpt.CkptError as error:
                        assert NO_THREAD in str(error)
            ck.step(2, state_of(2))
            ck.wait()
            assert ckpt.open(run).latest().step == 2
        assert_all_load(run, 2)
        until(lambda: not ckpt_threads("ckpt-promote"))
        if not starts.names:
            break
    assert first > 1


def test_a_wait_for_a_copy_that_gets_no_thread_raises(fast: Path) -> None:
    tiers = [ckpt.Tier(str(fast / "near"), every=1, keep=2)]
    with ckpt.Checkpointer(fast / "run", every=None, tiers=tiers) as ck:
        assert ck._tiers is not None
        copier = ck._tiers._open_tiers[-1].copier
        assert copier is not None
        with refused_threads(1, MANY, "ckpt-promote") as starts:
            ck.save(0, state_of(0)).wait()
            copier.offer(0)
            with pytest.raises(ckpt.SaveFailed, match=NO_THREAD):
                copier.wait()
            assert copier.needed_steps() == {0}, "the near tier keeps the step"
        assert starts.names
        copier.wait()
        assert ckpt.open(fast / "run").latest().step == 0


def test_a_wait_raises_if_the_thread_that_copies_has_ended(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends if there is no memory to record the failure of a copy. The next wait starts another one."""
    tiers = [ckpt.Tier(str(fast / "near"), every=1, keep=2)]
    with ckpt.Checkpointer(fast / "run", every=None, tiers=tiers) as ck:
        assert ck._tiers is not None
        copier = ck._tiers._open_tiers[-1].copier
        assert copier is not None
        failures: list[int] = []

        def fail(step: int, error: Exception | None) -> None:
            failures.append(step)
            raise MemoryError("no memory for the message")

        with monkeypatch.context() as patch:
            patch.setattr(copier, "_log_failure", fail)
            ck.save(0, state_of(0)).wait()
            copier.offer(0)
            with pytest.raises(ckpt.SaveFailed, match="no memory for the message"):
                copier.wait()
        assert failures
        copier.wait()
        assert ckpt.open(fast / "run").latest().step == 0


def new_array(saved: Saved) -> NumpyLeaf:
    return NumpyLeaf(np.empty(saved.shape, saved.dtype))


@pytest.mark.parametrize("last", [None, MANY])
def test_streamed_leaves_need_no_further_thread(fast: Path, last: int | None) -> None:
    ckpt.save(blocks_of(0), fast, 0)
    checkpoint = ckpt.open(fast).latest()
    for first in range(1, 100):
        with refused_threads(first, last) as starts:
            leaves = stream_leaves(checkpoint, list(checkpoint.saved()), new_array, 1 << 20)
            values = {name: leaf.value for name, leaf in leaves}
            assert_same({name: values.pop(name) for name in blocks_of(0)}, blocks_of(0))
        if not starts.names:
            break
    assert first > 1


@pytest.mark.parametrize("last", [None, MANY])
def test_a_namespace_raises_a_store_error_without_a_thread(tmp_path: Path, last: int | None) -> None:
    """It has threads for its calls to members. Once it gets one, its calls work again."""
    for first in range(1, 100):
        namespace = Namespace(directories(tmp_path / str(first), 3, redundancy="2x"))
        calls = [partial(namespace.put, "f", b"1" * 100_000), partial(namespace.get, "f"), partial(namespace.list, "")]
        with refused_threads(first, last, "ckpt-member") as starts:
            for call in calls:
                try:
                    call()
                except ckpt.StoreError as error:
                    assert "can't start a thread" in str(error) or isinstance(error, NotFound), error
        namespace.put("g", b"2" * 100_000)
        assert namespace.get("g") == b"2" * 100_000
        if not starts.names:
            break
    assert first > 1


def test_a_call_with_a_timeout_raises_a_store_error_without_a_thread(tmp_path: Path) -> None:
    with refused_threads(1, MANY), pytest.raises(ckpt.StoreError, match="can't start a thread") as raised:
        call_timeout.call_in_thread(lambda: None, "a listing of /mnt")
    assert is_transient(raised.value)
