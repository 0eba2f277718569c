"""How arrays are cut and put together again: boxes, blocks, the staging ring, the manifest."""

import math
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.block_io.staging_arena import Arena, ArenaAbandoned, ArenaPool, round_up
from ckpt.format import manifest
from ckpt.format.limits import BLOCK_BYTES
from ckpt.saving.write_plan import PIECE_ALIGNMENT, LeafSpec, plan_blocks, stage_block
from ckpt.state.boxes import Box, contiguous_start, intersect, split_into_boxes, whole_box
from ckpt.state.leaves.numpy import NumpyLeaf

shapes = st.lists(st.integers(1, 12), max_size=4).map(tuple)


@st.composite
def boxes(draw, shape):
    offset, extent = [], []
    for length in shape:
        a = draw(st.integers(0, length - 1))
        offset.append(a)
        extent.append(draw(st.integers(1, length - a)))
    return Box(tuple(offset), tuple(extent))


@given(shape=shapes, itemsize=st.sampled_from([1, 2, 4, 16]), block=st.integers(16, 400))
def test_split_covers_every_element_once_in_contiguous_boxes(shape, itemsize, block):
    count = np.zeros(shape, int)
    for box in split_into_boxes(shape, itemsize, block):
        assert box.size * itemsize <= max(block, itemsize)
        assert contiguous_start(box, shape) is not None
        count[box.slices()] += 1
    assert (count == 1).all()


@given(data=st.data(), shape=shapes)
def test_boxes_agree_with_numpy(data, shape):
    a, b = data.draw(boxes(shape)), data.draw(boxes(shape))
    array = np.arange(math.prod(shape)).reshape(shape)
    mask = np.zeros((2, *shape), bool)
    mask[(0, *a.slices())] = True
    mask[(1, *b.slices())] = True
    common = intersect(a, b)
    both = mask.all(axis=0)
    if common is None:
        assert not both.any()
    else:
        assert both[(*common.slices(), ...)].all()
        assert both.sum() == common.size
    part = array[(*a.slices(), ...)].reshape(-1)
    start = contiguous_start(a, shape)
    follows = bool((part == np.arange(part[0], part[0] + part.size)).all())
    assert (start is not None) == follows
    assert start is None or start == part[0]


def test_blocks_are_even_and_within_bounds():
    for shape in [(3000, 1500), (1 << 25,), (9 << 20,), (3, 5 << 20), (100, 1024, 1024)]:
        sizes = [box.size for box in split_into_boxes(shape, 1, BLOCK_BYTES)]
        assert sum(sizes) == math.prod(shape)
        assert max(sizes) <= BLOCK_BYTES
        assert min(sizes) >= 0.4 * max(sizes)


@settings(max_examples=40)
@given(
    leaves=st.lists(st.tuples(st.sampled_from(["u1", "i2", "f4", "f8"]), st.integers(0, 3000), st.booleans()), max_size=30),
)
def test_plan_places_every_byte_once(leaves):
    made = {}
    for i, (dtype, n, strided) in enumerate(leaves):
        array = np.random.default_rng(i).integers(0, 200, 2 * n).astype(dtype)
        made[f"l{i}"] = NumpyLeaf(array[::2] if strided else array[:n])
    specs = [LeafSpec(n, x.dtype, x.shape, x.itemsize, x.nbytes, "a" if n[-1] == "3" else None) for n, x in made.items()]
    blocks, layout = plan_blocks(specs)
    assert plan_blocks(list(specs)).blocks is blocks
    names = list(made)
    found = {}
    for block in blocks:
        out = np.full(round_up(block.nbytes), 7, np.uint8)
        stage_block(block, list(made.values()), out)
        assert not out[block.nbytes :].any()
        assert len({(specs[p.leaf].itemsize, specs[p.leaf].codec) for p in block.pieces}) == 1
        end = 0
        for piece in block.pieces:
            assert piece.start >= end
            assert piece.start % PIECE_ALIGNMENT == 0
            end = piece.start + piece.nbytes
            assert names[piece.leaf] not in found
            found[names[piece.leaf]] = bytes(out[piece.start : end])
        assert end == block.nbytes
    without = {n for n, i in zip(layout.leaf, layout.block, strict=True) if i is None}
    assert without == {n for n, leaf in made.items() if not leaf.nbytes}
    assert found == {n: leaf.array.tobytes() for n, leaf in made.items() if leaf.nbytes}


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=60), order=st.randoms(use_true_random=False))
def test_regions_of_an_arena_never_overlap(sizes, order):
    arena = Arena(32 * 4096)
    held = []
    for n in sizes:
        while (region := arena.take(n * 4096 - 7, wait=False)) is None:
            assert held, "an empty arena must have room"
            back, mark = held.pop(order.randrange(len(held)))
            assert (back.data == mark).all()
            arena.give_back(back)
        mark = len(held) % 251
        region.data[:] = mark
        held.append((region, mark))
    for region, mark in held:
        assert (region.data == mark).all()
        arena.give_back(region)
    assert arena.take(32 * 4096, wait=False) is not None
    del held, region
    arena.close()


def test_a_full_arena_waits_for_room_or_for_the_end():
    arena = Arena(4 * 4096)
    first, second = arena.take(4 * 4096), []
    waiter = threading.Thread(target=lambda: second.append(arena.take(4096)))
    waiter.start()
    arena.give_back(first)
    waiter.join(30)
    assert second[0].data.nbytes == 4096
    assert arena.take(4 * 4096, wait=False) is None
    ended = []

    def wait_for_the_end():
        with pytest.raises(ArenaAbandoned):
            arena.take(4 * 4096)
        ended.append(True)

    waiter = threading.Thread(target=wait_for_the_end)
    waiter.start()
    arena.abandon()
    waiter.join(30)
    assert ended
    with pytest.raises(ValueError, match="does not fit"):
        arena.take(5 * 4096)


def test_arenas_are_reused():
    pool = ArenaPool()
    arena = pool.borrow(100_000)
    pool.give_back(arena)
    assert pool.borrow(50_000) is arena
    other = pool.borrow(50_000)
    assert other is not arena
    pool.give_back(arena)
    pool.give_back(other)
    pool.clear()
    assert pool.borrow(10) is not arena


def test_arena_memory_starts_on_a_page():
    arena = Arena(1 << 20)
    assert arena.memory.ctypes.data % 4096 == 0
    assert arena.take(5).data.ctypes.data % 4096 == 0


texts = st.text(st.characters(codec="utf-8"), max_size=8)
ints = st.integers(0, 2**60)
stored_blocks = st.builds(
    manifest.StoredBlock, texts, ints, ints, ints, st.none() | texts, st.binary(min_size=16, max_size=16),
    st.none() | st.integers(0, 2**64 - 1), st.binary(min_size=800, max_size=800),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(data=st.data(), blocks=st.lists(stored_blocks, max_size=5))
def test_the_manifest_keeps_every_column(data, blocks):
    shape = st.lists(ints, max_size=4).map(tuple)
    indices = st.none() if not blocks else st.none() | st.integers(0, len(blocks) - 1)
    numbers = st.integers(0, 10**7)
    columns = st.tuples(texts, texts, shape, st.builds(Box, shape, shape), numbers, numbers, indices)
    pieces = data.draw(st.lists(columns, max_size=8))
    layout = (
        manifest.PlannedColumns(*map(list, zip(*pieces, strict=True)))
        if pieces
        else manifest.PlannedColumns(*([] for _ in range(7)))
    )
    for _ in range(2):  # the second time from what was kept
        encoded = manifest.encode(layout, blocks, {"format": "1", "digest": "xxh3-128"})
    rows = manifest.decode(encoded, "x").rows
    assert len(rows) == len(pieces)
    for row, piece in zip(rows, pieces, strict=True):
        assert row[:4] == piece[:4]
        start, nbytes, index = piece[4:]
        assert (row.start, row.nbytes) == (start, nbytes)
        if index is None:
            assert row.pack is None
            assert row.cells == b""
        else:
            block = blocks[index]
            assert (row.pack, row.position, row.stored, row.raw, row.codec, row.digest, row.checksum) == block[:7]
            first, last = start // 262144, -(-(start + nbytes) // 262144)
            assert row.cells == block.cells[8 * first : 8 * last]


def test_whole_is_the_identity():
    assert whole_box((3, 4)) == Box((0, 0), (3, 4))
    assert contiguous_start(whole_box((3, 4)), (3, 4)) == 0
    assert contiguous_start(whole_box(()), ()) == 0
