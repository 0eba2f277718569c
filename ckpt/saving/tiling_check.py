"""Pure functions that check that boxes cover an array exactly, each element once, with any number of axes.

A set of boxes tiles an array if and only if their signed corners cancel against those of the array. The reason is that the
mixed difference of an indicator function is +1 or -1 at the corners of its box and 0 elsewhere, and its differences determine a
function. So a million boxes are checked by sorting their corners, without comparing pairs of boxes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ckpt.state.boxes import Box
from ckpt.support import arrow_columns

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_MAX_AXES = 10
"""The most axes along which an array may be cut to be checked by corners, because a box has 2**axes of them."""

_BATCH_CORNERS = 1 << 23
"""The number of corners that are sorted at once."""

_MAX_POINTS = float(1 << 60)
"""The number of points that one key of 64 bits can distinguish, with one bit for the sign of the corner."""


def are_tiled(global_shapes: Ints, starts: Ints, offset: Ints, shape: Ints) -> Flags:
    """Return which of several arrays with the same number of axes are covered exactly, each element by one box.

    global_shapes: shape (arrays, axes).
    starts: shape (arrays + 1,); array i has the boxes starts[i] to starts[i + 1].
    offset, shape: shape (boxes, axes), in elements; each box lies within its array, and no array or box is empty.
    """
    counts = np.diff(starts)
    done: Flags = counts == 1
    rows = np.arange(starts[0], starts[-1])
    array = np.repeat(np.arange(len(counts)), counts)
    # An axis along which all boxes are as long as the array can be ignored; usually one or two axes are left.
    cut: Flags = np.zeros(global_shapes.shape, bool)
    cut_rows = shape != global_shapes[array]
    if len(rows) and cut.shape[1]:
        nonempty = np.flatnonzero(counts)
        cut[nonempty] = np.logical_or.reduceat(cut_rows, starts[nonempty], axis=0)
    axes = np.count_nonzero(cut, axis=1)
    done &= axes == 0
    for count in arrow_columns.distinct(axes[axes > 0]):
        members = np.flatnonzero((axes == count) & (counts > 1))
        cells = np.prod(global_shapes[members] + 1.0, axis=1, where=cut[members])
        hard = (cells > _MAX_POINTS) | (count > _MAX_AXES)
        for i in members[hard].tolist():
            done[i] = _is_tiled_by_pairs(global_shapes[i], offset[starts[i] : starts[i + 1]], shape[starts[i] : starts[i + 1]])
        members, cells = members[~hard], cells[~hard]
        order = np.argsort(~cut[members], axis=1, kind="stable")[:, :count]
        lengths = np.take_along_axis(global_shapes[members], order, 1)
        batch = np.floor(np.cumsum(cells / _MAX_POINTS + counts[members] * (2.0**count / _BATCH_CORNERS)))
        for number in np.unique(batch):
            now = np.flatnonzero(batch == number)
            which = np.repeat(np.arange(len(now)), counts[members[now]])
            mine = _ranges(starts[members[now]], counts[members[now]])
            low = np.take_along_axis(offset[mine], order[now][which], 1)
            extent = np.take_along_axis(shape[mine], order[now][which], 1)
            done[members[now]] = _corners_cancel(lengths[now], which, low, extent)
    return done


def _corners_cancel(global_shapes: Ints, which: Ints, offset: Ints, shape: Ints) -> Flags:
    points = global_shapes + 1
    strides = np.ones_like(points)
    strides[:, :-1] = np.cumprod(points[:, :0:-1], axis=1)[:, ::-1]
    cells = points[:, 0] * strides[:, 0]
    base = np.cumsum(cells) - cells
    strides_of_boxes = strides[which]
    boxes = _corners(base[which] + np.sum(offset * strides_of_boxes, axis=1), shape * strides_of_boxes, 0)
    arrays = _corners(base, global_shapes * strides, 1)
    keys = np.concatenate([boxes, arrays])
    keys.sort()
    points_of_keys = keys >> 1
    first = np.flatnonzero(np.concatenate([[True], points_of_keys[1:] != points_of_keys[:-1]]))
    sums = np.add.reduceat(1 - 2 * (keys & 1), first)
    done: Flags = np.ones(len(base), bool)
    done[np.searchsorted(base, points_of_keys[first[sums != 0]], "right") - 1] = False
    return done


def _corners(low: Ints, steps: Ints, sign: int) -> Ints:
    """Return all corners of all boxes as `point * 2 + sign`. `steps` is the distance to the next corner along each axis."""
    keys = (low * 2 + sign)[None]
    for axis in range(steps.shape[1]):
        keys = np.concatenate([keys, (keys + 2 * steps[:, axis]) ^ 1])
    return keys.reshape(-1)


def _ranges(begins: Ints, counts: Ints) -> Ints:
    """Return the concatenation of the ranges [begin, begin + count)."""
    return np.arange(np.sum(counts)) + np.repeat(begins - np.cumsum(counts) + counts, counts)


def _is_tiled_by_pairs(global_shape: Ints, offset: Ints, shape: Ints) -> bool:
    return _volume(shape) == _volume(global_shape[None]) and first_overlap(offset, shape) is None


def _volume(shapes: Ints) -> int:
    total: int = np.sum(np.prod(shapes.astype(object), axis=1))  # Python integers, which can't overflow
    return total


def first_overlap(offset: Ints, shape: Ints) -> tuple[int, int] | None:
    """Return the indices of two boxes of one array that have an element in common, or None.

    offset, shape: shape (boxes, axes).
    """
    rows = np.flatnonzero(np.all(shape > 0, axis=1))
    low, high = offset[rows], (offset + shape)[rows]
    if low.shape[1] == 0:
        return (int(rows[0]), int(rows[1])) if len(rows) > 1 else None
    # Find by sorting the axis along which the fewest pairs overlap, and compare only those pairs.
    best: tuple[int, Ints, Ints] | None = None
    for axis in range(low.shape[1]):
        order = np.argsort(low[:, axis], kind="stable")
        pair_counts = np.searchsorted(low[order, axis], high[order, axis], "left") - np.arange(len(order)) - 1
        if best is None or np.sum(pair_counts) < best[0]:
            best = int(np.sum(pair_counts)), order, pair_counts
    assert best is not None
    _, order, pair_counts = best
    batch = np.cumsum(pair_counts) // (1 << 20)
    for number in np.unique(batch):
        now = np.flatnonzero(batch == number)
        a = order[np.repeat(now, pair_counts[now])]
        b = order[_ranges(now + 1, pair_counts[now])]
        common = np.all((low[a] < high[b]) & (low[b] < high[a]), axis=1)
        if np.any(common):
            at = int(np.argmax(common))
            first, second = sorted((int(rows[a[at]]), int(rows[b[at]])))
            return first, second
    return None


def first_uncovered_box(global_shape: tuple[int, ...], offset: Ints, shape: Ints) -> Box | None:
    """Return the first uncovered box of an array, as large as possible, or None. The boxes lie within it and are disjoint."""
    if 0 in global_shape:
        return None
    keep = np.all(shape > 0, axis=1)
    low, high = offset[keep], (offset + shape)[keep]
    # The first uncovered element in C order: along each axis, the first index at which the cross-section of the boxes is too
    # small.
    point: list[int] = []
    active = np.arange(len(low))
    for axis, length in enumerate(global_shape):
        area = np.prod((high - low)[active, axis + 1 :], axis=1)
        full = int(np.prod(np.array(global_shape[axis + 1 :], np.int64)))
        edges, at = np.unique(np.concatenate([[0], low[active, axis], high[active, axis]]), return_inverse=True)
        change = np.zeros(len(edges), np.int64)
        np.add.at(change, at, np.concatenate([[0], area, -area]))
        short = np.flatnonzero((np.cumsum(change) < full) & (edges < length))
        if not len(short):
            return None
        point.append(int(edges[short[0]]))
        active = active[(low[active, axis] <= point[-1]) & (high[active, axis] > point[-1])]
    if not global_shape:
        return Box((), ()) if not len(low) else None
    begin = np.array(point, np.int64)
    end = begin + 1
    for axis in reversed(range(len(point))):
        others = np.arange(len(point)) != axis
        in_line = np.all((low[:, others] < end[others]) & (high[:, others] > begin[others]), axis=1)
        beyond = low[in_line & (low[:, axis] >= end[axis]), axis]
        end[axis] = int(np.min(beyond, initial=global_shape[axis]))
    return Box(tuple(point), tuple((end - begin).tolist()))
