"""The rows of a manifest as Python objects: a piece of a leaf, its block, and the base of that block."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt.errors import DAMAGE_ADVICE
from ckpt.format import manifest_parquet
from ckpt.format.block_difference import WIDTHS, BaseBlock
from ckpt.format.digest import CELL_BYTES
from ckpt.format.pack import step_of_file
from ckpt.state.boxes import Box
from ckpt.storage.base.errors import IntegrityError
from ckpt.support import arrow_columns

if TYPE_CHECKING:
    import pyarrow as pa


class Row(NamedTuple):
    """One row: a piece of a leaf and the location of its bytes."""

    leaf: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    """The piece, as a box of the global array."""
    pack: str | None
    """Name of the pack below the root of the repository, None for a leaf without bytes. It may belong to an earlier step."""
    position: int
    """First byte of the block in the pack."""
    stored: int
    """Bytes of the block in the pack."""
    raw: int
    """Bytes of the block before the codec."""
    start: int
    """First byte of the piece in the raw block."""
    nbytes: int
    """Bytes of the piece."""
    codec: str | None
    """The codec as JSON, None for a block that is stored raw."""
    digest: bytes
    """Digest of the raw block."""
    checksum: int | None
    """xxh3-64 of the stored bytes, None without a codec."""
    cells: bytes
    """xxh3-64 of each 256 KiB cell of the raw block that the piece touches; empty with a codec."""
    base: BaseBlock | None = None
    """The base block if the block is stored as a difference; it always has a codec then."""

    @property
    def cells_begin(self) -> int:
        """Where the first of these cells begins in the raw block."""
        return self.start // CELL_BYTES * CELL_BYTES

    @property
    def cells_end(self) -> int:
        """Where the last of these cells ends in the raw block."""
        return min(self.raw, -(-(self.start + self.nbytes) // CELL_BYTES) * CELL_BYTES)

    @property
    def whole_read_bytes(self) -> int:
        """The stored bytes that a reader of the whole block reads: those of the block, and of its base."""
        return self.stored if self.base is None else self.stored + self.base.stored

    def base_row(self) -> Row | None:
        """Return the row with the base block in place of the block; None if the block is not a difference."""
        if (base := self.base) is None:
            return None
        return self._replace(
            pack=base.pack, position=base.position, stored=base.stored, codec=base.codec, digest=base.digest,
            checksum=base.checksum, cells=b"", base=None,
        )  # fmt: skip


BlockLocation = tuple[str, int, int, str | None, int | None, BaseBlock | None]
"""The location of a block: the columns pack, position, stored, codec and checksum, and its base."""


def rows_of_table(table: pa.Table, where: str) -> list[Row]:
    """Return the rows of a table with all columns; raise IntegrityError for an invalid pack or base. where: the manifest."""
    columns = {name: arrow_columns.python_values(table.column(name)) for name in table.column_names}
    _check_packs(columns["pack"], where)
    boxes = map(Box._make, zip(columns.pop("offset"), columns.pop("shape"), strict=True))
    made: Mapping[str, Iterable[Any]] = {**columns, "box": boxes, "base": bases_of_columns(columns, table.num_rows, where)}
    return list(map(Row._make, zip(*(made[name] for name in Row._fields), strict=True)))


def locations_of_table(table: pa.Table, where: str) -> Iterable[BlockLocation]:
    """Return the location of the block of each row. where: the manifest."""
    names = ("pack", "position", "stored", "codec", "checksum")
    present = [name for name in table.column_names if name in (*names, *manifest_parquet.BASE_COLUMNS)]
    columns = {name: arrow_columns.python_values(table.column(name)) for name in present}
    _check_packs(columns["pack"], where)
    bases = bases_of_columns(columns, table.num_rows, where)
    return zip(*(columns[name] for name in names), bases, strict=True)


def bases_of_columns(columns: Mapping[str, Iterable[Any]], row_count: int, where: str) -> Iterable[BaseBlock | None]:
    """Return the base of each row, None for a block in full; raise IntegrityError if one is invalid.

    columns: values by the name of the column; those of the bases may be missing. where: the manifest.
    """
    if "base_pack" not in columns:
        return itertools.repeat(None, row_count)
    _check_packs(columns["base_pack"], where)
    found: list[BaseBlock | None] = []
    for codec, *base in zip(columns["codec"], *(columns[name] for name in manifest_parquet.BASE_COLUMNS), strict=True):
        if base[0] is None:
            found.append(None)
            continue
        made = BaseBlock(*base)
        numbers: Sequence[object] = (made.position, made.stored, made.width, made.digest)
        if codec is None or None in numbers or min(made.position, made.stored) < 0 or made.width not in WIDTHS:
            raise IntegrityError(f"{where}: a difference has an invalid base; {DAMAGE_ADVICE}")
        found.append(made)
    return found


def _check_packs(names: Iterable[str | None], where: str) -> None:
    """Raise IntegrityError if one of these packs does not have the name of a file of a step."""
    for name in {*names} - {None}:
        try:
            step_of_file(name or "")
        except IntegrityError as error:
            raise IntegrityError(
                f"{where}: a block is in {(name or '')[:200]!r}, which is not a valid name of a file of a step; {DAMAGE_ADVICE}"
            ) from error
