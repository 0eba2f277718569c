"""Whether the places that a load is to fill lie apart: of two leaves in one memory, the one read last would win."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from ckpt.leaves.base import Memory
from ckpt.manifest import Manifest
from ckpt.shard import Box, whole
from ckpt.storage.errors import LeafMismatch
from ckpt.wanted import Target

T = TypeVar("T")

_MAX_WORK = 1 << 20
"""Steps that numpy may search for a common byte; views that people make take a few."""


def check_apart(targets: Sequence[Target], manifest: Manifest, where: str) -> None:
    """Raise LeafMismatch where two targets share memory, unless both get the same bytes; or where one does with itself.

    Tied arrays that were saved tied are one leaf, and so are two whose blocks have the same digests.
    """
    places: dict[str, list[tuple[int, int, Target]]] = {}
    for target in targets:
        leaf = target.leaf
        if not leaf.nbytes:
            continue
        if leaf.flat is not None:  # the most by far, and there may be many
            begin = leaf.flat.__array_interface__["data"][0]
            places.setdefault("cpu", []).append((begin, begin + leaf.nbytes, target))
        elif (span := _span(target)) is not None:
            if not _nested(span):
                raise LeafMismatch(
                    f"leaf {target.name}: elements of its array in `like` share memory, as in an expanded view; give "
                    "`like` a copy of it (clone() in torch, copy() in numpy)"
                )
            places.setdefault(span.memory.device, []).append((span.begin, span.end(), target))
    for of_device in places.values():
        for run in _runs(of_device):
            spans = {(s.name, s.box, s.memory): s for s in map(_span, run) if s is not None}
            for a, b in _near([*spans.values()]):
                if _share(a.memory, b.memory) and not _equal(a, b, manifest):
                    names = " and ".join(dict.fromkeys((a.name, b.name)))
                    raise LeafMismatch(
                        f"leaf {names} of {where}: `like` has the same memory for what was saved apart; give each its own "
                        "array (untie them), or load one of them with only="
                    )


class _Span(NamedTuple):
    """Where a target lies."""

    begin: int
    axes: list[tuple[int, int]]
    """Step in bytes and length of each axis that has more than one index, the widest step first."""
    memory: Memory
    name: str
    box: Box

    def end(self) -> int:
        return self.begin + sum(step * (n - 1) for step, n in self.axes) + self.memory.itemsize


def _span(target: Target) -> _Span | None:
    memory = target.leaf.memory()
    if memory is None:
        return None
    steps = [(s, n) for s, n in zip(memory.strides, memory.shape, strict=True) if n > 1]
    begin = memory.start + sum(s * (n - 1) for s, n in steps if s < 0)
    axes = sorted(((abs(s), n) for s, n in steps), reverse=True)
    return _Span(begin, axes, memory, target.name, target.box or whole(memory.shape))


def _nested(span: _Span) -> bool:
    """Whether each axis steps over all that lies below it, so that no two elements meet."""
    extent = span.memory.itemsize
    for step, n in reversed(span.axes):
        if step < extent:
            return False
        extent += step * (n - 1)
    return True


def _near(spans: list[_Span]) -> Iterator[tuple[_Span, _Span]]:
    """The pairs that may share memory: those that do, and few others."""
    for run in _runs([(span.begin, span.end(), span) for span in spans]):
        low = min(span.begin for span in run)
        step = max(span.axes[0][0] if span.axes else 0 for span in run)
        within, across = [], []
        for span in run:
            # Columns of one matrix: seen row by row, `step` bytes each, they lie beside each other.
            axes = span.axes[1:] if span.axes and span.axes[0][0] == step else span.axes
            in_row = span._replace(begin=(span.begin - low) % step if step else 0, axes=axes)
            if step and in_row.end() <= step:
                within.append(in_row)
            else:
                across.append(span)
        yield from itertools.combinations(across, 2)
        yield from itertools.product(across, within)
        yield from _near(within)


def _runs(places: Sequence[tuple[int, int, T]]) -> list[list[T]]:
    """The groups of two and more that lie together, of first byte, end and what is there."""
    begin = np.array([begin for begin, _, _ in places], np.int64)
    end = np.array([end for _, end, _ in places], np.int64)
    order = np.argsort(begin)
    apart = begin[order][1:] >= np.maximum.accumulate(end[order])[:-1]
    if np.all(apart):
        return []
    cuts = [0, *(np.flatnonzero(apart) + 1).tolist(), len(places)]
    return [[places[i][2] for i in order[a:b]] for a, b in itertools.pairwise(cuts) if b - a > 1]


class _Shadow:
    """An array for numpy to compare, never to look into: the memory may be a device's."""

    def __init__(self, memory: Memory) -> None:
        self.__array_interface__ = {
            "version": 3, "typestr": f"|V{memory.itemsize}", "data": (memory.start, False),
            "shape": memory.shape, "strides": memory.strides,
        }  # fmt: skip


def _share(a: Memory, b: Memory) -> bool:
    if a == b:
        return True
    try:
        return np.shares_memory(np.asarray(_Shadow(a)), np.asarray(_Shadow(b)), _MAX_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _equal(a: _Span, b: _Span, manifest: Manifest) -> bool:
    """Whether two leaves put the same bytes to the same place, as far as the digests of their blocks tell."""
    if a.memory != b.memory or a.box != b.box:
        return False
    mine, other = (
        {(row.dtype, row.global_shape, row.box, row.digest, row.raw, row.start) for row in rows}
        for rows in manifest.find([(a.name, a.box), (b.name, b.box)])
    )
    return bool(mine) and mine == other
