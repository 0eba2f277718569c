"""Read blocks in parallel threads, verify and decode them, and copy their pieces to the targets of a load.

Blocks are read in the order of packs and positions. Each thread reads a contiguous part of them and announces its next reads to
the store: with this advice Linux fills its cache at the rate of the disk, which its own read-ahead often does not reach
(benchmarks/limits.py measures both). An uncompressed block with one contiguous destination is read directly into it, and hashed
in chunks while each chunk is in the processor's cache. Reads go through the page cache, so that a second load is a memory copy.
A block that one process reads once (`BlockRead.bypass_cache`) is read past the page cache into memory on huge pages, and hashed
and copied from there in chunks; chunks that the cache has are copied from it to where they belong.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from ckpt.block_io.chunked_copy import BlockSource, RangeSweep, copy_in_chunks
from ckpt.block_io.read_plan import BlockRead, CellRun, Destination, PieceCells, RowPiece, Target, destinations_of, plan_reads
from ckpt.block_io.read_threads import STREAM_THREADS, run_in_threads
from ckpt.block_io.replicated_store import copies_of, from_nearest
from ckpt.block_io.staging_arena import round_up
from ckpt.format import codec
from ckpt.format.digest import CELL_BYTES, checksum, digest, hasher
from ckpt.format.limits import BLOCK_BYTES, MAX_BLOCK_BYTES
from ckpt.format.manifest import Manifest, Row
from ckpt.state.leaves.base import Bytes, LeafPiece, is_limited_by_launches, write_pieces
from ckpt.storage.base.errors import CkptError, IntegrityError, NotFound, StoreError
from ckpt.storage.base.huge_pages import map_huge_pages
from ckpt.storage.base.store import Reader, Store

_CHUNK_BYTES = 1 << 20

_PREFETCH_BYTES = 16 << 20
"""How many bytes ahead of its reads each thread prefetches."""

T = TypeVar("T")

Progress = Callable[[int], None]
"""A function that is called with the number of stored bytes just read, from several threads."""


def read_leaves(
    store: Store, manifest: Manifest, targets: Sequence[Target], where: str, progress: Progress | None = None
) -> None:
    """Fill each target with its leaf or box; raise IntegrityError with file and leaf. where: the step, for messages."""
    read_blocks(store, manifest.digest_algorithm, plan_reads(manifest, targets, where), where, progress)


def read_blocks(store: Store, algorithm: str, read_plan: list[BlockRead], where: str, progress: Progress | None = None) -> None:
    """Read and verify blocks and copy their pieces to the targets; raise IntegrityError or StoreError for the first failure.

    read_plan: in the order of packs and positions. where: the step, for messages.
    """

    def work(job: Iterable[BlockRead]) -> None:
        BlockReader(store, algorithm, where, progress).run(job)

    streamed: list[BlockRead] = []
    if any(block.bypass_cache for block in read_plan) and copies_of(store)[0].past_cache:
        streamed = [block for block in read_plan if block.can_stream()]
    if streamed:
        run_in_threads(streamed, work, STREAM_THREADS)
        streamed_ids = {id(block) for block in streamed}
        read_plan = [block for block in read_plan if id(block) not in streamed_ids]
    run_in_threads(read_plan, work, 1 if _is_limited_by_launches(read_plan) else None)


def _is_limited_by_launches(read_plan: list[BlockRead]) -> bool:
    nbytes, pieces = sum(block.row.raw for block in read_plan), sum(len(block.pieces) for block in read_plan)
    return pieces > 0 and is_limited_by_launches(read_plan[0].pieces[0].leaf, nbytes, pieces)


class BlockReader:
    """The reader of one thread, with its open file and buffers. It reads the nearest good copy of each block."""

    def __init__(self, store: Store, algorithm: str, where: str, progress: Progress | None) -> None:
        self._all_copies = store
        self._store = copies_of(store)[0]
        self._missing: set[tuple[str, str]] = set()
        self._algorithm = algorithm
        self._where = where
        self._progress = progress
        self._stored_buffer = np.empty(0, np.uint8)
        self._raw_buffer = np.empty(0, np.uint8)
        self._opened: tuple[str, bool] | None = None
        self._reader: Reader | None = None

    def run(self, reads: Iterable[BlockRead]) -> None:
        """Read and verify each block and copy its pieces to their targets."""
        try:
            for block in self._prefetched(reads):
                self._with_nearest_copy(block, self._read_block)
        finally:
            self._close()

    def _prefetched(self, reads: Iterable[BlockRead]) -> Iterator[BlockRead]:
        """Yield the blocks, each after the next ones were announced to the store for its page cache."""
        waiting: deque[tuple[BlockRead, int]] = deque()
        nbytes = 0
        for block in reads:
            if not self._bypasses_cache(block):
                for begin, end in block.stored_ranges():
                    self._store.prefetch(block.row.pack or "", end - begin, block.row.position + begin)
            waiting.append((block, block.read_bytes()))
            nbytes += block.read_bytes()
            while nbytes > _PREFETCH_BYTES and len(waiting) > 1:
                first, size = waiting.popleft()
                nbytes -= size
                yield first
        yield from (block for block, _ in waiting)

    def verify(self, reads: Iterable[BlockRead]) -> None:
        """Read each block and check it and its cells; raise IntegrityError for the first bad one."""
        try:
            for block in reads:
                self._with_nearest_copy(block, self._verify_block)
                self._report_progress(block.row.stored)
        finally:
            self._close()

    def _verify_block(self, block: BlockRead) -> None:
        raw = self._read_decoded_block(block)
        for piece in block.pieces:
            if piece.row.cells:
                begin = piece.row.cells_begin
                self._check_cells(piece.row, raw[begin : piece.row.cells_end], begin)

    def _with_nearest_copy(self, block: BlockRead, work: Callable[[BlockRead], T]) -> T:
        def read(store: Store) -> T:
            if store is not self._store:
                self._close()
                self._store = store
            return work(block)

        return from_nearest(self._all_copies, read, block.row.pack or "", block.row.position, self._missing)

    # --- one block ---------------------------------------------------------------------------------------------

    def _read_block(self, block: BlockRead) -> None:
        if runs := block.cell_runs():
            for run in runs:
                self._read_run(block, run)
                self._report_progress(run.end - run.begin)
            return
        row = block.row
        destinations = block.destinations() if row.codec is None else None
        if destinations and self._bypasses_cache(block):
            self._stream_block(row, destinations, self._uncached_source(row))
        elif destinations and len(destinations) == 1 and len(destinations[0][2]) == row.raw:
            self._read_into_destination(row, destinations[0][2])
        else:
            self._copy_pieces(block.pieces, self._read_decoded_block(block))
        self._report_progress(row.stored)

    def _read_run(self, block: BlockRead, run: CellRun) -> None:
        pieces = [piece for _, _, piece in run.pieces]
        if self._bypasses_cache(block) and (destinations := destinations_of(pieces)):
            self._stream_cells(run, run.begin, run.end, destinations, self._uncached_source(block.row))
        else:
            self._copy_pieces(pieces, self._read_cells(block, run.begin, run.end), run.begin)

    def fetch(self, block: BlockRead, begin: int, end: int, out: Bytes) -> None:
        """Read bytes [begin, end) of the raw block, verified and decoded, into `out`.

        The range is the whole block or cells of one of its cell runs.
        """
        row = block.row
        is_all = end - begin == row.raw

        def read(block: BlockRead) -> None:
            if row.codec is not None or not self._bypasses_cache(block):
                out[:] = self._read_decoded_block(block) if is_all else self._read_cells(block, begin, end)
            elif is_all:
                self._stream_block(row, [(0, end, out)], self._uncached_source(row))
            else:
                self._stream_cells(block.run_at(begin), begin, end, [(begin, end, out)], self._uncached_source(row))

        try:
            self._with_nearest_copy(block, read)
            self._report_progress(row.stored if is_all else end - begin)
        finally:
            self._close()

    def accept(self, block: BlockRead, begin: int, data: Bytes) -> None:
        """Verify bytes of the raw block, some of which other ranks have read, and copy its pieces to their targets.

        begin: the position of `data` in the raw block. `data` is the whole block or cells of one of its cell runs.
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
        run = block.run_at(begin)
        pieces = [piece for _, _, piece in run.pieces]
        if destinations := destinations_of(pieces):
            self._stream_cells(run, begin, end, destinations, received)
        else:
            self._check_run(run.pieces, data, begin)
            self._copy_pieces(pieces, data, begin)

    def _copy_pieces(self, pieces: Iterable[RowPiece], data: Bytes, begin: int = 0) -> None:
        """Copy pieces to their targets. data: bytes of the raw block from `begin` on."""
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

    def _stream_block(self, row: Row, destinations: list[Destination], source: BlockSource) -> None:
        """Copy a whole raw block from `source` to its destinations and verify it by its digest."""
        block_hash = hasher(self._algorithm)
        copy_in_chunks(0, row.raw, destinations, source, lambda data, begin: block_hash.update(data))
        if block_hash.digest() != row.digest:
            raise self._damage_error(row, "digest")

    def _stream_cells(self, run: CellRun, begin: int, end: int, destinations: list[Destination], source: BlockSource) -> None:
        """Copy the cells [begin, end) of a run from `source` to the destinations and verify each by its checksum."""
        sweep = RangeSweep(run.pieces)
        copy_in_chunks(
            begin, end, destinations, source,
            lambda data, begin: self._check_run(sweep.advance_to(begin + len(data)), data, begin),
        )  # fmt: skip

    def _uncached_source(self, row: Row) -> BlockSource:
        """Return a source of an uncompressed block's bytes.

        It reads past the page cache into this reader's buffer. Bytes that the page cache has are copied to `target` at once.
        """

        def source(begin: int, end: int, target: Bytes | None) -> Bytes:
            position = row.position + begin
            if target is None or not self._is_cached(row, position):
                return self._read(row, position, end - begin, True)
            self._read_at(row, position, target.data, end - begin, True)
            return target

        return source

    def _read_into_destination(self, row: Row, destination: Bytes) -> None:
        block_hash = hasher(self._algorithm)
        view = destination.data
        for start in range(0, len(view), _CHUNK_BYTES):
            chunk = view[start : start + _CHUNK_BYTES]
            self._read_at(row, row.position + start, chunk, len(chunk))
            block_hash.update(chunk)
        if block_hash.digest() != row.digest:
            raise self._damage_error(row, "digest")

    def _read_decoded_block(self, block: BlockRead) -> Bytes:
        """Return the whole raw block, verified and decoded, in this reader's buffer."""
        row = block.row
        if max(row.raw, row.stored) > MAX_BLOCK_BYTES:
            raise IntegrityError(
                f"leaf {row.leaf} of {self._where}: the manifest states a block of {max(row.raw, row.stored)} bytes, and "
                f"blocks have at most {MAX_BLOCK_BYTES}; restore the manifest or load another step"
            )
        raw = stored = self._read(row, row.position, row.stored, self._bypasses_cache(block))
        if row.codec is not None:
            if checksum(stored) != row.checksum:
                raise self._damage_error(row, "checksum")
            self._raw_buffer = _grown(self._raw_buffer, row.raw)
            raw = self._raw_buffer[: row.raw]
            try:
                codec.decode(row.codec, stored.data, raw)
            except IntegrityError as error:
                raise self._damage_error(row, f"codec ({error})") from error
            except (CkptError, MemoryError, ImportError):
                raise
            except Exception as error:  # codecs raise errors of any type
                raise self._damage_error(row, f"codec ({error})") from error
        if len(raw) != row.raw or digest(self._algorithm, raw) != row.digest:
            raise self._damage_error(row, "digest")
        return raw

    def _read_cells(self, block: BlockRead, begin: int, end: int) -> Bytes:
        """Return cells of an uncompressed block, verified, in this reader's buffer; each must contain a part of a piece."""
        cells = self._read(block.row, block.row.position + begin, end - begin, self._bypasses_cache(block))
        self._check_run(block.run_at(begin).pieces, cells, begin)
        return cells

    def _check_run(self, pieces: Iterable[PieceCells], cells: Bytes, begin: int) -> None:
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
                raise self._damage_error(row, f"cell {i}")

    def _bypasses_cache(self, block: BlockRead) -> bool:
        return block.bypass_cache and self._store.past_cache

    # --- bytes -------------------------------------------------------------------------------------------------

    def _read(self, row: Row, position: int, nbytes: int, bypass_cache: bool) -> Bytes:
        """Return `nbytes` bytes from `position` on, in this reader's buffer."""
        self._stored_buffer = _grown(self._stored_buffer, round_up(nbytes))
        self._read_at(
            row, position, self._stored_buffer[: round_up(nbytes) if bypass_cache else nbytes].data, nbytes, bypass_cache
        )
        return self._stored_buffer[:nbytes]

    def _read_at(self, row: Row, position: int, buffer: memoryview, min_bytes: int, bypass_cache: bool = False) -> None:
        """Fill `buffer` from `position` on; raise IntegrityError if the file is missing or has less than `min_bytes` there."""
        with self._damage_named(row, position):
            count = self._reader_of(row, bypass_cache).read_into(position, buffer)
        if count < min_bytes:
            raise IntegrityError(
                f"leaf {row.leaf} of {self._where}: {self._store.url}/{row.pack or ''} ends at byte {position + count}, "
                f"{min_bytes - count} bytes early; restore it or load another step"
            )

    def _is_cached(self, row: Row, position: int) -> bool:
        with self._damage_named(row, position):
            return self._reader_of(row, True).is_cached(position)

    @contextmanager
    def _damage_named(self, row: Row, position: int) -> Iterator[None]:
        """Raise IntegrityError where a file is missing or the device cannot read it."""
        name = row.pack or ""
        try:
            yield
        except NotFound as error:
            raise IntegrityError(
                f"leaf {row.leaf} of {self._where}: {self._store.url}/{name} is missing; restore it or load another step"
            ) from error
        except StoreError as error:
            if not is_bad_sector(error):
                raise
            raise IntegrityError(
                f"leaf {row.leaf} of {self._where}: {self._store.url}/{name} cannot be read at byte {position}: the device "
                "reports an I/O error; check the disk, and load another step"
            ) from error

    def _reader_of(self, row: Row, bypass_cache: bool) -> Reader:
        """Return the open file of a block."""
        name = row.pack or ""
        if self._reader is None or self._opened != (name, bypass_cache):
            self._close()
            self._reader = self._store.open_once(name) if bypass_cache else self._store.open(name)
            self._opened = name, bypass_cache
        return self._reader

    def _damage_error(self, row: Row, what: str) -> IntegrityError:
        return IntegrityError(
            f"leaf {row.leaf} of {self._where}: {self._store.url}/{row.pack}, block at byte {row.position}, does not "
            f"match its {what}; restore the file or load another step"
        )

    def _report_progress(self, nbytes: int) -> None:
        if self._progress is not None:
            self._progress(nbytes)

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def is_bad_sector(error: StoreError) -> bool:
    """Return whether the device could not read the bytes (EIO). That is damage, unlike a store that cannot be reached."""
    return getattr(error.__cause__, "errno", None) == errno.EIO


def _grown(buffer: Bytes, nbytes: int) -> Bytes:
    return buffer if len(buffer) >= nbytes else np.frombuffer(map_huge_pages(max(nbytes, BLOCK_BYTES)), np.uint8)
