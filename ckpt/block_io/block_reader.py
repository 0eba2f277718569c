"""Read blocks in parallel threads, verify and decode them, and copy their pieces to the targets of a load.

Blocks are read in the order of packs and positions. There are two ways:

- Through the page cache, so that a second load is a memory copy. Each thread reads a contiguous part of the blocks, so that the
  read-ahead of Linux loads whole blocks. It announces the other blocks to the store, which prefetches them. An uncompressed
  block with one contiguous destination is read directly into it, and hashed in chunks while each chunk is in the processor's
  cache.
- Under a tuner (`tuned_read_threads.py`), which decides how many requests run at a time and how long they are: blocks from a
  network, and blocks that one process reads, and only once. The latter bypass the page cache (`BlockRead.bypass_cache`). All
  threads take the next block from one queue. The bytes are read into memory on huge pages, and hashed and copied from there in
  chunks. Chunks that the page cache has are copied from it to their destinations.

Before a difference is read, a second BlockReader reads and verifies its base, so that an error names the file that is damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Self

import numpy as np

from ckpt.block_io.chunked_copy import CHUNK_BYTES, RangeSweep, ReadRange, copy_in_chunks
from ckpt.block_io.copy_slots import small_copy_slots
from ckpt.block_io.pack_reader import PackReader, grown
from ckpt.block_io.read_plan import BlockRead, CellSpan, Destination, PieceCells, RowPiece, Target, destinations_of, plan_reads
from ckpt.block_io.replicated_store import copies_of, from_nearest
from ckpt.block_io.tuned_read_threads import ReadKind, read_kind, run_reads
from ckpt.errors import DAMAGE_ADVICE, FormatError
from ckpt.format import block_difference, codec
from ckpt.format.digest import CELL_BYTES, checksum, digest, hasher
from ckpt.format.limits import MAX_BLOCK_BYTES
from ckpt.format.manifest import Manifest, Row
from ckpt.state.leaves.base import Bytes, LeafPiece, is_limited_by_launches, write_pieces
from ckpt.storage.base.errors import CkptError, IntegrityError, is_transient
from ckpt.storage.base.store import ByteProgress, Store

_CACHED_READ_BYTES = 1 << 20
"""Bytes that are read through the page cache and hashed at once."""

_SMALL_PIECE_BYTES = 64 << 10
"""Pieces of fewer bytes on average are copied by one thread at a time."""


def read_leaves(
    store: Store, manifest: Manifest, targets: Sequence[Target], where: str, progress: ByteProgress | None = None
) -> None:
    """Fill each target with its leaf or box; raise IntegrityError with file and leaf. where: the step, for messages."""
    read_blocks(store, manifest.digest_algorithm, plan_reads(manifest, targets, where), where, progress)


def read_blocks(
    store: Store, algorithm: str, read_plan: list[BlockRead], where: str, progress: ByteProgress | None = None
) -> None:
    """Read and verify blocks and copy their pieces to the targets; raise IntegrityError or StoreError for the first failure.

    read_plan: in the order of packs and positions. where: the step, for messages.
    """
    by_kind: dict[ReadKind | None, list[BlockRead]] = {"streamed": [], "whole": [], None: []}
    for block in read_plan:
        by_kind[read_kind(store, block)].append(block)
    for kind, blocks in by_kind.items():

        def work(job: Iterable[BlockRead], kind: ReadKind | None = kind) -> None:
            BlockReader(store, algorithm, where, progress, kind).read_all(job)

        run_reads(store, kind, blocks, work, in_one_thread=_is_limited_by_launches(blocks))


def _is_limited_by_launches(read_plan: list[BlockRead]) -> bool:
    nbytes, pieces = sum(block.row.raw for block in read_plan), sum(len(block.pieces) for block in read_plan)
    return pieces > 0 and is_limited_by_launches(read_plan[0].pieces[0].leaf, nbytes, pieces)


class BlockReader:
    """The reader of one thread, with its open file and buffers. It reads the nearest good copy of each block."""

    def __init__(
        self, store: Store, algorithm: str, where: str, progress: ByteProgress | None, kind: ReadKind | None = None
    ) -> None:
        """kind: how a tuner counts the reads of all blocks; None if no tuner controls them."""
        self._all_copies = store
        self._pack_reader = PackReader(copies_of(store)[0], where, kind)
        self._is_tuned = kind is not None
        self._missing: set[tuple[str, str]] = set()
        """URL and name of the copies that do not exist."""
        self._algorithm = algorithm
        self._where = where
        self._progress = progress
        self._raw_buffer = np.empty(0, np.uint8)
        self._base_reader: BlockReader | None = None
        self._base: Bytes | None = None
        """The raw base of the difference that is being read."""

    def __enter__(self) -> Self:
        self._pack_reader.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._pack_reader.end()
        self.close()

    def close(self) -> None:
        """Close the open files. The reader can be used again."""
        self._pack_reader.close_file()
        if self._base_reader is not None:
            self._base_reader.close()

    def read_all(self, reads: Iterable[BlockRead]) -> None:
        """Read and verify each block and copy its pieces to their targets."""
        with self:
            for block in reads if self._is_tuned else self._pack_reader.prefetched(reads):
                self._read_nearest_copy(block, block.stored_ranges()[0][0], self._read_block)

    def verify(self, reads: Iterable[BlockRead]) -> None:
        """Read each block and check it and its cells; raise IntegrityError for the first bad one."""
        with self:
            for block in reads:
                self._read_nearest_copy(block, 0, self._verify_block)
                self._report_progress(block.row.whole_read_bytes)

    def _verify_block(self, block: BlockRead) -> None:
        raw = self._read_decoded_block(block)
        for piece in block.pieces:
            if piece.row.cells:
                begin = piece.row.cells_begin
                self._check_cells(piece.row, raw[begin : piece.row.cells_end], begin)

    def _read_nearest_copy(self, block: BlockRead, first: int, read: Callable[[BlockRead], object]) -> None:
        """Call `read`, with the nearest store that has a good copy. first: the first byte of the stored block that it reads."""
        self._base = self._read_base(block)

        def read_from(store: Store) -> None:
            if store is not self._pack_reader.store:
                self._pack_reader.use(store)
            self._pack_reader.call_with_copy_slot(block, first, read)

        from_nearest(self._all_copies, read_from, block.row.pack or "", block.row.position, self._missing)

    def _read_base(self, block: BlockRead) -> Bytes | None:
        """Return the raw base of a difference, verified, from the nearest good copy of the base; None for a block in full."""
        if (row := block.row.base_row()) is None:
            return None
        if self._base_reader is None:
            self._base_reader = BlockReader(self._all_copies, self._algorithm, f"{self._where}, base of a difference", None)
        return self._base_reader.read_whole(BlockRead(row, bypass_cache=block.bypass_cache))

    def read_whole(self, block: BlockRead) -> Bytes:
        """Return the whole raw block, verified and decoded, in this reader's buffer. The caller closes the reader."""
        found: list[Bytes] = []
        self._read_nearest_copy(block, 0, lambda block: found.append(self._read_decoded_block(block)))
        return found[-1]

    # --- one block ---------------------------------------------------------------------------------------------

    def _read_block(self, block: BlockRead) -> None:
        if spans := block.cell_spans():
            for span in spans:
                self._read_span(block, span)
                self._report_progress(span.end - span.begin)
            return
        row = block.row
        destinations = block.destinations() if row.codec is None else None
        if destinations and (chunk_bytes := self._pack_reader.chunk_bytes):
            self._stream_block(row, destinations, self._pack_reader.source(block), chunk_bytes)
        elif destinations and len(destinations) == 1 and len(destinations[0].memory) == row.raw:
            self._read_into_destination(block, destinations[0].memory)
        else:
            self._copy_pieces(block.pieces, self._read_decoded_block(block))
        self._report_progress(row.whole_read_bytes)

    def _read_span(self, block: BlockRead, span: CellSpan) -> None:
        pieces = [each.piece for each in span.pieces]
        if (chunk_bytes := self._pack_reader.chunk_bytes) and (destinations := destinations_of(pieces)):
            source = self._pack_reader.source(block)
            self._stream_cells(span, span.begin, span.end, destinations, source, chunk_bytes)
        else:
            self._copy_pieces(pieces, self._read_cells(block, span.begin, span.end), span.begin)

    def fetch(self, block: BlockRead, begin: int, end: int, out: Bytes) -> None:
        """Read bytes [begin, end) of the raw block, verified and decoded, into `out`.

        The range is the whole block or cells of one of its spans. The open files are closed afterwards.
        """
        row = block.row
        is_all = end - begin == row.raw

        def read(block: BlockRead) -> None:
            chunk_bytes = self._pack_reader.chunk_bytes
            if row.codec is not None or chunk_bytes is None:
                out[:] = self._read_decoded_block(block) if is_all else self._read_cells(block, begin, end)
            elif is_all:
                self._stream_block(row, [Destination(0, end, out)], self._pack_reader.source(block), chunk_bytes)
            else:
                source = self._pack_reader.source(block)
                self._stream_cells(block.span_at(begin), begin, end, [Destination(begin, end, out)], source, chunk_bytes)

        try:
            self._read_nearest_copy(block, 0 if is_all else begin, read)
            self._report_progress(row.whole_read_bytes if is_all else end - begin)
        finally:
            self.close()

    def accept(self, block: BlockRead, begin: int, data: Bytes) -> None:
        """Verify bytes of the raw block, some of which other ranks have read, and copy its pieces to their targets.

        begin: the position of `data` in the raw block. `data` is the whole block or cells of one of its spans.
        """
        row = block.row
        end = begin + len(data)

        def received(first: int, last: int, _: Bytes | None) -> Bytes:
            return data[first - begin : last - begin]

        if len(data) == row.raw:
            if destinations := block.destinations():
                self._stream_block(row, destinations, received)
            elif digest(self._algorithm, data) != row.digest:
                raise self._damage_error(row, "digest")
            else:
                self._copy_pieces(block.pieces, data)
            return
        span = block.span_at(begin)
        pieces = [each.piece for each in span.pieces]
        if destinations := destinations_of(pieces):
            self._stream_cells(span, begin, end, destinations, received)
        else:
            self._check_span(span.pieces, data, begin)
            self._copy_pieces(pieces, data, begin)

    def _copy_pieces(self, pieces: Iterable[RowPiece], data: Bytes, begin: int = 0) -> None:
        """Copy pieces to their targets. data: bytes of the raw block from `begin` on."""
        pieces = list(pieces)
        with small_copy_slots.slot() if len(data) < _SMALL_PIECE_BYTES * len(pieces) else nullcontext():
            self._copy_listed_pieces(pieces, data, begin)

    def _copy_listed_pieces(self, pieces: list[RowPiece], data: Bytes, begin: int) -> None:
        to_write = []
        for piece in pieces:
            if (destination := piece.destination()) is not None:
                first, last, memory = destination
                memory[:] = data[first - begin : last - begin]
                continue
            row, leaf, box, at = piece
            if box is row.box:
                part = data[row.start - begin : row.start - begin + row.nbytes]
            else:
                first, last = piece.raw_range()
                part = piece.elements(data[first - begin : last - begin])
            to_write.append(LeafPiece(leaf, at, part))
        write_pieces(to_write)

    def _stream_block(
        self, row: Row, destinations: list[Destination], source: ReadRange, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        """Copy a whole raw block from `source` to its destinations and verify it by its digest."""
        block_hash = hasher(self._algorithm)
        copy_in_chunks(0, row.raw, destinations, source, lambda data, begin: block_hash.update(data), chunk_bytes)
        if block_hash.digest() != row.digest:
            raise self._damage_error(row, "digest")

    def _stream_cells(
        self, span: CellSpan, begin: int, end: int, destinations: list[Destination], source: ReadRange,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:  # fmt: skip
        """Copy the cells [begin, end) of a span from `source` to the destinations and verify each by its checksum."""
        sweep = RangeSweep(span.pieces)
        copy_in_chunks(
            begin, end, destinations, source,
            lambda data, begin: self._check_span(sweep.advance_to(begin + len(data)), data, begin), chunk_bytes,
        )  # fmt: skip

    def _read_into_destination(self, block: BlockRead, destination: Bytes) -> None:
        row = block.row
        block_hash = hasher(self._algorithm)
        view = destination.data
        for start in range(0, len(view), _CACHED_READ_BYTES):
            chunk = view[start : start + _CACHED_READ_BYTES]
            self._pack_reader.read_into(block, start, chunk, len(chunk))
            block_hash.update(chunk)
        if block_hash.digest() != row.digest:
            raise self._damage_error(row, "digest")

    def _read_decoded_block(self, block: BlockRead) -> Bytes:
        """Return the whole raw block, verified and decoded, in this reader's buffer."""
        row = block.row
        if max(row.raw, row.stored) > MAX_BLOCK_BYTES:
            raise IntegrityError(
                f"leaf {row.leaf} of {self._where}: the manifest states a block of {max(row.raw, row.stored)} bytes, and "
                f"blocks have at most {MAX_BLOCK_BYTES}; {DAMAGE_ADVICE}"
            )
        raw = stored = self._pack_reader.read(block, 0, row.stored)
        if row.codec is not None:
            if checksum(stored) != row.checksum:
                raise self._damage_error(row, "checksum")
            self._raw_buffer = grown(self._raw_buffer, row.raw)
            raw = self._raw_buffer[: row.raw]
            try:
                codec.decode(row.codec, stored.data, raw)
                if row.base is not None and self._base is not None:
                    block_difference.add(self._base, raw, row.base.width, raw)
            except IntegrityError as error:
                raise self._damage_error(row, f"codec ({error})") from error
            except FormatError as error:  # a newer version may have written it
                raise FormatError(
                    f"leaf {row.leaf} of {self._where} can't be decoded ({error}): install a newer ckpt-store, or load "
                    "another step"
                ) from error
            except (CkptError, ImportError):
                raise
            except Exception as error:  # codecs raise errors of any type
                if is_transient(error):
                    raise
                raise self._damage_error(row, f"codec ({error})") from error
        if len(raw) != row.raw or digest(self._algorithm, raw) != row.digest:
            raise self._damage_error(row, "digest")
        return raw

    def _read_cells(self, block: BlockRead, begin: int, end: int) -> Bytes:
        """Return cells of an uncompressed block, verified, in this reader's buffer; each must contain a part of a piece."""
        cells = self._pack_reader.read(block, begin, end)
        self._check_span(block.span_at(begin).pieces, cells, begin)
        return cells

    def _check_span(self, pieces: Iterable[PieceCells], cells: Bytes, begin: int) -> None:
        """Verify the cells of a raw block from byte `begin` on, by the checksums in the rows of their pieces."""
        end, checked = begin + len(cells), begin
        for first, last, piece in pieces:
            if (upto := min(last, end)) > checked >= first:
                self._check_cells(piece.row, cells[checked - begin : upto - begin], checked)
                checked = upto
        assert checked == end  # otherwise unverified bytes would be returned

    def _check_cells(self, row: Row, data: Bytes, begin: int) -> None:
        """Verify the cells of a raw block from byte `begin` on; the row has bytes in each of them."""
        first_cell = (begin - row.cells_begin) // CELL_BYTES
        for i, start in enumerate(range(0, len(data), CELL_BYTES), first_cell):
            if checksum(data[start : start + CELL_BYTES]).to_bytes(8, "little") != row.cells[8 * i : 8 * i + 8]:
                raise self._damage_error(row, f"checksum of cell {row.cells_begin // CELL_BYTES + i}")

    def _damage_error(self, row: Row, what: str) -> IntegrityError:
        return IntegrityError(
            f"leaf {row.leaf} of {self._where}: {self._pack_reader.store.url}/{row.pack}, block at byte {row.position}, does "
            f"not match its {what}; {DAMAGE_ADVICE}"
        )

    def _report_progress(self, nbytes: int) -> None:
        if self._progress is not None:
            self._progress(nbytes)
