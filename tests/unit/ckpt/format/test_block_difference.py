"""The difference of two blocks, added to the base, is the block, and it is small where the elements are close."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.format.block_difference import WIDTHS, add, difference_width, subtract


@given(st.sampled_from(WIDTHS), st.integers(0, 300_000), st.integers(0, 2**32 - 1), st.booleans())
def test_the_difference_added_to_the_base_is_the_block(width: int, count: int, seed: int, in_place: bool) -> None:
    draw = np.random.default_rng(seed)
    block, base = (draw.integers(0, 256, count // width * width, np.uint8) for _ in range(2))
    difference = np.empty_like(block)
    subtract(block, base, width, difference)
    out = difference if in_place else np.empty_like(block)
    add(base, difference, width, out)
    assert np.array_equal(out, block)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_small_distance_of_either_sign_is_a_small_number(width: int) -> None:
    """Also across the border where all bits change: 0 and the largest number are neighbours."""
    unsigned = np.dtype(f"<u{width}")
    base = np.array([0, 5, 5, np.iinfo(unsigned).max], unsigned)
    block = np.array([np.iinfo(unsigned).max, 4, 7, 0], unsigned)
    difference = np.empty(len(base) * width, np.uint8)
    subtract(block.view(np.uint8), base.view(np.uint8), width, difference)
    assert difference.view(unsigned).tolist() == [1, 1, 4, 2]


@pytest.mark.parametrize(("itemsize", "nbytes", "width"), [(2, 100, 2), (4, 102, 1), (16, 160, 1), (8, 64, 8), (1, 7, 1)])
def test_elements_of_other_sizes_are_compared_as_bytes(itemsize: int, nbytes: int, width: int) -> None:
    assert difference_width(itemsize, nbytes) == width
