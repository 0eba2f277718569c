"""From rows to arrays: ranges, parallel reads, verification, decoding, into the destination.

Blocks are read in the order in which they lie. Each thread takes a contiguous part of them, so that the kernel reads
ahead for each; an uncompressed block that goes to one contiguous place is read straight into it, and summed chunk by
chunk while the chunk is still in the cache. Where only a part of an uncompressed block is wanted, only its cells are
read. Reads go through the page cache: a second load is a memory copy.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ckpt import codec
from ckpt.digest import CELL_BYTES, checksum, digest, hasher
from ckpt.dtypes import numpy_dtype
from ckpt.leaves.base import ArrayLeaf, Bytes
from ckpt.manifest import Manifest, Row
from ckpt.quiet import collector_paused
from ckpt.shard import Box, contiguous_start, intersect
from ckpt.storage.base import Reader, Store
from ckpt.storage.errors import CkptError, IntegrityError, NotFound, StoreError

READ_THREADS = 3
"""Measured on the reference machine, cold: 1 thread 2.4 GB/s, 2 threads 2.7, 3 threads 2.9, 4 threads 2.7."""

_CHUNK = 1 << 20

Progress = Callable[[int], None]
"""Called with the number of stored bytes just done, from several threads."""


@dataclass(slots=True)
class Wanted:
    """A block and the pieces of it that go somewhere: (row, destination, where in it the piece's box lies)."""

    row: Row
    pieces: list[tuple[Row, ArrayLeaf, Box]] = field(default_factory=list)


def read_leaves(
    store: Store,
    manifest: Manifest,
    targets: Sequence[tuple[str, ArrayLeaf]],
    where: str,
    progress: Progress | None = None,
    part: Box | None = None,
) -> None:
    """Fill each target with its leaf, or with the box `part` of it. Raises IntegrityError with file and leaf."""
    with collector_paused():
        order = _wanted(manifest, targets, where, part)
    origin = None if part is None else part.offset
    _each(order, lambda job: _Worker(store, manifest.digest_algorithm, where, origin, progress).run(job))


def _wanted(
    manifest: Manifest, targets: Sequence[tuple[str, ArrayLeaf]], where: str, part: Box | None
) -> list[Wanted]:
    """The blocks to read, in the order in which they lie."""
    by_leaf = manifest.by_leaf()
    blocks: dict[tuple[str, int], Wanted] = {}
    for name, leaf in targets:
        rows = by_leaf[name]
        covered = 0
        for row in rows:
            if row.pack is None:
                continue
            box = row.box if part is None else intersect(row.box, part)
            if box is None:
                continue
            covered += row.nbytes if box is row.box else box.size * leaf.itemsize
            key = (row.pack, row.position)
            if (block := blocks.get(key)) is None:
                block = blocks[key] = Wanted(row)
            block.pieces.append((row, leaf, box))
        if covered != leaf.nbytes:
            raise IntegrityError(f"leaf {name} of {where}: the manifest covers {covered} of {leaf.nbytes} bytes")
    return [blocks[key] for key in sorted(blocks)]


def verify_blocks(store: Store, manifest: Manifest, where: str, progress: Progress | None = None) -> int:
    """Read every block, check it as stored and as decoded; return the bytes read."""
    blocks: dict[tuple[str, int], Wanted] = {}
    for row in manifest.rows:
        if row.pack is not None:
            blocks.setdefault((row.pack, row.position), Wanted(row))
            blocks[row.pack, row.position].pieces.append((row, _NOWHERE, row.box))
    order = [blocks[key] for key in sorted(blocks)]
    _each(order, lambda job: _Worker(store, manifest.digest_algorithm, where, None, progress).verify(job))
    return sum(block.row.stored for block in order)


def _each(order: list[Wanted], work: Callable[[Iterable[Wanted]], None]) -> None:
    """Run `work` on contiguous parts of about equal bytes, one a thread; the first error ends all."""
    total = sum(w.row.stored for w in order)
    threads = max(1, min(READ_THREADS, len(order), total // (16 << 20)))
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


class _Worker:
    """One thread's reading: its open file and its buffers."""

    def __init__(
        self, store: Store, algorithm: str, where: str, origin: tuple[int, ...] | None, progress: Progress | None
    ) -> None:
        self._store = store
        self._algorithm = algorithm
        self._where = where
        self._origin = origin
        self._progress = progress
        self._stored = np.empty(0, np.uint8)
        self._raw = np.empty(0, np.uint8)
        self._name = ""
        self._reader: Reader | None = None

    def run(self, order: Iterable[Wanted]) -> None:
        """Read each block and put its pieces where they belong."""
        try:
            for block in order:
                self._block(block)
        finally:
            self._close()

    def verify(self, order: Iterable[Wanted]) -> None:
        """Read each block and check it, cells included."""
        try:
            for block in order:
                raw = self._whole(block)
                for row, _, _ in block.pieces:
                    if row.cells:
                        self._check_cells(row, raw[_cells_begin(row) : _cells_end(row)])
                self._report(block.row.stored)
        finally:
            self._close()

    # --- one block ---------------------------------------------------------------------------------------------

    def _block(self, block: Wanted) -> None:
        row = block.row
        if len(block.pieces) == 1:
            row, leaf, box = block.pieces[0]
            if row.codec is None:
                if box == row.box and row.nbytes == row.raw and (place := self._place(leaf, row, box)) is not None:
                    self._straight(row, place)
                    return
                if row.nbytes * 2 < row.raw or box != row.box:
                    self._part(row, leaf, box)
                    return
        raw = self._whole(block)
        for row, leaf, box in block.pieces:
            flat = leaf.flat
            if flat is not None and len(flat) == row.nbytes and box is row.box:  # a whole small leaf
                flat[:] = raw[row.start : row.start + row.nbytes]
                continue
            self._put(row, leaf, box, raw[row.start : row.start + row.nbytes])
        self._report(row.stored)

    def _place(self, leaf: ArrayLeaf, row: Row, box: Box) -> Bytes | None:
        """The destination's own memory for all of `row`, where that is contiguous."""
        if leaf.flat is None:
            return None
        start = contiguous_start(self._in_target(box), leaf.shape)
        if start is None:
            return None
        start *= leaf.itemsize
        return leaf.flat[start : start + row.nbytes]

    def _straight(self, row: Row, place: Bytes) -> None:
        whole_hash = hasher(self._algorithm)
        view = place.data
        for start in range(0, len(view), _CHUNK):
            chunk = view[start : start + _CHUNK]
            self._fill(row, row.position + start, chunk)
            whole_hash.update(chunk)
        if whole_hash.digest() != row.digest:
            raise self._damaged(row, "digest")
        self._report(row.stored)

    def _whole(self, block: Wanted) -> Bytes:
        """All of a block, verified and decoded, in this worker's buffer."""
        row = block.row
        self._stored = _at_least(self._stored, row.stored)
        stored = self._stored[: row.stored]
        self._fill(row, row.position, stored.data)
        raw = stored
        if row.codec is not None:
            if checksum(stored) != row.checksum:
                raise self._damaged(row, "checksum")
            self._raw = _at_least(self._raw, row.raw)
            raw = self._raw[: row.raw]
            try:
                codec.decode(row.codec, stored.data, raw)
            except (CkptError, MemoryError, ImportError):
                raise
            except Exception as error:  # codecs raise what they like
                raise self._damaged(row, f"codec ({error})") from error
        if len(raw) != row.raw or digest(self._algorithm, raw) != row.digest:
            raise self._damaged(row, "digest")
        return raw

    def _part(self, row: Row, leaf: ArrayLeaf, box: Box) -> None:
        """Some cells of an uncompressed block: those around the wanted box."""
        itemsize = numpy_dtype(row.dtype).itemsize
        first, last = _span(box.relative_to(row.box), row.box.shape)
        begin = (row.start + first * itemsize) // CELL_BYTES * CELL_BYTES
        end = min(row.raw, -(-(row.start + last * itemsize) // CELL_BYTES) * CELL_BYTES)
        self._stored = _at_least(self._stored, end - begin)
        cells = self._stored[: end - begin]
        self._fill(row, row.position + begin, cells.data)
        known = (begin - _cells_begin(row)) // CELL_BYTES
        self._check_cells(row, cells, known)
        # The row's bytes as if all had been read: only those within the span are looked at.
        inner = cells[row.start + first * itemsize - begin : row.start + last * itemsize - begin]
        box_rows = _rows_of_span(inner, first, last, box, row, itemsize)
        leaf.write(self._in_target(box), box_rows)
        self._report(end - begin)

    def _check_cells(self, row: Row, data: Bytes, first: int = 0) -> None:
        for i, start in enumerate(range(0, len(data), CELL_BYTES), first):
            if checksum(data[start : start + CELL_BYTES]).to_bytes(8, "little") != row.cells[8 * i : 8 * i + 8]:
                raise self._damaged(row, f"cell {i}")

    def _put(self, row: Row, leaf: ArrayLeaf, box: Box, data: Bytes) -> None:
        if box == row.box and (place := self._place(leaf, row, box)) is not None:
            place[:] = data
            return
        if box != row.box:
            dtype = numpy_dtype(row.dtype)
            shaped = data.view(f"V{dtype.itemsize}").reshape(row.box.shape)
            data = np.ascontiguousarray(shaped[box.relative_to(row.box).slices()]).reshape(-1).view(np.uint8)
        leaf.write(self._in_target(box), data)

    def _in_target(self, box: Box) -> Box:
        if self._origin is None:
            return box
        return Box(tuple(a - b for a, b in zip(box.offset, self._origin, strict=True)), box.shape)

    # --- bytes -------------------------------------------------------------------------------------------------

    def _fill(self, row: Row, position: int, buffer: memoryview) -> None:
        name = row.pack or ""
        try:
            if self._reader is None or self._name != name:
                self._close()
                self._reader = self._store.open(name)
                self._name = name
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
        if count != len(buffer):
            raise IntegrityError(
                f"leaf {row.leaf} of {self._where}: {self._store.url}/{name} ends at byte {position + count}, "
                f"{len(buffer) - count} bytes early; restore it or load another step"
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


def _span(box: Box, shape: tuple[int, ...]) -> tuple[int, int]:
    """First and one past the last element of `box` in an array of `shape`, C order."""
    first = last = 0
    for offset, extent, length in zip(box.offset, box.shape, shape, strict=True):
        first = first * length + offset
        last = last * length + offset + extent - 1
    return first, last + 1


def _rows_of_span(inner: Bytes, first: int, last: int, box: Box, row: Row, itemsize: int) -> Bytes:
    """The elements of `box`, in C order, out of the bytes of the span [first, last) of the row's piece."""
    relative = box.relative_to(row.box)
    if contiguous_start(relative, row.box.shape) is not None:
        return inner
    strides = [itemsize] * len(row.box.shape)
    for axis in range(len(strides) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * row.box.shape[axis + 1]
    view = np.ndarray(relative.shape, f"V{itemsize}", inner, 0, tuple(strides))
    return np.ascontiguousarray(view).reshape(-1).view(np.uint8)


def _at_least(buffer: Bytes, nbytes: int) -> Bytes:
    return buffer if len(buffer) >= nbytes else np.empty(max(nbytes, 8 << 20), np.uint8)
