"""Whether boxes cover arrays, each element once: the fast checks agree with a count of each element."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.boxes import cut
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.saving import tiling_check
from ckpt.saving.tiling_check import are_tiled, first_overlap, first_uncovered_box
from ckpt.state.boxes import Box, intersect

EXAMPLES = settings(max_examples=60, deadline=None)

shapes = st.lists(st.integers(1, 7), max_size=4).map(tuple)


def painted(shape: tuple[int, ...], boxes: list[Box]) -> Any:
    """Return how many boxes contain each element."""
    count = np.zeros(shape, int)
    for b in boxes:
        count[(*b.slices(), ...)] += 1
    return count


def numbers(boxes: list[Box], axes: int) -> tuple[Any, Any]:
    return tuple(np.array([b[i] for b in boxes], np.int64).reshape(len(boxes), axes) for i in (0, 1))  # type: ignore[return-value]


@st.composite
def any_boxes(draw: st.DrawFn, shape: tuple[int, ...], whole_sometimes: bool = True) -> list[Box]:
    """Draw boxes: from none, up to a partition with additional boxes."""
    boxes = cut(shape, draw(st.integers(0, 8)), draw(st.randoms(use_true_random=False)))
    boxes = [b for b in boxes if draw(st.integers(0, 7))]
    for _ in range(draw(st.sampled_from([0, 0, 1, 3]))):
        low = [draw(st.integers(0, n - 1)) for n in shape]
        boxes.append(Box(tuple(low), tuple(draw(st.integers(1, n - a)) for a, n in zip(low, shape, strict=True))))
    return boxes


@settings(max_examples=200, deadline=None)
@given(data=st.data(), shape=shapes)
def test_coverage_and_overlaps_agree_with_counting_each_element(data: st.DataObject, shape: tuple[int, ...]) -> None:
    boxes = data.draw(any_boxes(shape))
    count = painted(shape, boxes)
    offset, extent = numbers(boxes, len(shape))
    starts = np.array([0, len(boxes)])
    assert are_tiled(np.array([shape], np.int64).reshape(1, -1), starts, offset, extent)[0] == np.all(count == 1)
    pair = first_overlap(offset, extent)
    assert (pair is not None) == np.any(count > 1)
    if pair is not None:
        assert pair[0] < pair[1]
        assert intersect(boxes[pair[0]], boxes[pair[1]]) is not None or shape == ()
        return
    gap = first_uncovered_box(shape, offset, extent)
    assert (gap is not None) == np.any(count == 0)
    if gap is not None:
        assert np.all(count[(*gap.slices(), ...)] == 0)
        assert gap.offset == tuple(np.argwhere(count == 0)[0].tolist())
        for axis, length in enumerate(shape):  # it can't be longer along any axis
            longer = tuple(n + (k == axis) for k, n in enumerate(gap.shape))
            larger = count[(*Box(gap.offset, longer).slices(), ...)]
            assert gap.offset[axis] + gap.shape[axis] == length or np.any(larger), f"it may be longer along axis {axis}"


def test_empty_boxes_cover_nothing() -> None:
    """They lie inside of another box, or between two."""
    offset, extent = np.array([[0, 0], [2, 1], [0, 3]]), np.array([[4, 3], [0, 2], [4, 0]])
    assert first_overlap(offset, extent) is None
    assert first_uncovered_box((6, 3), offset, extent) == Box((4, 0), (2, 3))
    assert first_uncovered_box((4, 3), offset[1:], extent[1:]) == Box((0, 0), (4, 3))
    assert first_uncovered_box((4, 0), offset[:0], extent[:0]) is None


@pytest.mark.parametrize(
    "limits",
    [{}, {"_BATCH_CORNERS": 16}, {"_MAX_POINTS": 40.0}, {"_MAX_AXES": 1}, {"_MAX_AXES": 0, "_BATCH_CORNERS": 1}],
    ids=str,
)
def test_many_arrays_are_checked_in_one_call(limits: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of a batch, and whether they are checked by corners or by pairs of boxes."""
    for name, value in limits.items():
        monkeypatch.setattr(tiling_check, name, value)
    check_many_arrays()


@EXAMPLES
@given(data=st.data(), axes=st.integers(0, 3), arrays=st.integers(0, 6))
def check_many_arrays(data: st.DataObject, axes: int, arrays: int) -> None:
    """Check that the coverage of several arrays is that which a count of each element shows."""
    shapes_of = [tuple(data.draw(st.lists(st.integers(1, 5), min_size=axes, max_size=axes))) for _ in range(arrays)]
    boxes_of = [data.draw(any_boxes(shape)) for shape in shapes_of]
    offset, extent = numbers([b for boxes in boxes_of for b in boxes], axes)
    starts = np.cumsum([0, *map(len, boxes_of)])
    covered = are_tiled(np.array(shapes_of, np.int64).reshape(arrays, axes), starts, offset, extent)
    assert covered.tolist() == [bool(np.all(painted(s, b) == 1)) for s, b in zip(shapes_of, boxes_of, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2,) * 11, (1 << 40, 1 << 40), (1 << 61,), (1 << 20, 1 << 20, 1 << 20)])
def test_boxes_of_very_large_arrays_are_checked(shape: tuple[int, ...]) -> None:
    halves = [[(0, n // 2), (n // 2, n - n // 2)] for n in shape]
    boxes = [Box((), ())]
    for pair in halves:
        boxes = [Box((*b.offset, at), (*b.shape, n)) for b in boxes for at, n in pair]
    offset, extent = numbers(boxes, len(shape))
    wholes = np.array([shape], np.int64)
    assert are_tiled(wholes, np.array([0, len(boxes)]), offset, extent)[0]
    assert not are_tiled(wholes, np.array([0, len(boxes) - 1]), offset[1:], extent[1:])[0]
    if len(boxes) < 100:
        assert first_uncovered_box(shape, offset[1:], extent[1:]) == boxes[0]
    extent[0, -1] += 1
    assert not are_tiled(wholes, np.array([0, len(boxes)]), offset, extent)[0]
    pair_found = first_overlap(offset, extent)
    assert pair_found is not None
    assert pair_found[0] == 0
