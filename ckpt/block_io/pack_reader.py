"""Read the stored bytes of blocks, with one open file and one buffer; a tuner limits and measures the requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import TypeVar

import numpy as np

from ckpt.block_io.chunk_memory import chunk_memory
from ckpt.block_io.chunked_copy import ReadRange, longest_part
from ckpt.block_io.copy_slots import copy_slots
from ckpt.block_io.read_plan import BlockRead
from ckpt.block_io.staging_arena import round_up
from ckpt.block_io.tuned_read_threads import ReadKind, TunedReads, tuned_reads
from ckpt.errors import DAMAGE_ADVICE
from ckpt.format.limits import BLOCK_BYTES
from ckpt.format.manifest import Row
from ckpt.state.leaves.base import Bytes
from ckpt.storage.base.errors import IntegrityError, NotFound, StoreError, is_bad_sector
from ckpt.storage.base.huge_pages import map_huge_pages
from ckpt.storage.base.store import Reader, Store

T = TypeVar("T")

_PREFETCH_BYTES = 16 << 20
"""How many bytes ahead of its reads each thread prefetches."""


class PackReader:
    """Reads packs of one store at a time, for one thread. `use` changes the store. What it returns is not verified."""

    def __init__(self, store: Store, where: str, kind: ReadKind | None) -> None:
        """kind: how a tuner counts the reads; None if no tuner controls them. where: the step, for messages."""
        self.store = store
        self._where = where
        self._kind = kind
        self._tuned: TunedReads | None = None
        self._worker = ExitStack()
        """Counts this thread as one that has requests for the tuner, until it is closed."""
        self._buffer = np.empty(0, np.uint8)
        self._opened: tuple[str, bool] | None = None
        """The name of the open file, and whether its reads bypass the page cache."""
        self._reader: Reader | None = None
        self._is_block_cached = False
        """Whether the page cache had the first byte of the block that is read now, and all that was read of it since."""

    def begin(self) -> None:
        """Count this thread as one that reads from the device of the store, until `end`."""
        self.use(self.store)

    def end(self) -> None:
        """Stop counting this thread, and close the open file."""
        self._worker.close()
        self.close_file()

    def use(self, store: Store) -> None:
        """Read from another store from now on."""
        self.close_file()
        self._worker.close()
        self.store = store
        self._tuned = tuned_reads(store, self._kind) if self._kind else None
        if self._tuned is not None:
            self._worker.enter_context(self._tuned.tuner.worker())

    @property
    def chunk_bytes(self) -> int | None:
        """How many bytes of a block to take from `source` at once; None if a block is read as a whole."""
        return self._tuned.request_bytes if self._tuned is not None else None

    def prefetched(self, reads: Iterable[BlockRead]) -> Iterator[BlockRead]:
        """Yield the blocks, each after the next ones were announced to the store for its page cache, where that pays.

        A whole block right after the one before is not announced. The read-ahead of Linux loads it into large pages, while the
        pages of an announced range (POSIX_FADV_WILLNEED) are small and take twice the processor time.
        """
        waiting: deque[tuple[BlockRead, int]] = deque()
        nbytes = 0
        previous_end: tuple[str, int] | None = None
        for block in reads:
            row, pack = block.row, block.row.pack or ""
            if not self._bypasses_cache(block):
                ranges = block.stored_ranges()
                if ranges != [(0, row.stored)] or previous_end not in (None, (pack, row.position)):
                    for begin, end in ranges:
                        self.store.prefetch(pack, end - begin, row.position + begin)
                if (base := row.base) is not None:
                    self.store.prefetch(base.pack, base.stored, base.position)
            previous_end = pack, round_up(row.position + row.stored)
            block_bytes = block.planned_bytes()
            waiting.append((block, block_bytes))
            nbytes += block_bytes
            while nbytes > _PREFETCH_BYTES and len(waiting) > 1:
                first, size = waiting.popleft()
                nbytes -= size
                yield first
        yield from (block for block, _ in waiting)

    def call_with_copy_slot(self, block: BlockRead, first: int, read: Callable[[BlockRead], T]) -> T:
        """Call `read`. If the page cache has the block, wait before that until few enough other threads copy such blocks.

        first: the first byte of the stored block that it reads.
        """
        row = block.row
        self._is_block_cached = (
            self._tuned is not None and not self._tuned.is_remote and self._is_cached(row, row.position + first)
        )
        if not self._is_block_cached:
            return read(block)
        with copy_slots.slot():
            return read(block)

    def source(self, block: BlockRead) -> ReadRange:
        """Return a source of the bytes of an uncompressed block.

        It reads into the target if there is one. A read past the page cache goes into the buffer of this reader, because the
        memory of a leaf is rarely aligned.
        """
        row, bypass = block.row, self._bypasses_cache(block)

        def source(begin: int, end: int, target: Bytes | None) -> Bytes:
            if target is None:
                return self.read(block, begin, end)
            if bypass:
                if self._is_block_cached and self._read_cached(row, row.position + begin, target.data):
                    return target
                self._is_block_cached = False
                if not self._is_cached(row, row.position + begin):
                    return self.read(block, begin, end)
            self._fill(block, begin, target.data, end - begin, is_counted=self._tuned is not None and not bypass)
            return target

        return source

    def read(self, block: BlockRead, begin: int, end: int) -> Bytes:
        """Return bytes [begin, end) of a stored block, in this reader's buffer."""
        nbytes = end - begin
        self._grow_buffer(round_up(nbytes))
        # Only whole pages can bypass the page cache.
        buffer = self._buffer[: round_up(nbytes) if self._bypasses_cache(block) else nbytes]
        self.read_into(block, begin, buffer.data, nbytes)
        return self._buffer[:nbytes]

    def _grow_buffer(self, nbytes: int) -> None:
        if len(self._buffer) >= nbytes:
            return
        longest_chunk = longest_part(self.chunk_bytes) if self.chunk_bytes is not None else 0
        self._buffer = chunk_memory.take(longest_chunk) if nbytes <= longest_chunk else grown(self._buffer, nbytes)

    def read_into(self, block: BlockRead, begin: int, buffer: memoryview, min_bytes: int) -> None:
        """Fill `buffer` with bytes of a stored block; raise IntegrityError if the file is missing or has less than `min_bytes`.

        Bytes that are in the page cache do not count as read from the device.
        """
        is_counted = self._tuned is not None
        if is_counted and self._bypasses_cache(block):
            is_counted = not self._is_cached(block.row, block.row.position + begin)
        self._fill(block, begin, buffer, min_bytes, is_counted)

    def _fill(self, block: BlockRead, begin: int, buffer: memoryview, min_bytes: int, is_counted: bool) -> None:
        """As `read_into`. is_counted: whether the tuner counts this as read from the device."""
        row, position = block.row, block.row.position + begin
        try:
            reader = self._reader_of(row, self._bypasses_cache(block))
            if is_counted:
                assert self._tuned is not None
                with self._tuned.tuner.request() as request:
                    count = request.nbytes = reader.read_into(position, buffer)
            else:
                count = reader.read_into(position, buffer)
        except StoreError as error:
            self._raise_damage(row, position, error)
            raise
        if count < min_bytes:
            raise IntegrityError(
                f"leaf {row.leaf} of {self._where}: {self.store.url}/{row.pack or ''} ends at byte {position + count}, "
                f"{min_bytes - count} bytes early; {DAMAGE_ADVICE}"
            )

    def _bypasses_cache(self, block: BlockRead) -> bool:
        return block.bypass_cache and self.store.past_cache

    def _is_cached(self, row: Row, position: int) -> bool:
        try:
            return self._reader_of(row, True).is_cached(position)
        except StoreError as error:
            self._raise_damage(row, position, error)
            raise

    def _read_cached(self, row: Row, position: int, buffer: memoryview) -> bool:
        """Fill `buffer` from the page cache with bytes of an open file; return whether the cache had all of them."""
        try:
            return self._reader_of(row, True).read_cached(position, buffer) == len(buffer)
        except StoreError as error:
            self._raise_damage(row, position, error)
            raise

    def _raise_damage(self, row: Row, position: int, error: StoreError) -> None:
        """Raise IntegrityError if an error means that the file is missing or that the device cannot read it."""
        name = row.pack or ""
        if isinstance(error, NotFound):
            raise IntegrityError(
                f"leaf {row.leaf} of {self._where}: {self.store.url}/{name} is missing; {DAMAGE_ADVICE}"
            ) from error
        if is_bad_sector(error):
            raise IntegrityError(
                f"leaf {row.leaf} of {self._where}: {self.store.url}/{name} cannot be read at byte {position}: the device "
                "reports an I/O error; check the disk, and load another step"
            ) from error

    def _reader_of(self, row: Row, bypass_cache: bool) -> Reader:
        """Return the open file of a block."""
        name = row.pack or ""
        if self._reader is None or self._opened != (name, bypass_cache):
            self.close_file()
            self._reader = self.store.open_once(name) if bypass_cache else self.store.open(name)
            self._opened = name, bypass_cache
        return self._reader

    def close_file(self) -> None:
        """Close the open file. The next read opens one again."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def grown(buffer: Bytes, nbytes: int) -> Bytes:
    """Return a buffer of at least `nbytes` bytes: the same one, or a new one on huge pages."""
    return buffer if len(buffer) >= nbytes else np.frombuffer(map_huge_pages(max(nbytes, BLOCK_BYTES)), np.uint8)
