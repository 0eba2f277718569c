"""The parts of an array in files of another program must cover it, each element once."""

from __future__ import annotations

import pytest
from helpers.refusal import refused

from ckpt.state.boxes import Box
from ckpt.storage.base.errors import CkptError
from ckpt.tools.import_files import FileLeaf, FileRegion, contiguous_strides


def leaf(shape: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> FileLeaf:
    regions = [
        (Box(offset, length), FileRegion("file", 0, length, contiguous_strides(length, 4), 4)) for offset, length in boxes
    ]
    return FileLeaf("float32", shape, regions)


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ((4, 6), [((0, 0), (4, 6))]),
        ((4, 6), [((0, 0), (2, 6)), ((2, 0), (2, 6))]),
        ((4, 6), [((2, 0), (2, 3)), ((0, 0), (2, 6)), ((2, 3), (2, 3))]),
        ((), [((), ())]),
        ((0, 3), []),
        ((4, 6), [((0, 0), (4, 6)), ((4, 0), (0, 6))]),
    ],
)
def test_parts_that_cover_an_array_are_taken(
    shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    assert leaf(shape, *boxes).shape == shape


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 0), (2, 6)), ((1, 0), (2, 6))],
        [((0, 0), (2, 6)), ((3, 0), (2, 6))],
        [((0, 0), (2, 6)), ((-2, 0), (2, 6))],
        [((0, 0), (6, 4))],
        [((0, 1), (4, 6))],
    ],
)
def test_parts_with_the_right_number_of_elements_that_do_not_fit_are_refused(
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
    with refused(CkptError, "overlap or reach beyond"):
        leaf((4, 6), *boxes)


def test_a_missing_part_is_refused() -> None:
    with refused(CkptError, "12 elements, and the array has 24"):
        leaf((4, 6), ((0, 0), (2, 6)))
