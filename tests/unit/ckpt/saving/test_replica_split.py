"""Which rank writes which bytes of a shard that several ranks have: each computes it alone, and every byte has one writer."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.format.limits import BLOCK_BYTES
from ckpt.saving.block_plan import LeafSpec, plan_blocks
from ckpt.saving.replica_split import CUT_BYTES
from ckpt.state.boxes import Replica

shapes = st.lists(st.integers(1, 9), min_size=0, max_size=4).map(tuple)


def specs_of(leaves: list[tuple[tuple[int, ...], int]], rank: int, count: int, known: bool, scale: int) -> list[LeafSpec]:
    found = []
    for i, (shape, itemsize) in enumerate(leaves):
        shape = (shape[0] * scale, *shape[1:]) if shape else shape
        replica = Replica(rank, count, tuple(range(count)) if known else None)
        nbytes = itemsize * math.prod(shape)
        found.append(LeafSpec(f"x{i}", "uint8", shape, itemsize, nbytes, "none", None, (0,) * len(shape), replica))
    return found


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(shapes, st.sampled_from([1, 2, 3, 4, 8, 16])), min_size=1, max_size=4),
    st.integers(1, 7), st.booleans(), st.sampled_from([1, 40]),
)  # fmt: skip
def test_every_byte_has_one_writer(leaves: list[tuple[tuple[int, ...], int]], count: int, known: bool, scale: int) -> None:
    specs = specs_of(leaves, 0, count, known, scale)
    painted = [np.zeros(spec.shape, np.int8) for spec in specs]
    for rank in range(count):
        for block in plan_blocks(specs_of(leaves, rank, count, known, scale)).blocks:
            assert block.nbytes <= BLOCK_BYTES
            for piece in block.pieces:
                spec = specs[piece.leaf]
                painted[piece.leaf][piece.box.slices()] += 1
                assert piece.nbytes == piece.box.size * spec.itemsize
                # The elements of the box are these consecutive elements of the shard, which is how they are copied.
                flat = np.arange(math.prod(spec.shape)).reshape(spec.shape)[piece.box.slices()].reshape(-1)
                first = piece.begin // spec.itemsize
                assert flat.tolist() == list(range(first, first + piece.box.size))
    assert all((p == 1).all() for p in painted)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("count", [2, 3, 8, 64])
def test_each_rank_writes_the_same_share(known: bool, count: int) -> None:
    """Within 5 % for the tensors of a GPT, whether the ranks or only their number is given."""
    leaves = [((3072, 1024), 2), ((1024, 1024), 2), ((4096, 1024), 4), ((1024, 4096), 4), ((1024,), 4), ((8192, 1024), 2)] * 3
    written = [
        sum(block.nbytes for block in plan_blocks(specs_of(leaves, rank, count, known, 1)).blocks) for rank in range(count)
    ]
    even = sum(itemsize * math.prod(shape) for shape, itemsize in leaves) / count
    assert max(written) <= 1.05 * even
    assert min(written) >= 0.95 * even


def test_small_shards_are_spread_over_ranks_by_name() -> None:
    """A thousand leaves that are too small to be cut are distributed over all ranks nearly evenly."""
    leaves = [((3,), 4)] * 1000
    written = [sum(len(b.pieces) for b in plan_blocks(specs_of(leaves, rank, 8, False, 1)).blocks) for rank in range(8)]
    assert sum(written) == 1000
    assert max(written) < 2 * 1000 / 8
    assert CUT_BYTES > 12
