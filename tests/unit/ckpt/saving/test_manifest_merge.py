"""The rows of many ranks become one manifest, or the step is refused with the reason."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from helpers.boxes import cut
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ckpt.errors import StepRefused
from ckpt.format import manifest, manifest_encoding
from ckpt.format.manifest_encoding import PlannedColumns, StoredBlock
from ckpt.saving.manifest_merge import merge_rows
from ckpt.saving.replica_check import LeafDescription
from ckpt.state.boxes import Box, whole_box

EXAMPLES = settings(max_examples=60, deadline=None)


class StoredBox(NamedTuple):
    """A box that a rank stores. Equal `content` means equal bytes."""

    leaf: str
    shape: tuple[int, ...]
    box: Box
    content: str = ""
    dtype: str = "float32"


def part(rank: int, boxes: Sequence[StoredBox], algorithm: str = "xxh3-128") -> tuple[int, Any]:
    """Return `rank` and the rows that it publishes, one block for each box, as they are read from its part."""
    sizes = [4 * b.box.size for b in boxes]
    full = [i for i, n in enumerate(sizes) if n]
    blocks = [
        StoredBlock(
            f"steps/3/pack/{rank}-1-0-0.pack", 4096 * i, sizes[i], sizes[i], None,
            hashlib.md5(f"{boxes[i].content or rank}{boxes[i].leaf}{boxes[i].box}".encode()).digest(), None, bytes(8),
        )
        for i in full
    ]  # fmt: skip
    index = {i: n for n, i in enumerate(full)}
    layout = PlannedColumns(
        [b.leaf for b in boxes], [b.dtype for b in boxes], [b.shape for b in boxes], [b.box for b in boxes],
        [0] * len(boxes), sizes, [index.get(i) for i in range(len(boxes))],
    )  # fmt: skip
    data = manifest_encoding.encode(layout, blocks, {"format": "1", "digest": algorithm, "step": "3"})
    return rank, manifest.read_table(data, f"part {rank}")


def merged(parts: Sequence[tuple[int, Any]]) -> bytes:
    return manifest.write_table(merge_rows(parts), {"format": "1", "digest": "xxh3-128", "step": "3"})


def refused(parts: Sequence[tuple[int, Any]], *words: str) -> str:
    """Check that both orders of the parts are refused with the same message, and return the message."""
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
    parts = [part(rank, [StoredBox("w", shape, quarters[rank])]) for rank in (3, 2, 0)]
    parts.append(part(9, [StoredBox("fine", (3,), whole_box((3,)))]))
    refused(parts, "leaf w", "no rank stored [0:4, 16:32] of shape (8, 32)", "wrap an array that differs by rank in ckpt.Shard")


def test_a_gap_of_one_process_is_about_its_shards() -> None:
    message = refused([part(0, [StoredBox("w", (8,), box((0, 4)))])], "no rank stored [4:8] of shape (8,)")
    assert message.endswith("; save a Shard that has it (each i of replica=(i, n))")


def test_different_shapes_of_one_leaf_are_refused() -> None:
    parts = [part(0, [StoredBox("w", (8,), box((0, 4)))]), part(7, [StoredBox("w", (9,), box((4, 9)))])]
    refused(parts, "leaf w", "float32 (8,) on rank 0", "float32 (9,) on rank 7")
    parts = [part(0, [StoredBox("w", (8,), box((0, 8)))]), part(7, [StoredBox("w", (8, 1), box((0, 8), (0, 1)))])]
    refused(parts, "leaf w", "float32 (8,) on rank 0", "float32 (8, 1) on rank 7")


def test_different_dtypes_of_one_leaf_are_refused() -> None:
    parts = [part(1, [StoredBox("w", (8,), box((0, 4)))]), part(2, [StoredBox("w", (8,), box((4, 8)), dtype="int32")])]
    refused(parts, "leaf w", "float32 (8,) on rank 1", "int32 (8,) on rank 2")


def test_a_leaf_description_of_a_rank_without_rows_is_checked() -> None:
    """A leaf that nobody stored is not checked: a rank may have a tied leaf under another name."""
    parts = [part(0, [StoredBox("w", (8,), box((0, 8)))]), part(7, [])]
    described = {"w": LeafDescription(7, "float32", (8,)), "other": LeafDescription(7, "int8", (1,))}
    data = manifest.write_table(merge_rows(parts, described), {"format": "1", "digest": "xxh3-128"})
    assert manifest.decode(data, "x").leaves().keys() == {"w"}
    for dtype, shape in (("float32", (8, 1)), ("int32", (8,)), ("float32", ())):
        with pytest.raises(StepRefused) as error:
            merge_rows(parts, {"w": LeafDescription(7, dtype, shape)})
        assert f"float32 (8,) on rank 0 and {dtype} {shape} on rank 7;" in str(error.value)


@pytest.mark.parametrize("outside", [box((4, 9)), box((-1, 4)), box((9, 9)), Box((4, 0), (4, 1)), Box((), ())])
def test_a_box_outside_of_its_array_is_refused(outside: Box) -> None:
    parts = [part(0, [StoredBox("w", (8,), box((0, 4)))]), part(5, [StoredBox("w", (8,), outside)])]
    refused(parts, "leaf w", "of rank 5", "shape (8,)", "check offset and global_shape")


def test_one_box_of_several_ranks_must_have_equal_bytes() -> None:
    same = [part(rank, [StoredBox("w", (8,), whole_box((8,)), "equal")]) for rank in (3, 1, 2)]
    rows = manifest.decode(merged(same), "x").rows
    assert [(row.pack, row.box) for row in rows] == [("steps/3/pack/1-1-0-0.pack", whole_box((8,)))]
    other = [*same, part(4, [StoredBox("w", (8,), whole_box((8,)), "other")])]
    refused(other, "leaf w", "ranks 1 and 4 both stored [0:8] of shape (8,)", "replica=(i, n)")


def test_boxes_that_overlap_in_part_are_refused() -> None:
    parts = [part(0, [StoredBox("w", (8, 4), box((0, 5), (0, 4)))]), part(6, [StoredBox("w", (8, 4), box((4, 8), (0, 4)))])]
    refused(parts, "leaf w", "[0:5, 0:4] of rank 0", "[4:8, 0:4] of rank 6", "overlap in [4:5, 0:4] of shape (8, 4)")
    # An overlap whose size equals that of a gap is refused as well.
    parts = [part(0, [StoredBox("w", (8,), box((0, 4)))]), part(1, [StoredBox("w", (8,), box((2, 6)))])]
    refused(parts, "leaf w", "overlap in [2:4]")


def test_different_digest_algorithms_are_refused() -> None:
    boxes = [StoredBox("w", (8,), whole_box((8,)))]
    refused([part(0, boxes), part(1, [], "blake3")], "rank 0", "rank 1", "'blake3'")


def test_arrays_without_elements_or_without_axes_are_merged() -> None:
    scalar = StoredBox("scalar", (), whole_box(()), "equal")
    boxes = [StoredBox("empty", (0, 4), whole_box((0, 4))), scalar, StoredBox("none", (3, 0), box((1, 2), (0, 0)))]
    extra = [StoredBox("cut", (4,), box((0, 4))), StoredBox("cut", (4,), box((4, 4)))]
    rows = manifest.decode(merged([part(0, boxes), part(1, boxes), part(2, extra)]), "x").rows
    kept = [(row.leaf, row.box.shape) for row in rows]
    assert kept == [("empty", (0, 4)), ("scalar", ()), ("none", (1, 0)), ("cut", (4,))]
    refused([part(0, boxes), part(1, [StoredBox("cut", (4,), box((4, 4)))])], "leaf cut", "no rank stored [0:4] of shape (4,)")
    refused([part(0, [scalar]), part(1, [scalar._replace(content="other")])], "leaf scalar", "ranks 0 and 1", "[] of shape ()")


def test_parts_without_rows_merge_to_an_empty_manifest() -> None:
    assert manifest.decode(merged([part(0, []), part(1, [])]), "x").rows == []
    assert merge_rows([]).num_rows == 0


def test_text_columns_with_and_without_a_dictionary_are_merged() -> None:
    """Some writers store text directly, others as numbers of a dictionary."""
    (_, a), (_, b) = part(0, [StoredBox("w", (8,), box((0, 4)))]), part(1, [StoredBox("w", (8,), box((4, 8)))])
    b = b.set_column(0, "leaf", b.column("leaf").cast("string"))
    assert [row.box for row in manifest.decode(merged([(0, a), (1, b)]), "x").rows] == [box((0, 4)), box((4, 8))]


shapes = st.lists(st.integers(1, 7), max_size=4).map(tuple)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[dict[str, tuple[int, ...]], list[list[StoredBox]]]:
    """Draw arrays, and the boxes of them that each of some ranks stores."""
    rng = draw(st.randoms(use_true_random=False))
    arrays = {f"leaf{i}": shape for i, shape in enumerate(draw(st.lists(shapes, min_size=1, max_size=5)))}
    ranks: list[list[StoredBox]] = [[] for _ in range(draw(st.integers(1, 6)))]
    for name, shape in arrays.items():
        for part_box in cut(shape, draw(st.integers(0, 12)), rng):
            rng.choice(ranks).append(StoredBox(name, shape, part_box))
    for boxes in ranks:
        rng.shuffle(boxes)
    return arrays, ranks


@pytest.mark.slow
@EXAMPLES
@given(made=partitions(), rng=st.randoms(use_true_random=False))
def test_any_partition_is_merged(made: tuple[dict[str, tuple[int, ...]], list[list[StoredBox]]], rng: random.Random) -> None:
    arrays, ranks = made
    parts = [part(rank, boxes) for rank, boxes in enumerate(ranks)]
    data = merged(parts)
    rng.shuffle(parts)
    assert merged(parts) == data
    found = manifest.decode(data, "x")
    first_seen = dict.fromkeys(b.leaf for boxes in ranks for b in boxes)
    assert list(found.leaves()) == list(first_seen)
    assert {name: leaf.shape for name, leaf in found.leaves().items()} == arrays
    rows = [(b.leaf, b.box, f"steps/3/pack/{rank}-1-0-0.pack") for rank, boxes in enumerate(ranks) for b in boxes]
    expected = sorted(rows, key=lambda row: list(first_seen).index(row[0]))
    assert [(row.leaf, row.box, row.pack) for row in found.rows] == expected


@pytest.mark.slow
@EXAMPLES
@given(made=partitions(), rng=st.randoms(use_true_random=False))
def test_a_missing_box_is_named(made: tuple[dict[str, tuple[int, ...]], list[list[StoredBox]]], rng: random.Random) -> None:
    arrays, ranks = made
    boxes = rng.choice([boxes for boxes in ranks if boxes])
    lost = boxes.pop(rng.randrange(len(boxes)))
    assume(any(b.leaf == lost.leaf for boxes in ranks for b in boxes))
    parts = [part(rank, boxes) for rank, boxes in enumerate(ranks)]
    ranges = ", ".join(f"{a}:{a + n}" for a, n in zip(*lost.box, strict=True))
    refused(parts, f"leaf {lost.leaf}: no rank stored [{ranges}] of shape {arrays[lost.leaf]}")


@pytest.mark.slow
@EXAMPLES
@given(made=partitions(), rng=st.randoms(use_true_random=False))
def test_an_extra_box_is_refused(made: tuple[dict[str, tuple[int, ...]], list[list[StoredBox]]], rng: random.Random) -> None:
    arrays, ranks = made
    boxes = rng.choice([boxes for boxes in ranks if boxes])
    leaf = rng.choice(boxes).leaf
    shape = arrays[leaf]
    low = tuple(rng.randrange(n) for n in shape)
    extra = Box(low, tuple(rng.randint(1, n - a) for a, n in zip(low, shape, strict=True)))
    parts = [part(rank, boxes) for rank, boxes in enumerate([*ranks, [StoredBox(leaf, shape, extra)]])]
    message = refused(parts, f"leaf {leaf}: ", f"shape {shape}")
    assert "overlap" in message
