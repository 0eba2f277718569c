"""Arrays in files of another program, and the nested dicts and lists of their states; damaged ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.refusal import refused

from ckpt.state.boxes import Box
from ckpt.storage.base.errors import CkptError
from ckpt.tools.import_files import FileLeaf, FileRegion, contiguous_strides, insert


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


@pytest.mark.parametrize("shape", [(-1, -4), (0, 1 << 70), (2.0, 3), (0, None)])
def test_a_shape_that_no_array_has_is_refused(shape: tuple[Any, ...]) -> None:
    with refused(CkptError, "its shape is", "copy all files of the checkpoint again"):
        FileLeaf("float32", shape, [])


@pytest.mark.parametrize("boxes", [[((0,), (24,))], [((0, 0), (2, 6)), ((0,), (12,))]])
def test_parts_with_other_axes_than_the_array_are_refused(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    with refused(CkptError, "overlap or reach beyond"):
        leaf((4, 6), *boxes)


@pytest.mark.parametrize("length", [0, 20])
def test_a_file_that_ends_before_a_transposed_array_is_refused(length: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(length))
    region = FileRegion(str(tmp_path / "file"), 0, (2, 3), (4, 8), 4)
    with refused(CkptError, "ends before the array of shape [2, 3]", "copy the file again"):
        region.read(Box((0, 0), (2, 3)), np.empty(24, np.uint8))


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ([("a", "b"), ("a", "c"), ("d",)], {"a": {"b": 0, "c": 1}, "d": 2}),
        ([("a", 1, "b"), ("a", 0)], {"a": [1, {"b": 0}]}),
        ([("a", 2)], {"a": [None, None, 0]}),
    ],
)
def test_values_are_put_into_nested_dicts_and_lists(paths: list[tuple[Any, ...]], expected: Any) -> None:
    root: dict[Any, Any] = {}
    for value, keys in enumerate(paths):
        insert(root, keys, value, len(paths))
    assert root == expected


@pytest.mark.parametrize(
    "paths",
    [
        [("a",), ("a", "b")],
        [("a", "b"), ("a",)],
        [("a",), ("a",)],
        [("a", 0), ("a", 0, "b")],
        [("a", 0), ("a", 0)],
        [("a", 0), ("a", "b")],
        [("a", -1)],
        [("a", 1 << 40)],
    ],
)
def test_a_place_that_another_value_has_is_refused(paths: list[tuple[Any, ...]]) -> None:
    tensor, root = leaf((4, 6), ((0, 0), (4, 6))), dict[Any, Any]()
    with pytest.raises(ValueError, match=r"keys of another|lead through another|not an index"):
        for keys in paths:
            insert(root, keys, tensor, len(paths))
