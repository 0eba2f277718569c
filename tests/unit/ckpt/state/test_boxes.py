"""Boxes and blocks of an array cover every element once."""

import math

import numpy as np
from helpers.boxes import boxes, shapes
from hypothesis import given
from hypothesis import strategies as st

from ckpt.format.limits import BLOCK_BYTES
from ckpt.state.boxes import Box, contiguous_start, intersect, split_into_boxes, whole_box


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


def test_the_whole_box_starts_at_zero_and_is_contiguous():
    assert whole_box((3, 4)) == Box((0, 0), (3, 4))
    assert contiguous_start(whole_box((3, 4)), (3, 4)) == 0
    assert contiguous_start(whole_box(()), ()) == 0
