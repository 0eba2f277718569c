"""The row index of a manifest finds what a plain search over all rows finds."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.format import manifest, manifest_encoding, manifest_parquet
from ckpt.format.manifest import Manifest, Row
from ckpt.format.manifest_encoding import PlannedColumns, StoredBlock
from ckpt.state.boxes import Box, intersect
from ckpt.storage.base.errors import IntegrityError

EXAMPLES = settings(max_examples=60, deadline=None)
META = {"format": "1", "digest": "xxh3-128", "step": "3"}


@pytest.fixture(autouse=True, scope="module")
def small_groups() -> Iterator[None]:
    """Use row groups of five rows, so that a small manifest has several."""
    before = manifest_parquet.ROWS_PER_GROUP
    manifest_parquet.ROWS_PER_GROUP = 5
    yield
    manifest_parquet.ROWS_PER_GROUP = before


def boxes_in(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    """Draw any box of an array, including empty ones."""
    ranges = [st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted) for n in shape]
    return st.tuples(*ranges).map(lambda rs: Box(tuple(a for a, _ in rs), tuple(b - a for a, b in rs)))


@st.composite
def manifests(draw: st.DrawFn) -> tuple[dict[str, tuple[int, ...]], bytes]:
    """Draw some arrays, and rows with any boxes of them in any order."""
    shapes = draw(st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=6))
    arrays = {f"leaf{i}": shape for i, shape in enumerate(shapes)}
    named = st.sampled_from(list(arrays))
    rows = draw(st.lists(named.flatmap(lambda name: st.tuples(st.just(name), boxes_in(arrays[name]))), max_size=25))
    blocks = [
        StoredBlock(
            f"steps/{i % 2}/pack/{i % 3}-1-0-{i % 4}.pack", 4096 * i, 10 + i, 20 + i, None, bytes([i]) * 16, i or None, bytes(8)
        )
        for i in range(draw(st.integers(1, 6)))
    ]  # fmt: skip
    index = st.integers(0, len(blocks) - 1)
    layout = PlannedColumns(
        [name for name, _ in rows], ["int8"] * len(rows), [arrays[name] for name, _ in rows], [box for _, box in rows],
        [0] * len(rows), [box.size for _, box in rows], [draw(index) if box.size else None for _, box in rows],
    )  # fmt: skip
    return arrays, manifest_encoding.encode(layout, blocks, META)


def by_leaf(rows: list[Row]) -> dict[str, list[Row]]:
    """Return the rows by their leaf."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.leaf, []).append(row)
    return found


@pytest.mark.slow
@EXAMPLES
@given(made=manifests(), data=st.data())
def test_rows_are_found_by_leaf_and_box(made: tuple[dict[str, tuple[int, ...]], bytes], data: st.DataObject) -> None:
    arrays, encoded = made
    found = manifest.decode(encoded, "x")
    rows = manifest.decode(encoded, "x").rows
    assert len(found) == len(rows)
    plain = by_leaf(rows)
    target = st.sampled_from(list(arrays)).flatmap(lambda name: st.tuples(st.just(name), st.none() | boxes_in(arrays[name])))
    for _ in range(2):  # the second time from the cache
        targets = [*data.draw(st.lists(target, max_size=8)), ("nowhere", None)]
        expected = [
            [row for row in plain.get(name, []) if box is None or intersect(row.box, box) is not None] for name, box in targets
        ]
        assert found.find(targets) == expected
        assert found.select([name for name, _ in targets]).find(targets) == expected
    assert list(found.leaves().items()) == [(name, ("int8", arrays[name])) for name in plain]
    assert found.by_leaf() == plain
    assert [row.leaf for row in found.select(["leaf1", "leaf0"]).rows] == [r.leaf for r in rows if r.leaf in ("leaf0", "leaf1")]


@pytest.mark.slow
@EXAMPLES
@given(made=manifests())
def test_blocks_pack_order_and_totals_agree_with_the_rows(made: tuple[dict[str, tuple[int, ...]], bytes]) -> None:
    found = manifest.decode(made[1], "x")
    rows = [row for row in found.rows if row.pack is not None]
    for rank in (None, 0, 1, 2, 3):
        mine = [r for r in rows if rank is None or (r.pack or "").split("/")[-1].startswith(f"{rank}-")]
        expected = {(r.digest, r.raw): (r.pack, r.position, r.stored, r.codec, r.checksum, r.base) for r in mine}
        assert found.blocks(rank) == expected
    for at_once in (1, 4, 100):
        batches = list(found.in_pack_order(at_once))
        ordered = [row for batch in batches for row in batch]
        assert sorted(ordered, key=repr) == sorted(rows, key=repr)
        positions = [(row.pack, row.position) for row in ordered]
        assert positions == sorted(positions)  # type: ignore[type-var]
        ends = [(batch[-1].pack, batch[-1].position) for batch in batches]
        assert len(set(ends)) == len(ends), "a block was split between batches"
    assert found.stored_bytes() == sum({(r.pack, r.position): r.stored for r in rows}.values())
    for total, (name, of) in zip(found.totals(), by_leaf(found.rows).items(), strict=True):
        assert (total.name, total.first, total.nbytes) == (name, of[0], sum(r.nbytes for r in of))
        assert total.stored_bytes == pytest.approx(sum(r.stored * r.nbytes / r.raw for r in of if r.raw))


def test_several_files_are_one_manifest() -> None:
    parts = []
    for rank in range(3):
        boxes = [Box((rank, 0), (1, 2)), Box((), ())]
        layout = PlannedColumns(["w", f"only{rank}"], ["int8"] * 2, [(3, 2), ()], boxes, [0, 2], [2, 1], [0, 0])
        block = StoredBlock(f"steps/3/pack/{rank}-1-0-0.pack", 0, 3, 3, None, bytes([rank]) * 16, None, bytes(8))
        parts.append(manifest.decode(manifest_encoding.encode(layout, [block], META), f"part {rank}"))
    whole = manifest.join_manifests(parts)
    assert list(whole.leaves()) == ["w", "only0", "only1", "only2"]
    ((one,), (last,), all_of_w) = whole.find([("w", Box((1, 1), (1, 1))), ("only2", None), ("w", None)])
    assert (one.box, last.pack, len(all_of_w)) == (Box((1, 0), (1, 2)), "steps/3/pack/2-1-0-0.pack", 3)


def small_manifest() -> bytes:
    """Return a small manifest of two rows in one block."""
    layout = PlannedColumns(["w"] * 2, ["int8"] * 2, [(4,)] * 2, [Box((0,), (2,)), Box((2,), (2,))], [0, 2], [2, 2], [0, 0])
    block = StoredBlock("steps/3/pack/0-1-0-0.pack", 0, 4, 4, None, bytes(16), None, bytes(8))
    return manifest_encoding.encode(layout, [block], META)


def changed(name: str, column: Any) -> bytes:
    """Return the small manifest with another column, or without it."""
    made = pq.read_table(pa.BufferReader(small_manifest()))
    made = made.drop_columns([name]) if column is None else made.set_column(made.column_names.index(name), name, column)
    sink = io.BytesIO()
    pq.write_table(made, sink)
    return sink.getvalue()


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("leaf", None), ("leaf", pa.array([1, 2])), ("leaf", pa.array(["w", None])), ("position", pa.array(["a", "b"])),
        ("position", pa.array([1.5, 2.0])), ("offset", pa.array([1, 2])), ("offset", pa.array([["a"], ["b"]])),
        ("offset", pa.array([[0], None])), ("digest", pa.array(["a", "b"])), ("pack", pa.array([1, 2])),
        ("shape", pa.array([[2, 1], [2]])), ("offset", pa.array([[-1], [2]])), ("shape", pa.array([[2], [3]])),
    ],
)  # fmt: skip
def test_malformed_columns_are_refused(name: str, column: Any) -> None:
    with pytest.raises(IntegrityError, match="here"):
        manifest.decode(changed(name, column), "here").find([("w", None)])


@pytest.mark.parametrize("data", [b"", b"PAR1", b"x" * 100, small_manifest()[:-1], small_manifest()[10:]])
def test_files_that_are_no_manifest_are_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="here is not a manifest"):
        manifest.decode(data, "here").find([("w", None)])
    with pytest.raises(IntegrityError, match="here is not a manifest"):
        manifest.read_table(data, "here")


def test_column_types_of_other_writers_are_read() -> None:
    """pandas and DuckDB write these types when they have read a manifest and write it again."""
    plain = pq.read_table(pa.BufferReader(small_manifest()))
    names = {"leaf": pa.large_string(), "dtype": pa.string(), "pack": pa.string(), "codec": pa.null(), "position": pa.int32(),
             "offset": pa.large_list(pa.int32()), "digest": pa.binary(16), "cells": pa.large_binary()}  # fmt: skip
    fields = [(name, names.get(name, plain.schema.field(name).type)) for name in plain.column_names]
    other = plain.cast(pa.schema(fields, plain.schema.metadata))
    sink = io.BytesIO()
    pq.write_table(other, sink)
    found = manifest.decode(sink.getvalue(), "x")
    assert found.rows == manifest.decode(small_manifest(), "x").rows
    assert found.find([("w", Box((3,), (1,)))]) == [found.rows[1:]]


def test_a_box_of_another_number_of_axes_is_refused() -> None:
    with pytest.raises(IntegrityError, match="another number of axes"):
        manifest.decode(small_manifest(), "here").find([("w", Box((0, 0), (1, 1)))])


def test_a_step_of_several_row_groups_is_loaded(tmp_path: Any) -> None:
    state = {f"w{i}": np.arange(40.0).reshape(8, 5) + i for i in range(30)} | {"none": np.zeros((0, 3)), "one": np.float32(3)}
    checkpoint = ckpt.save(state, tmp_path / "run", 1)
    assert isinstance(checkpoint.manifest(), Manifest)
    assert len(checkpoint.manifest().groups) == 7
    again = ckpt.load(tmp_path / "run")
    for name, value in state.items():
        np.testing.assert_array_equal(again[name], value)
    np.testing.assert_array_equal(checkpoint["w17"][2:5, 1], state["w17"][2:5, 1])
    assert checkpoint.verify() > 0
    assert sorted(leaf.name for leaf in checkpoint.leaves()) == sorted(state)
