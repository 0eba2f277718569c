"""The manifest keeps every column, and the block plan puts every byte into one block."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.block_io.staging_arena import round_up
from ckpt.format import manifest, manifest_encoding
from ckpt.format.block_difference import WIDTHS, BaseBlock
from ckpt.saving.block_plan import PIECE_ALIGNMENT, LeafSpec, plan_blocks, stage_block
from ckpt.state.boxes import Box
from ckpt.state.leaves.numpy import NumpyLeaf
from ckpt.storage.base.errors import IntegrityError


@settings(max_examples=40)
@given(
    leaves=st.lists(st.tuples(st.sampled_from(["u1", "i2", "f4", "f8"]), st.integers(0, 3000), st.booleans()), max_size=30),
)
def test_the_block_plan_puts_every_byte_into_one_block(leaves):
    made = {}
    for i, (dtype, n, strided) in enumerate(leaves):
        array = np.random.default_rng(i).integers(0, 200, 2 * n).astype(dtype)
        made[f"l{i}"] = NumpyLeaf(array[::2] if strided else array[:n])
    specs = [LeafSpec(n, x.dtype, x.shape, x.itemsize, x.nbytes, "a" if n[-1] == "3" else None) for n, x in made.items()]
    blocks, layout = plan_blocks(specs)
    assert plan_blocks(list(specs)).blocks is blocks
    names = list(made)
    found = {}
    for block in blocks:
        out = np.full(round_up(block.nbytes), 7, np.uint8)
        stage_block(block, list(made.values()), out)
        assert not out[block.nbytes :].any()
        assert len({(specs[p.leaf].itemsize, specs[p.leaf].codec) for p in block.pieces}) == 1
        end = 0
        for piece in block.pieces:
            assert piece.start >= end
            assert piece.start % PIECE_ALIGNMENT == 0
            end = piece.start + piece.nbytes
            assert names[piece.leaf] not in found
            found[names[piece.leaf]] = bytes(out[piece.start : end])
        assert end == block.nbytes
    without = {n for n, i in zip(layout.leaf, layout.block, strict=True) if i is None}
    assert without == {n for n, leaf in made.items() if not leaf.nbytes}
    assert found == {n: leaf.array.tobytes() for n, leaf in made.items() if leaf.nbytes}


texts = st.text(st.characters(codec="utf-8"), max_size=8)
ints = st.integers(0, 2**60)
checksums = st.none() | st.integers(0, 2**64 - 1)
digests = st.binary(min_size=16, max_size=16)
cells = st.binary(min_size=800, max_size=800)
packs = st.from_regex(r"steps/[0-9]{1,9}/pack/[0-9][0-9-]{0,9}\.pack", fullmatch=True)
bases = st.builds(BaseBlock, packs, ints, ints, st.none() | texts, digests, checksums, st.sampled_from(WIDTHS))
stored_blocks = st.builds(
    manifest_encoding.StoredBlock, packs, ints, ints, ints, st.none() | texts, digests, checksums, cells, st.none()
) | st.builds(manifest_encoding.StoredBlock, packs, ints, ints, ints, texts, digests, checksums, cells, bases)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data(), blocks=st.lists(stored_blocks, max_size=5))
def test_the_manifest_keeps_every_column(data, blocks):
    shape = st.lists(ints, max_size=4).map(tuple)
    indices = st.none() if not blocks else st.none() | st.integers(0, len(blocks) - 1)
    numbers = st.integers(0, 10**7)
    columns = st.tuples(texts, texts, shape, st.builds(Box, shape, shape), numbers, numbers, indices)
    columns_of_rows = data.draw(st.lists(columns, max_size=8))
    layout = (
        manifest_encoding.PlannedColumns(*map(list, zip(*columns_of_rows, strict=True)))
        if columns_of_rows
        else manifest_encoding.PlannedColumns(*([] for _ in range(7)))
    )
    for _ in range(2):  # the second time from the cache
        encoded = manifest_encoding.encode(layout, blocks, {"format": "1", "digest": "xxh3-128"})
    rows = manifest.decode(encoded, "x").rows
    assert len(rows) == len(columns_of_rows)
    for row, piece in zip(rows, columns_of_rows, strict=True):
        assert row[:4] == piece[:4]
        start, nbytes, index = piece[4:]
        assert (row.start, row.nbytes) == (start, nbytes)
        if index is None:
            assert row.pack is None
            assert row.cells == b""
        else:
            block = blocks[index]
            assert (row.pack, row.position, row.stored, row.raw, row.codec, row.digest, row.checksum) == block[:7]
            assert row.base == block.base
            first, last = start // 262144, -(-(start + nbytes) // 262144)
            assert row.cells == block.cells[8 * first : 8 * last]


@pytest.mark.parametrize("column", ["leaf", "dtype", "pack"])
def test_text_that_is_not_utf8_is_refused(tmp_path, column):
    """Parquet stores any bytes as text. The rows are read late, so the error must come from there, too."""
    ckpt.save({"name": np.zeros(3)}, tmp_path, 1)
    (path,) = tmp_path.glob("steps/1/manifest/*.parquet")
    table = pq.read_table(path)
    at = table.schema.get_field_index(column)
    field = table.schema.field(column)
    wrong = pa.array([b"\xff\xfe"] * len(table)).view(pa.string())
    if pa.types.is_dictionary(field.type):
        wrong = wrong.dictionary_encode().cast(field.type, safe=False)
    pq.write_table(table.set_column(at, field, wrong), path)
    with pytest.raises(IntegrityError, match="manifest"):
        manifest.decode(path.read_bytes(), "manifest").totals()
