"""From rows to arrays: ranges, parallel reads, verification, decoding, into the destination.

Blocks are read in the order in which they lie. Each thread takes a contiguous part of them, and tells the store what comes
next: told so, Linux fills its cache at the rate of the disk, and often not by its own read-ahead (benchmarks/limits.py has
both). An uncompressed block that goes to one contiguous place is read straight into it, and summed chunk by chunk while the
chunk is still in the processor's cache. Reads go through the page cache: a second load is a memory copy. What is read once, by
one process (`Wanted.once`), is read past it into memory on huge pages, and summed and copied from there chunk by chunk.
"""

from __future__ import annotations

import errno
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

from ckpt import codec
from ckpt.arena import round_up
from ckpt.digest import CELL_BYTES, checksum, digest, hasher
from ckpt.dtypes import numpy_dtype
from ckpt.leaves.base import ArrayLeaf, Bytes
from ckpt.limits import BLOCK_BYTES, LARGEST_BLOCK
from ckpt.manifest import Manifest, Row
from ckpt.places import copies_of, from_nearest
from ckpt.quiet import collector_paused, processors
from ckpt.shard import Box, contiguous_start
from ckpt.storage.base import Reader, Store
from ckpt.storage.errors import CkptError, IntegrityError, NotFound, StoreError
from ckpt.storage.pages import pages
from ckpt.wanted import Cells, Piece, Place, Run, Target, Wanted, places_of, wanted_blocks

READ_THREADS = 3
"""At most. Through the page cache no more than there are cores, since that copies; past it a thread mostly waits."""

STREAMS = 16
"""Threads that read past the page cache chunk by chunk, at most, of all ranks of a host together where they read for each
other: each waits for one small read, and holds little memory."""

_CHUNK = 1 << 20

_STREAMED = 2 * CELL_BYTES
"""A chunk past the page cache: small, so that what is summed and copied is still in the processor's cache."""

_AHEAD_BYTES = 16 << 20
"""How far before each thread the store is told what comes."""

T = TypeVar("T")

Progress = Callable[[int], None]
"""Called with the number of stored bytes just done, from several threads."""

Source = Callable[[int, int], Bytes]
"""Bytes of a raw block, from and to, until it is asked again."""


def read_leaves(
    store: Store, manifest: Manifest, targets: Sequence[Target], where: str, progress: Progress | None = None
) -> None:
    """Fill each target with its leaf or box. Raises IntegrityError with file and leaf."""
    read_blocks(store, manifest.digest_algorithm, wanted_blocks(manifest, targets, where), where, progress)


def read_blocks(store: Store, algorithm: str, order: list[Wanted], where: str, progress: Progress | None = None) -> None:
    """Read blocks that lie in this order, each into its place."""

    def work(job: Iterable[Wanted]) -> None:
        Worker(store, algorithm, where, progress).run(job)

    streamed: list[Wanted] = []
    if any(block.once for block in order) and copies_of(store)[0].past_cache:
        streamed = [block for block in order if block.is_streamed()]
    if streamed:
        _each(streamed, work, STREAMS)
        known = {id(block) for block in streamed}
        order = [block for block in order if id(block) not in known]
    _each(order, work)


def verify_blocks(store: Store, manifest: Manifest, where: str, progress: Progress | None = None) -> int:
    """Read every block, check it as stored and as decoded; return the bytes read."""
    done = 0
    for rows in manifest.in_pack_order():
        with collector_paused():
            blocks: dict[tuple[str | None, int], Wanted] = {}
            for row in rows:
                if (block := blocks.get((row.pack, row.position))) is None:
                    block = blocks[row.pack, row.position] = Wanted(row, once=True)
                block.pieces.append(Piece(row, _NOWHERE, row.box, row.box))
        order = list(blocks.values())
        _each(order, lambda job: Worker(store, manifest.digest_algorithm, where, progress).verify(job))
        done += sum(block.row.stored for block in order)
    return done


def bad_blocks(
    store: Store, algorithm: str, rows: Iterable[Row], where: str, progress: Progress | None = None
) -> list[tuple[Row, IntegrityError]]:
    """Read the block of each row and check it as stored and as decoded; return those that are bad, and why."""
    bad: list[tuple[Row, IntegrityError]] = []

    def work(job: Iterable[Wanted]) -> None:
        worker = Worker(store, algorithm, where, progress)
        for block in job:
            try:
                worker.verify([block])
            except IntegrityError as error:
                bad.append((block.row, error))

    _each([Wanted(row, once=True) for row in rows], work)
    return bad


def _each(order: list[Wanted], work: Callable[[Iterable[Wanted]], None], most: int | None = None) -> None:
    """Run `work` on contiguous parts of about equal bytes, one a thread; the first error ends all."""
    total = sum(w.row.stored for w in order)
    if most is None:
        most = READ_THREADS if any(w.once for w in order) else min(READ_THREADS, processors())
    threads = max(1, min(most, len(order), total // (16 << 20)))
    if threads == 1:
        work(order)
        return
    parts: list[list[Wanted]] = [[] for _ in range(threads)]
    done = 0
    for block in order:
        parts[min(threads - 1, done * threads // total)].append(block)
        done += block.row.stored
    stop = threading.Event()
    errors: list[BaseException] = []

    def run(part: list[Wanted]) -> None:
        try:
            work(_until(part, stop))
        except BaseException as error:
            errors.append(error)
            stop.set()

    workers = [threading.Thread(target=run, args=(p,), name="ckpt-read") for p in parts[1:]]
    for worker in workers:
        worker.start()
    run(parts[0])
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]


def _until(part: list[Wanted], stop: threading.Event) -> Iterator[Wanted]:
    for block in part:
        if stop.is_set():
            return
        yield block


class Worker:
    """One thread's reading: its open file and its buffers. Where there are several copies of a block, the nearest good one."""

    def __init__(self, store: Store, algorithm: str, where: str, progress: Progress | None) -> None:
        self._all = store
        self._store = copies_of(store)[0]
        self._absent: set[tuple[str, str]] = set()
        self._algorithm = algorithm
        self._where = where
        self._progress = progress
        self._stored = np.empty(0, np.uint8)
        self._raw = np.empty(0, np.uint8)
        self._open: tuple[str, bool] | None = None
        self._reader: Reader | None = None

    def run(self, order: Iterable[Wanted]) -> None:
        """Read each block and put its pieces where they belong."""
        try:
            for block in self._told_ahead(order):
                self._from_nearest(block, self._block)
        finally:
            self._close()

    def _told_ahead(self, order: Iterable[Wanted]) -> Iterator[Wanted]:
        """The blocks, each while the store brings the next ones into the page cache."""
        waiting: deque[tuple[Wanted, int]] = deque()
        nbytes = 0
        for block in order:
            if not self._past_cache(block):
                for begin, end in block.stored():
                    self._store.prefetch(block.row.pack or "", end - begin, block.row.position + begin)
            waiting.append((block, block.to_read()))
            nbytes += block.to_read()
            while nbytes > _AHEAD_BYTES and len(waiting) > 1:
                first, size = waiting.popleft()
                nbytes -= size
                yield first
        yield from (block for block, _ in waiting)

    def verify(self, order: Iterable[Wanted]) -> None:
        """Read each block and check it, cells included."""
        try:
            for block in order:
                self._from_nearest(block, self._checked)
                self._report(block.row.stored)
        finally:
            self._close()

    def _checked(self, block: Wanted) -> None:
        raw = self._whole(block)
        for piece in block.pieces:
            if piece.row.cells:
                begin = _cells_begin(piece.row)
                self._check_cells(piece.row, raw[begin : _cells_end(piece.row)], begin)

    def _from_nearest(self, block: Wanted, work: Callable[[Wanted], T]) -> T:
        def read(store: Store) -> T:
            if store is not self._store:
                self._close()
                self._store = store
            return work(block)

        return from_nearest(self._all, read, block.row.pack or "", block.row.position, self._absent)

    # --- one block ---------------------------------------------------------------------------------------------

    def _block(self, block: Wanted) -> None:
        if runs := block.runs():
            for run in runs:
                self._run(block, run)
                self._report(run.end - run.begin)
            return
        row = block.row
        places = block.places() if row.codec is None else None
        if places and self._past_cache(block):
            self._flow_all(row, places, self._past(row))
        elif places and len(places) == 1 and len(places[0][2]) == row.raw:
            self._straight(row, places[0][2])
        else:
            self._place(block.pieces, self._whole(block))
        self._report(row.stored)

    def _run(self, block: Wanted, run: Run) -> None:
        pieces = [piece for _, _, piece in run.pieces]
        if self._past_cache(block) and (places := places_of(pieces)):
            self._flow(run, run.begin, run.end, places, self._past(block.row))
        else:
            self._place(pieces, self._cells(block, run.begin, run.end), run.begin)

    def fetch(self, block: Wanted, begin: int, end: int, out: Bytes) -> None:
        """Read a stretch of a block, verified and decoded, into `out`: all of it, or some of the wanted cells."""
        row = block.row
        is_all = end - begin == row.raw

        def read(block: Wanted) -> None:
            if row.codec is not None or not self._past_cache(block):
                out[:] = self._whole(block) if is_all else self._cells(block, begin, end)
            elif is_all:
                self._flow_all(row, [(0, end, out)], self._past(row))
            else:
                self._flow(block.run_at(begin), begin, end, [(begin, end, out)], self._past(row))

        try:
            self._from_nearest(block, read)
            self._report(row.stored if is_all else end - begin)
        finally:
            self._close()

    def accept(self, block: Wanted, begin: int, data: Bytes) -> None:
        """Check a stretch of a block that is wanted, of which other ranks have read some, and put it where it belongs."""
        row = block.row
        end = begin + len(data)

        def handed(first: int, last: int) -> Bytes:
            return data[first - begin : last - begin]

        if len(data) == row.raw:
            if places := block.places():
                self._flow_all(row, places, handed)
            elif digest(self._algorithm, data) != row.digest:
                raise self._damaged(row, "digest")
            else:
                self._place(block.pieces, data)
            return
        run = block.run_at(begin)
        pieces = [piece for _, _, piece in run.pieces]
        if places := places_of(pieces):
            self._flow(run, begin, end, places, handed)
        else:
            self._check_run(run.pieces, data, begin)
            self._place(pieces, data, begin)

    def _place(self, pieces: Iterable[Piece], data: Bytes, begin: int = 0) -> None:
        """Put pieces of a block where they belong, out of its bytes from `begin` on."""
        for piece in pieces:
            if (place := piece.place()) is not None:
                first, last, memory = place
                memory[:] = data[first - begin : last - begin]
                continue
            row, leaf, box, at = piece
            if box is row.box:
                leaf.write(at, data[row.start - begin : row.start - begin + row.nbytes])
            else:
                first, last = piece.span()
                leaf.write(at, _rows_of_span(data[first - begin : last - begin], box, row, numpy_dtype(row.dtype).itemsize))

    def _flow_all(self, row: Row, places: list[Place], source: Source) -> None:
        """Fill memory with all of a raw block, verified."""
        whole = hasher(self._algorithm)
        _chunk_by_chunk(0, row.raw, places, source, lambda data, begin: whole.update(data))
        if whole.digest() != row.digest:
            raise self._damaged(row, "digest")

    def _flow(self, run: Run, begin: int, end: int, places: list[Place], source: Source) -> None:
        """Fill memory with cells of a raw block, verified, that lie in a run."""
        along = Along(run.pieces)
        _chunk_by_chunk(
            begin, end, places, source,
            lambda data, begin: self._check_run(along.before(begin + len(data)), data, begin),
        )  # fmt: skip

    def _past(self, row: Row) -> Source:
        """Bytes of an uncompressed block, read past the page cache into this worker's buffer."""
        return lambda begin, end: self._read(row, row.position + begin, end - begin, True)

    def _straight(self, row: Row, place: Bytes) -> None:
        whole_hash = hasher(self._algorithm)
        view = place.data
        for start in range(0, len(view), _CHUNK):
            chunk = view[start : start + _CHUNK]
            self._fill(row, row.position + start, chunk, len(chunk))
            whole_hash.update(chunk)
        if whole_hash.digest() != row.digest:
            raise self._damaged(row, "digest")

    def _whole(self, block: Wanted) -> Bytes:
        """All of a block, verified and decoded, in this worker's buffer."""
        row = block.row
        if max(row.raw, row.stored) > LARGEST_BLOCK:
            raise IntegrityError(
                f"leaf {row.leaf} of {self._where}: the manifest states a block of {max(row.raw, row.stored)} bytes, and "
                f"blocks have at most {LARGEST_BLOCK}; restore the manifest or load another step"
            )
        raw = stored = self._read(row, row.position, row.stored, self._past_cache(block))
        if row.codec is not None:
            if checksum(stored) != row.checksum:
                raise self._damaged(row, "checksum")
            self._raw = _at_least(self._raw, row.raw)
            raw = self._raw[: row.raw]
            try:
                codec.decode(row.codec, stored.data, raw)
            except IntegrityError as error:
                raise self._damaged(row, f"codec ({error})") from error
            except (CkptError, MemoryError, ImportError):
                raise
            except Exception as error:  # codecs raise what they like
                raise self._damaged(row, f"codec ({error})") from error
        if len(raw) != row.raw or digest(self._algorithm, raw) != row.digest:
            raise self._damaged(row, "digest")
        return raw

    def _cells(self, block: Wanted, begin: int, end: int) -> Bytes:
        """Some cells of an uncompressed block, verified, in this worker's buffer. A wanted piece must lie in each."""
        cells = self._read(block.row, block.row.position + begin, end - begin, self._past_cache(block))
        self._check_run(block.run_at(begin).pieces, cells, begin)
        return cells

    def _check_run(self, pieces: Iterable[Cells], cells: Bytes, begin: int) -> None:
        """Check cells of a raw block, from byte `begin` of it on, by the pieces of the run in which they lie."""
        end, checked = begin + len(cells), begin
        for first, last, piece in pieces:
            if (upto := min(last, end)) > checked >= first:
                self._check_cells(piece.row, cells[checked - begin : upto - begin], checked)
                checked = upto
        assert checked == end  # else bytes would be handed out that nobody has verified

    def _check_cells(self, row: Row, data: Bytes, begin: int) -> None:
        """Check cells of a raw block, from byte `begin` of it on, in each of which the row has bytes."""
        known = (begin - _cells_begin(row)) // CELL_BYTES
        for i, start in enumerate(range(0, len(data), CELL_BYTES), known):
            if checksum(data[start : start + CELL_BYTES]).to_bytes(8, "little") != row.cells[8 * i : 8 * i + 8]:
                raise self._damaged(row, f"cell {i}")

    def _past_cache(self, block: Wanted) -> bool:
        return block.once and self._store.past_cache

    # --- bytes -------------------------------------------------------------------------------------------------

    def _read(self, row: Row, position: int, nbytes: int, past_cache: bool) -> Bytes:
        """So many bytes from a position on, in this worker's buffer."""
        self._stored = _at_least(self._stored, round_up(nbytes))
        self._fill(row, position, self._stored[: round_up(nbytes) if past_cache else nbytes].data, nbytes, past_cache)
        return self._stored[:nbytes]

    def _fill(self, row: Row, position: int, buffer: memoryview, least: int, past_cache: bool = False) -> None:
        """Read what lies at a position; raise IntegrityError where that is less than `least` bytes."""
        name = row.pack or ""
        try:
            if self._reader is None or self._open != (name, past_cache):
                self._close()
                self._reader = self._store.open_once(name) if past_cache else self._store.open(name)
                self._open = name, past_cache
            count = self._reader.read_into(position, buffer)
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
        if count < least:
            raise IntegrityError(
                f"leaf {row.leaf} of {self._where}: {self._store.url}/{name} ends at byte {position + count}, "
                f"{least - count} bytes early; restore it or load another step"
            )

    def _damaged(self, row: Row, what: str) -> IntegrityError:
        return IntegrityError(
            f"leaf {row.leaf} of {self._where}: {self._store.url}/{row.pack}, block at byte {row.position}, does not "
            f"match its {what}; restore the file or load another step"
        )

    def _report(self, nbytes: int) -> None:
        if self._progress is not None:
            self._progress(nbytes)

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


S = TypeVar("S", Place, Cells)


class Along(Generic[S]):
    """Stretches of a block, as one goes along it: each begins with its first byte and the one past its last."""

    def __init__(self, stretches: Iterable[S]) -> None:
        self._waiting: deque[S] = deque(sorted(stretches, key=operator.itemgetter(0)))
        self._reached: list[S] = []

    def before(self, end: int) -> list[S]:
        """Those that begin before `end`, without those that had ended when it was asked before."""
        while self._waiting and self._waiting[0][0] < end:
            self._reached.append(self._waiting.popleft())
        found = self._reached
        self._reached = [stretch for stretch in found if stretch[1] > end]
        return found


def _chunk_by_chunk(begin: int, end: int, places: list[Place], source: Source, check: Callable[[Bytes, int], object]) -> None:
    """Fill memory with bytes [begin, end) of a raw block, a chunk at a time, which is still in the processor's cache when it is
    copied.

    check: called with each chunk, in order, and where it begins.
    """
    along = Along(places)
    while begin < end:
        rest = end - begin
        upto = end if rest < _STREAMED * 3 // 2 else begin + _STREAMED  # a short read would come through the page cache
        data = source(begin, upto)
        check(data, begin)
        for first, last, memory in along.before(upto):
            low, high = max(first, begin), min(last, upto)
            memory[low - first : high - first] = data[low - begin : high - begin]
        begin = upto


def is_bad_sector(error: StoreError) -> bool:
    """Whether the device itself could not give the bytes back: damage, and not a store out of reach."""
    return getattr(error.__cause__, "errno", None) == errno.EIO


class _Nowhere(ArrayLeaf):
    kind = "none"
    __slots__ = ()

    def read(self, box: Box, out: Bytes) -> None:
        raise AssertionError("never read")

    def write(self, box: Box, data: Bytes) -> None:
        raise AssertionError("never written")


_NOWHERE = _Nowhere()


def _cells_begin(row: Row) -> int:
    return row.start // CELL_BYTES * CELL_BYTES


def _cells_end(row: Row) -> int:
    return min(row.raw, -(-(row.start + row.nbytes) // CELL_BYTES) * CELL_BYTES)


def _rows_of_span(inner: Bytes, box: Box, row: Row, itemsize: int) -> Bytes:
    """The elements of `box`, in C order, out of the bytes from its first to its last in the row's piece."""
    relative = box.relative_to(row.box)
    if contiguous_start(relative, row.box.shape) is not None:
        return inner
    strides = [itemsize] * len(row.box.shape)
    for axis in range(len(strides) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * row.box.shape[axis + 1]
    view = np.ndarray(relative.shape, f"V{itemsize}", inner, 0, tuple(strides))
    return np.ascontiguousarray(view).reshape(-1).view(np.uint8)


def _at_least(buffer: Bytes, nbytes: int) -> Bytes:
    return buffer if len(buffer) >= nbytes else np.frombuffer(pages(max(nbytes, BLOCK_BYTES)), np.uint8)
