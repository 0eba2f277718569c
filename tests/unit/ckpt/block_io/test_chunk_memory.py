"""The memory for chunks that are read past the page cache."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckpt.block_io.chunk_memory import _ChunkMemory
from ckpt.state.leaves.base import Bytes
from ckpt.storage.base.store import ALIGNMENT


def test_slices_of_many_threads_are_aligned_and_do_not_overlap() -> None:
    memory, everybody = _ChunkMemory(), threading.Barrier(16)

    def fill(number: int) -> list[Bytes]:
        everybody.wait()
        taken = [memory.take(nbytes) for nbytes in (700_000, 5000, 10 << 20, 1)]
        for part in taken:
            part[:] = number
        return taken

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(fill, range(16)))
    for number, taken in enumerate(found):
        assert [len(part) for part in taken] == [700_416, 8192, 10 << 20, 4096]
        for part in taken:
            assert (part == number).all()
            assert part.ctypes.data % ALIGNMENT == 0


@pytest.mark.slow
def test_small_slices_share_a_mapping_which_is_freed_after_the_last_one() -> None:
    memory = _ChunkMemory()
    first, second = memory.take(512 << 10), memory.take(512 << 10)
    assert second.ctypes.data == first.ctypes.data + len(first)
    mapping = memory._mapping
    assert isinstance(mapping, weakref.ref)
    del first
    gc.collect()
    assert mapping() is not None, "the second slice still needs it"
    del second
    gc.collect()
    assert mapping() is None
    memory.take(4096)[:] = 1
