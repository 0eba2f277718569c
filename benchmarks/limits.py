"""Measures the limits of this machine, which are the denominators of every ratio: memory, disk, hashes.

Each is the simplest program that moves the bytes, so no library can be faster by more than the noise.
"""

from __future__ import annotations

import concurrent.futures
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from probes import drop_file
from results import Samples

from ckpt.storage.base.huge_pages import map_huge_pages

COPY_1 = "memory copy, 1 thread"
COPY_2 = "memory copy, 2 threads"
COPY_FRESH = "memory copy into fresh pages"
WRITE_1 = "disk write O_DIRECT, 1 thread"
WRITE_2 = "disk write O_DIRECT, 2 threads"
WRITE_4 = "disk write O_DIRECT, 4 threads"
WRITE_HUGE = "disk write O_DIRECT, 1 thread, huge pages"
WRITE_STATE = "disk write O_DIRECT, 1 thread, huge pages, a whole state"
"""The source has as many bytes as are written, as in a save. The other writes repeat one block of 8 MiB, which is cached."""
WRITE_BUFFERED = "disk write buffered + fsync"
READ_1 = "disk read O_DIRECT, 1 thread"
READ_2 = "disk read O_DIRECT, 2 threads"
READ_4 = "disk read O_DIRECT, 4 threads"
READ_HUGE = "disk read O_DIRECT, 1 thread, huge pages"
READ_HUGE_4 = "disk read O_DIRECT, 4 threads, huge pages"
READ_PIECES = "disk read O_DIRECT, 4 threads, huge pages, 1 MiB at a time"
READ_COLD = "disk read buffered, cold"
READ_ADVISED = "disk read buffered, cold, advised 16 MiB ahead"
READ_HOT = "disk read buffered, page cache hot"
DISK_READS = (READ_1, READ_2, READ_4, READ_COLD)

BLOCK = 8 << 20
PIECE = 1 << 20
UNIT = 64 << 20  # sizes are multiples of this, so that every thread gets whole blocks
HASHED = 64 << 20

Task = Callable[[], object]


def measure(folder: Path, gib: float, repeat: int) -> dict[str, Samples]:
    """Return `repeat` samples of each limit in GB/s, by name. Memory and file have `gib` GiB; the file is in `folder`."""
    nbytes = max(1, int(gib * 2**30) // UNIT) * UNIT
    source = np.frombuffer(np.random.default_rng(0).bytes(UNIT) * (nbytes // UNIT), np.uint8)
    file = folder / "limit.bin"
    found: dict[str, Samples] = {}

    def record(name: str, moved: int, task: Task, before: Task = lambda: None) -> None:
        try:
            found[name] = [moved / 1e9 / seconds(task, before) for _ in range(repeat)]
        except OSError as error:  # the file system has no O_DIRECT
            print(f"{name}: {error}", file=sys.stderr)

    try:
        copy_limits(record, source)
        write_limits(record, source, file)
        read_limits(record, nbytes, file)
        hash_limits(record, source)
    finally:
        file.unlink(missing_ok=True)
    return found


def seconds(task: Task, before: Task) -> float:
    """Return the seconds of a task, after another task that is not timed."""
    before()
    began = time.perf_counter()
    task()
    return time.perf_counter() - began


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Run work(0) … work(count - 1), each in a thread."""
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))


def copy_limits(record: Callable[..., None], source: np.ndarray) -> None:
    """Measure copies in memory."""
    nbytes, half = source.nbytes, source.nbytes // 2
    target = np.empty(nbytes, np.uint8)
    target[:] = 0
    halves = [(target[:half], source[:half]), (target[half:], source[half:])]
    record(COPY_1, nbytes, lambda: np.copyto(target, source))
    record(COPY_2, nbytes, lambda: in_threads(2, lambda i: np.copyto(*halves[i])))
    record(COPY_FRESH, nbytes, lambda: np.copyto(np.empty(nbytes, np.uint8), source))


def write_limits(record: Callable[..., None], source: np.ndarray, file: Path) -> None:
    """Measure writes to a file, which exists afterwards."""
    nbytes = source.nbytes
    small, huge, state = mmap.mmap(-1, BLOCK), map_huge_pages(BLOCK), map_huge_pages(nbytes)
    small.write(source[:BLOCK].tobytes())
    huge.write(source[:BLOCK].tobytes())
    state.write(source.data)

    def direct(threads: int, buffer: mmap.mmap) -> None:
        memory = memoryview(buffer)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            share = nbytes // threads // BLOCK * BLOCK

            def write(i: int) -> None:
                for offset in range(i * share, (i + 1) * share, BLOCK):
                    at = offset % len(memory)
                    os.pwrite(descriptor, memory[at : at + BLOCK], offset)

            in_threads(threads, write)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def buffered() -> None:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
        data = memoryview(source)
        for offset in range(0, nbytes, BLOCK):
            os.pwrite(descriptor, data[offset : offset + BLOCK], offset)
        os.fsync(descriptor)
        os.close(descriptor)

    def remove() -> None:
        file.unlink(missing_ok=True)

    small_pages = [(WRITE_1, 1, small), (WRITE_2, 2, small), (WRITE_4, 4, small)]
    for name, threads, buffer in [*small_pages, (WRITE_HUGE, 1, huge), (WRITE_STATE, 1, state)]:
        record(name, nbytes, lambda threads=threads, buffer=buffer: direct(threads, buffer), remove)
    record(WRITE_BUFFERED, nbytes, buffered, remove)  # the last one, because its file is read next


def read_limits(record: Callable[..., None], nbytes: int, file: Path) -> None:
    """Measure reads of a file."""
    target = np.empty(nbytes, np.uint8)
    target[:] = 0

    def direct(threads: int, memory: Callable[[], mmap.mmap], piece: int = BLOCK) -> None:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
        share = nbytes // threads // BLOCK * BLOCK

        def read(i: int) -> None:
            buffer = memoryview(memory())
            for offset in range(i * share, (i + 1) * share, piece):
                at = offset % BLOCK
                os.preadv(descriptor, [buffer[at : at + piece]], offset)

        try:
            in_threads(threads, read)
        finally:
            os.close(descriptor)

    def buffered(ahead: int = 0) -> None:
        descriptor = os.open(file, os.O_RDONLY)
        data = memoryview(target)
        advised = 0
        for offset in range(0, nbytes, BLOCK):
            while advised < min(offset + ahead, nbytes):
                os.posix_fadvise(descriptor, advised, PIECE, os.POSIX_FADV_WILLNEED)
                advised += PIECE
            os.preadv(descriptor, [data[offset : offset + BLOCK]], offset)
        os.close(descriptor)

    for name, threads in ((READ_1, 1), (READ_2, 2), (READ_4, 4)):
        record(name, nbytes, lambda threads=threads: direct(threads, lambda: mmap.mmap(-1, BLOCK)), lambda: drop_file(file))
    for name, threads, piece in ((READ_HUGE, 1, BLOCK), (READ_HUGE_4, 4, BLOCK), (READ_PIECES, 4, PIECE)):
        record(
            name,
            nbytes,
            lambda threads=threads, piece=piece: direct(threads, lambda: map_huge_pages(BLOCK), piece),
            lambda: drop_file(file),
        )
    for name, ahead in ((READ_COLD, 0), (READ_ADVISED, 2 * BLOCK)):
        record(name, nbytes, lambda ahead=ahead: buffered(ahead), lambda: drop_file(file))
    buffered()
    record(READ_HOT, nbytes, buffered)


def hash_limits(record: Callable[..., None], source: np.ndarray) -> None:
    """Measure the digests."""
    data = memoryview(source[:HASHED])
    for name, digest in hashes().items():
        record(f"hash {name}, 1 thread", 4 * HASHED, lambda digest=digest: [digest(data) for _ in range(4)])


def hashes() -> dict[str, Callable[[memoryview], bytes]]:
    """Return the installed digests that a save can use, by name."""
    import xxhash

    found: dict[str, Callable[[memoryview], bytes]] = {"xxh3-128": xxhash.xxh3_128_digest}
    try:
        import blake3
    except ImportError:
        return found
    return found | {"blake3": lambda data: blake3.blake3(data).digest()}
