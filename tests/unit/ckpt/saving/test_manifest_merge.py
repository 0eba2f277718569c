"""The rows of many ranks become one manifest, or the step is refused with the reason."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ckpt.errors import StepRefused
from ckpt.format import manifest
from ckpt.format.manifest import PlannedColumns, StoredBlock
from ckpt.saving.box_coverage import are_tiled, first_overlap, first_uncovered_box
from ckpt.saving.manifest_merge import merge_rows
from ckpt.saving.replica_check import LeafDescription
from ckpt.state.boxes import Box, intersect, whole_box

EXAMPLES = settings(max_examples=60, deadline=None)


class Held(NamedTuple):
    """A box that a rank stores. Equal `content` is equal bytes."""

    leaf: str
    shape: tuple[int, ...]
    box: Box
    content: str = ""
    dtype: str = "float32"


def part(rank: int, held: Sequence[Held], algorithm: str = "xxh3-128") -> tuple[int, Any]:
    """What a rank hands in: one block a box, as it comes out of its file."""
    sizes = [4 * h.box.size for h in held]
    full = [i for i, n in enumerate(sizes) if n]
    blocks = [
        StoredBlock(
            f"steps/3/pack/{rank}-1-0-0.pack", 4096 * i, sizes[i], sizes[i], None,
            hashlib.md5(f"{held[i].content or rank}{held[i].leaf}{held[i].box}".encode()).digest(), None, bytes(8),
        )
        for i in full
    ]  # fmt: skip
    index = {i: n for n, i in enumerate(full)}
    layout = PlannedColumns(
        [h.leaf for h in held], [h.dtype for h in held], [h.shape for h in held], [h.box for h in held],
        [0] * len(held), sizes, [index.get(i) for i in range(len(held))],
    )  # fmt: skip
    data = manifest.encode(layout, blocks, {"format": "1", "digest": algorithm, "step": "3"})
    return rank, manifest.read_table(data, f"part {rank}")


def merged(parts: Sequence[tuple[int, Any]]) -> bytes:
    return manifest.write_table(merge_rows(parts), {"format": "1", "digest": "xxh3-128", "step": "3"})


def refused(parts: Sequence[tuple[int, Any]], *words: str) -> str:
    """Both orders of the parts are refused in the same words."""
    with pytest.raises(StepRefused) as error:
        merge_rows(parts)
    message = str(error.value)
    for word in words:
        assert word in message, message
    assert "\n" not in message
    with pytest.raises(StepRefused) as again:
        merge_rows(parts[::-1])
    assert str(again.value) == message
    return message


def box(*ranges: tuple[int, int]) -> Box:
    return Box(tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges))


def test_a_gap_names_the_missing_box_and_what_to_do() -> None:
    shape = (8, 32)
    quarters = [box((a, a + 4), (b, b + 16)) for a in (0, 4) for b in (0, 16)]
    parts = [part(rank, [Held("w", shape, quarters[rank])]) for rank in (3, 2, 0)]
    parts.append(part(9, [Held("fine", (3,), whole_box((3,)))]))
    refused(parts, "leaf w", "no rank stored [0:4, 16:32] of shape (8, 32)", "wrap it in ckpt.Shard", "same on every rank")


def test_shapes_that_contradict_each_other() -> None:
    parts = [part(0, [Held("w", (8,), box((0, 4)))]), part(7, [Held("w", (9,), box((4, 9)))])]
    refused(parts, "leaf w", "shape (8,) on rank 0", "shape (9,) on rank 7")
    parts = [part(0, [Held("w", (8,), box((0, 8)))]), part(7, [Held("w", (8, 1), box((0, 8), (0, 1)))])]
    refused(parts, "leaf w", "shape (8,) on rank 0", "shape (8, 1) on rank 7")


def test_dtypes_that_contradict_each_other() -> None:
    parts = [part(1, [Held("w", (8,), box((0, 4)))]), part(2, [Held("w", (8,), box((4, 8)), dtype="int32")])]
    refused(parts, "leaf w", "float32 of global shape (8,) on rank 1", "int32 of global shape (8,) on rank 2")


def test_what_a_rank_without_rows_takes_a_leaf_for() -> None:
    """Of a leaf that nobody stored it does not matter: a tied one may go by another name there."""
    parts = [part(0, [Held("w", (8,), box((0, 8)))]), part(7, [])]
    held = {"w": LeafDescription(7, "float32", (8,)), "other": LeafDescription(7, "int8", (1,))}
    data = manifest.write_table(merge_rows(parts, held), {"format": "1", "digest": "xxh3-128"})
    assert manifest.decode(data, "x").leaves().keys() == {"w"}
    for dtype, shape in (("float32", (8, 1)), ("int32", (8,)), ("float32", ())):
        with pytest.raises(StepRefused) as error:
            merge_rows(parts, {"w": LeafDescription(7, dtype, shape)})
        assert f"float32 of global shape (8,) on rank 0 and {dtype} of global shape {shape} on rank 7;" in str(error.value)


@pytest.mark.parametrize("outside", [box((4, 9)), box((-1, 4)), box((9, 9)), Box((4, 0), (4, 1)), Box((), ())])
def test_a_box_outside_of_its_array(outside: Box) -> None:
    parts = [part(0, [Held("w", (8,), box((0, 4)))]), part(5, [Held("w", (8,), outside)])]
    refused(parts, "leaf w", "of rank 5", "shape (8,)", "check offset and global_shape")


def test_one_box_by_several_ranks() -> None:
    same = [part(rank, [Held("w", (8,), whole_box((8,)), "equal")]) for rank in (3, 1, 2)]
    rows = manifest.decode(merged(same), "x").rows
    assert [(row.pack, row.box) for row in rows] == [("steps/3/pack/1-1-0-0.pack", whole_box((8,)))]
    other = [*same, part(4, [Held("w", (8,), whole_box((8,)), "other")])]
    refused(other, "leaf w", "ranks 1 and 4 both stored [0:8] of shape (8,)", "replica=(i, n)")


def test_boxes_that_overlap_in_part() -> None:
    parts = [part(0, [Held("w", (8, 4), box((0, 5), (0, 4)))]), part(6, [Held("w", (8, 4), box((4, 8), (0, 4)))])]
    refused(parts, "leaf w", "[0:5, 0:4] of rank 0", "[4:8, 0:4] of rank 6", "overlap in [4:5, 0:4] of shape (8, 4)")
    # An overlap that just makes up for a gap is no step either.
    parts = [part(0, [Held("w", (8,), box((0, 4)))]), part(1, [Held("w", (8,), box((2, 6)))])]
    refused(parts, "leaf w", "overlap in [2:4]")


def test_digests_of_two_kinds() -> None:
    held = [Held("w", (8,), whole_box((8,)))]
    refused([part(0, held), part(1, [], "blake3")], "rank 0", "rank 1", "'blake3'")


def test_arrays_without_elements_or_without_axes() -> None:
    scalar = Held("scalar", (), whole_box(()), "equal")
    held = [Held("empty", (0, 4), whole_box((0, 4))), scalar, Held("none", (3, 0), box((1, 2), (0, 0)))]
    extra = [Held("cut", (4,), box((0, 4))), Held("cut", (4,), box((4, 4)))]
    rows = manifest.decode(merged([part(0, held), part(1, held), part(2, extra)]), "x").rows
    kept = [(row.leaf, row.box.shape) for row in rows]
    assert kept == [("empty", (0, 4)), ("scalar", ()), ("none", (1, 0)), ("cut", (4,))]
    refused([part(0, held), part(1, [Held("cut", (4,), box((4, 4)))])], "leaf cut", "no rank stored [0:4] of shape (4,)")
    refused([part(0, [scalar]), part(1, [scalar._replace(content="other")])], "leaf scalar", "ranks 0 and 1", "[] of shape ()")


def test_nothing_at_all() -> None:
    assert manifest.decode(merged([part(0, []), part(1, [])]), "x").rows == []
    assert merge_rows([]).num_rows == 0


def test_columns_of_other_writers() -> None:
    """Text as it is or by number, by rank."""
    (_, a), (_, b) = part(0, [Held("w", (8,), box((0, 4)))]), part(1, [Held("w", (8,), box((4, 8)))])
    b = b.set_column(0, "leaf", b.column("leaf").cast("string"))
    assert [row.box for row in manifest.decode(merged([(0, a), (1, b)]), "x").rows] == [box((0, 4)), box((4, 8))]


def cut(shape: tuple[int, ...], cuts: int, rng: random.Random) -> list[Box]:
    """An array in boxes, irregularly: one of them is cut in two, over and over."""
    boxes = [whole_box(shape)]
    for _ in range(cuts):
        i = rng.randrange(len(boxes))
        old = boxes[i]
        axes = [k for k, n in enumerate(old.shape) if n > 1]
        if axes:
            k = rng.choice(axes)
            at = rng.randrange(1, old.shape[k])
            first = old.shape[:k] + (at,) + old.shape[k + 1 :]
            rest = old.shape[:k] + (old.shape[k] - at,) + old.shape[k + 1 :]
            boxes[i] = Box(old.offset, first)
            boxes.append(Box(old.offset[:k] + (old.offset[k] + at,) + old.offset[k + 1 :], rest))
    return boxes


shapes = st.lists(st.integers(1, 7), max_size=4).map(tuple)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[dict[str, tuple[int, ...]], list[list[Held]]]:
    """Arrays, and which boxes of them each of some ranks holds."""
    rng = draw(st.randoms(use_true_random=False))
    arrays = {f"leaf{i}": shape for i, shape in enumerate(draw(st.lists(shapes, min_size=1, max_size=5)))}
    ranks: list[list[Held]] = [[] for _ in range(draw(st.integers(1, 6)))]
    for name, shape in arrays.items():
        for piece in cut(shape, draw(st.integers(0, 12)), rng):
            rng.choice(ranks).append(Held(name, shape, piece))
    for held in ranks:
        rng.shuffle(held)
    return arrays, ranks


@EXAMPLES
@given(made=partitions(), rng=st.randoms(use_true_random=False))
def test_any_partition_is_merged(made: tuple[dict[str, tuple[int, ...]], list[list[Held]]], rng: random.Random) -> None:
    arrays, ranks = made
    parts = [part(rank, held) for rank, held in enumerate(ranks)]
    data = merged(parts)
    rng.shuffle(parts)
    assert merged(parts) == data
    found = manifest.decode(data, "x")
    first_seen = dict.fromkeys(h.leaf for held in ranks for h in held)
    assert list(found.leaves()) == list(first_seen)
    assert {name: leaf.shape for name, leaf in found.leaves().items()} == arrays
    rows = [(h.leaf, h.box, f"steps/3/pack/{rank}-1-0-0.pack") for rank, held in enumerate(ranks) for h in held]
    expected = sorted(rows, key=lambda row: list(first_seen).index(row[0]))
    assert [(row.leaf, row.box, row.pack) for row in found.rows] == expected


@EXAMPLES
@given(made=partitions(), rng=st.randoms(use_true_random=False))
def test_a_box_that_is_missing_is_named(made: tuple[dict[str, tuple[int, ...]], list[list[Held]]], rng: random.Random) -> None:
    arrays, ranks = made
    held = rng.choice([held for held in ranks if held])
    lost = held.pop(rng.randrange(len(held)))
    assume(any(h.leaf == lost.leaf for held in ranks for h in held))
    parts = [part(rank, held) for rank, held in enumerate(ranks)]
    ranges = ", ".join(f"{a}:{a + n}" for a, n in zip(*lost.box, strict=True))
    refused(parts, f"leaf {lost.leaf}: no rank stored [{ranges}] of shape {arrays[lost.leaf]}")


@EXAMPLES
@given(made=partitions(), rng=st.randoms(use_true_random=False))
def test_a_box_too_many_is_refused(made: tuple[dict[str, tuple[int, ...]], list[list[Held]]], rng: random.Random) -> None:
    arrays, ranks = made
    held = rng.choice([held for held in ranks if held])
    leaf = rng.choice(held).leaf
    shape = arrays[leaf]
    low = tuple(rng.randrange(n) for n in shape)
    extra = Box(low, tuple(rng.randint(1, n - a) for a, n in zip(low, shape, strict=True)))
    parts = [part(rank, held) for rank, held in enumerate([*ranks, [Held(leaf, shape, extra)]])]
    message = refused(parts, f"leaf {leaf}: ", f"shape {shape}")
    assert "overlap" in message


def painted(shape: tuple[int, ...], boxes: list[Box]) -> Any:
    """How many boxes hold each element."""
    count = np.zeros(shape, int)
    for b in boxes:
        count[(*b.slices(), ...)] += 1
    return count


def numbers(boxes: list[Box], axes: int) -> tuple[Any, Any]:
    return tuple(np.array([b[i] for b in boxes], np.int64).reshape(len(boxes), axes) for i in (0, 1))  # type: ignore[return-value]


@st.composite
def any_boxes(draw: st.DrawFn, shape: tuple[int, ...], whole_sometimes: bool = True) -> list[Box]:
    """Anything from nothing to a partition with a box too many."""
    boxes = cut(shape, draw(st.integers(0, 8)), draw(st.randoms(use_true_random=False)))
    boxes = [b for b in boxes if draw(st.integers(0, 7))]
    for _ in range(draw(st.sampled_from([0, 0, 1, 3]))):
        low = [draw(st.integers(0, n - 1)) for n in shape]
        boxes.append(Box(tuple(low), tuple(draw(st.integers(1, n - a)) for a, n in zip(low, shape, strict=True))))
    return boxes


@settings(max_examples=200, deadline=None)
@given(data=st.data(), shape=shapes)
def test_cover_and_overlap_are_those_of_painting(data: st.DataObject, shape: tuple[int, ...]) -> None:
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


@EXAMPLES
@given(data=st.data(), axes=st.integers(0, 3), arrays=st.integers(0, 6))
def test_many_arrays_at_once(data: st.DataObject, axes: int, arrays: int) -> None:
    wholes = [tuple(data.draw(st.lists(st.integers(1, 5), min_size=axes, max_size=axes))) for _ in range(arrays)]
    held = [data.draw(any_boxes(shape)) for shape in wholes]
    offset, extent = numbers([b for boxes in held for b in boxes], axes)
    starts = np.cumsum([0, *map(len, held)])
    got = are_tiled(np.array(wholes, np.int64).reshape(arrays, axes), starts, offset, extent)
    assert got.tolist() == [bool(np.all(painted(s, b) == 1)) for s, b in zip(wholes, held, strict=True)]


@pytest.mark.parametrize("shape", [(2,) * 11, (1 << 40, 1 << 40), (1 << 61,), (1 << 20, 1 << 20, 1 << 20)])
def test_arrays_too_large_for_corners(shape: tuple[int, ...]) -> None:
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
