"""The box of the shard of a DTensor, for any mesh and any placements: equal to the cuts of numpy and to the boxes of torch."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from helpers.processes import SOAK
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import _utils as torch_utils

from ckpt.state.mesh_boxes import MeshSplit, shard_boxes

torch = pytest.importorskip("torch")
EXAMPLES = settings(max_examples=20_000 if SOAK else 100, deadline=None)
meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)
shapes = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)
Array = Any


def chunk(array: Array, axis: int, count: int, index: int) -> Array:
    """Return what torch.chunk returns: chunks of the rounded-up length, the last ones shorter or empty."""
    step = -(-array.shape[axis] // count)
    return np.take(array, range(min(index * step, array.shape[axis]), min((index + 1) * step, array.shape[axis])), axis)


def local_of(array: Array, mesh: tuple[int, ...], at: tuple[int, ...], cuts: tuple[MeshSplit, ...]) -> Array:
    """Return the local array at a position of the mesh; a strided placement cuts the array into chunks first, and takes a part
    of each."""
    for size, index, cut in zip(mesh, at, cuts, strict=True):
        if cut is not None:
            axis, factor = cut
            chunks = [chunk(array, axis, factor, i) for i in range(factor)]
            array = np.concatenate([chunk(chunk_of_array, axis, size, index) for chunk_of_array in chunks], axis)
    return array


@pytest.mark.soak
@EXAMPLES
@given(data=st.data(), mesh=meshes, shape=shapes)
def test_boxes_equal_the_cuts_of_numpy(data: st.DataObject, mesh: tuple[int, ...], shape: tuple[int, ...]) -> None:
    cut = st.none() | st.tuples(st.integers(0, len(shape) - 1), st.sampled_from([1, 1, 1, 2, 3]))
    cuts = tuple(data.draw(cut) for _ in mesh)
    whole = np.arange(np.prod(shape)).reshape(shape)
    copies_of_element = np.zeros(shape, int)
    for at in itertools.product(*map(range, mesh)):
        local = local_of(whole, mesh, at, cuts)
        covered = np.zeros(local.shape, int)
        for box, within in shard_boxes(shape, mesh, at, cuts):
            assert np.array_equal(whole[box.slices()], local[within.slices()])
            covered[within.slices()] += 1
            copies_of_element[box.slices()] += 1
        assert (covered == 1).all()
    copies = np.prod([size for size, cut in zip(mesh, cuts, strict=True) if cut is None], dtype=int)
    assert (copies_of_element == copies).all()


compute = getattr(torch_utils, "_compute_local_shape_and_global_offset", None)


@pytest.mark.skipif(compute is None, reason="this torch does not show its own computation")
@pytest.mark.soak
@EXAMPLES
@given(data=st.data(), mesh=meshes, shape=shapes)
def test_boxes_equal_those_that_torch_computes(data: st.DataObject, mesh: tuple[int, ...], shape: tuple[int, ...]) -> None:
    placements = [data.draw(st.sampled_from([None, *range(len(shape))])) for _ in mesh]
    at = tuple(data.draw(st.integers(0, size - 1)) for size in mesh)
    of_torch = [Replicate() if axis is None else Shard(axis) for axis in placements]
    extent, offset = compute(shape, mesh, at, of_torch)
    boxes = shard_boxes(shape, mesh, at, tuple(None if axis is None else (axis, 1) for axis in placements))
    if 0 in extent:
        assert not any(box.size for box, _ in boxes)
    else:
        assert [tuple(box) for box, _ in boxes] == [(tuple(offset), tuple(extent))]
