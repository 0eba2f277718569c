"""Random layouts of an array over a mesh of ranks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

import ckpt
from ckpt.state.boxes import Box


@st.composite
def cuts(draw: st.DrawFn, length: int, count: int) -> list[int]:
    """Draw edges that divide a length into `count` ranges, some of which may be empty."""
    inner = sorted(draw(st.lists(st.integers(0, length), min_size=count - 1, max_size=count - 1)))
    return [0, *inner, length]


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], size: int) -> list[list[Any]]:
    """Draw, for each rank, its part of an array: by meshes, uneven grids with replicas, several boxes, or flattened ranges."""
    kind = draw(st.sampled_from(["mesh", "mesh", "grid", "flat", "whole", "boxes"]))
    if kind == "whole":
        return [["whole"] for _ in range(size)]
    if kind == "mesh":
        return on_mesh(shape, draw(meshes(size)), draw)
    if kind == "flat":
        edges = draw(cuts(int(np.prod(shape)), size))
        return [["flat", a, b] for a, b in itertools.pairwise(edges)]
    axis = draw(st.integers(0, len(shape) - 1))
    if kind == "boxes":
        edges = draw(cuts(shape[axis], 2 * size))
        spans = list(itertools.pairwise(edges))
        return [["boxes", [box_along(shape, axis, *spans[i]) for i in (r, r + size)]] for r in range(size)]
    copies = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    edges = draw(cuts(shape[axis], size // copies))
    spans = list(itertools.pairwise(edges))
    return [["grid", box_along(shape, axis, *spans[r // copies]), (r % copies, copies)] for r in range(size)]


@st.composite
def meshes(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    """Draw the shape of a mesh of one to three dimensions for `size` ranks."""
    found = [n for k in (1, 2, 3) for n in itertools.product(range(1, size + 1), repeat=k) if math.prod(n) == size]
    return draw(st.sampled_from(found))


def on_mesh(shape: tuple[int, ...], mesh: tuple[int, ...], draw: st.DrawFn) -> list[list[Any]]:
    """Return, for each position of a mesh, the boxes that placements of a DTensor give it; some dimensions replicate."""
    from ckpt.state.mesh_boxes import shard_boxes

    cut = st.none() | st.tuples(st.integers(0, len(shape) - 1), st.sampled_from([1, 1, 2]))
    cuts = tuple(draw(cut) for _ in mesh)
    found = []
    for at in itertools.product(*map(range, mesh)):
        boxes = [box for box, _ in shard_boxes(shape, mesh, at, cuts)] or [Box((0,) * len(shape), (0,) * len(shape))]
        number, count = 0, 1
        for n, i, c in zip(mesh, at, cuts, strict=True):
            if c is None:
                number, count = number * n + i, count * n
        found.append(["boxes", boxes, (number, count)])
    return found


def box_along(shape: tuple[int, ...], axis: int, low: int, high: int) -> Box:
    """Return the box of an array that is limited to a range along one axis."""
    offset = tuple(low if i == axis else 0 for i in range(len(shape)))
    return Box(offset, tuple(high - low if i == axis else n for i, n in enumerate(shape)))


def part_of_rank(array: np.ndarray, layout: list[Any], fill: bool) -> Any:
    """Return the part of `array` that a rank has; its values are blank unless `fill`."""

    def local(part: np.ndarray) -> np.ndarray:
        return part.copy() if fill else np.full_like(part, 77)

    if layout[0] == "whole":
        return local(array)
    if layout[0] == "flat":
        return ckpt.Shard(local(array.reshape(-1)[layout[1] : layout[2]]), array.shape, flat=layout[1])
    if layout[0] == "boxes":
        replica = layout[2] if len(layout) > 2 else (0, 1)
        return ckpt.Shard(
            [local(array[b.slices()]) for b in layout[1]], array.shape, [b.offset for b in layout[1]], replica=replica
        )
    return ckpt.Shard(local(array[layout[1].slices()]), array.shape, layout[1].offset, replica=layout[2])


def are_equal(a: Any, b: Any) -> bool:
    """Return whether two parts have equal values."""
    if isinstance(a, ckpt.Shard):
        return all(map(np.array_equal, a.locals(), b.locals()))
    return bool(np.array_equal(a, b))
