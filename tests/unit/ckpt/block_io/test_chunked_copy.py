"""Chunks of a block are copied to their destinations once, whether a source has its own memory or reads them in place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.flipped_bits import flip_bit
from helpers.page_cache import drop_cache

import ckpt
from ckpt.block_io.chunked_copy import copy_in_chunks
from ckpt.block_io.read_plan import Destination
from ckpt.format.digest import CELL_BYTES
from ckpt.state.leaves.base import Bytes

CHUNK = 2 * CELL_BYTES


@pytest.mark.parametrize("reads_in_place", [False, True])
def test_each_destination_gets_its_bytes(reads_in_place: bool) -> None:
    block = np.frombuffer(np.random.default_rng(1).bytes(5 * CHUNK + 77), np.uint8)
    cuts = [0, 10, CHUNK, 3 * CHUNK - 1, 3 * CHUNK + 5, len(block)]
    destinations = [Destination(a, b, np.zeros(b - a, np.uint8)) for a, b in zip(cuts, cuts[1:], strict=False)]
    in_place, checked = [], bytearray()

    def source(begin: int, end: int, target: Bytes | None) -> Bytes:
        if target is None or not reads_in_place:
            return block[begin:end].copy()
        in_place.append((begin, end))
        target[:] = block[begin:end]
        return target

    copy_in_chunks(0, len(block), destinations, source, lambda data, begin: checked.extend(data.tobytes()))
    for first, last, memory in destinations:
        assert memory.tobytes() == block[first:last].tobytes()
    assert bytes(checked) == block.tobytes()
    # The chunks at the cuts belong to two destinations, so they have no memory of their own.
    assert in_place == ([(CHUNK, 2 * CHUNK), (4 * CHUNK, 5 * CHUNK + 77)] if reads_in_place else [])


def saved(folder: Path) -> tuple[dict[str, np.ndarray], Path]:
    numbers = np.random.default_rng(2)
    state = {"large": numbers.random(5 << 20), "small": numbers.random(100), "other": numbers.random(3 << 20)}
    ckpt.save(state, folder, codec=None)  # otherwise a block may be compressed, and have a checksum
    (pack,) = folder.rglob("*.pack")
    return state, pack


@pytest.mark.parametrize("cached", [[], [(0, 64 << 20)], [(3 << 20, 1 << 20), (20 << 20, 30 << 20)]])
def test_a_restore_takes_each_part_from_the_cache_or_from_the_disk(tmp_path: Path, cached: list[tuple[int, int]]) -> None:
    state, pack = saved(tmp_path / "r")
    drop_cache(pack)
    with pack.open("rb") as file:
        for position, nbytes in cached:
            file.seek(position)
            file.read(nbytes)
    like = {name: np.zeros_like(value) for name, value in state.items()}
    with ckpt.Checkpointer(tmp_path / "r", every=None) as ck:
        ck.restore(like)
    for name, value in state.items():
        assert np.array_equal(like[name], value), name


def test_a_wrong_byte_in_the_cache_is_found_by_a_restore(tmp_path: Path) -> None:
    state, pack = saved(tmp_path / "r")
    flip_bit(pack, 17 << 20)
    pack.read_bytes()
    with ckpt.Checkpointer(tmp_path / "r", every=None) as ck, pytest.raises(ckpt.IntegrityError, match="digest"):
        ck.restore({name: np.zeros_like(value) for name, value in state.items()}, step=0)
