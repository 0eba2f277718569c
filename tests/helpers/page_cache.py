"""The page cache of Linux: drop the pages of files, and check which pages are cached."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path


def drop_cache(*files: Path) -> None:
    """Make the next read of these files come from the disk.

    A page that the kernel moves at this moment (memory compaction) is not dropped, so this is repeated. Files of a file system
    in memory stay.
    """
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            for _ in range(100):
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                if not any(cached_pages(file)):
                    break
                time.sleep(0.01)


def bypasses_cache(files: Sequence[Path], read: Callable[[], object], is_left: Callable[[], bool]) -> bool:
    """Return whether a read of these files from the disk leaves their pages out of the page cache.

    A query whether a page is cached makes Linux read it. About once in a thousand times that read ends before the query, whose
    answer is then yes, and the read goes through the page cache: so there are three attempts.
    """
    for _ in range(3):
        drop_cache(*files)
        read()
        if not is_left():
            return True
    return False


def is_cached(file: Path, position: int) -> bool:
    """Return whether the page of this byte is in the page cache."""
    return cached_pages(file)[position // mmap.PAGESIZE]


def cached_pages(file: Path) -> list[bool]:
    """Return, for each page of a file, whether it is in the page cache: mincore(2) reads nothing, as preadv(2) would."""
    nbytes = file.stat().st_size
    if not nbytes:
        return []
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    pages = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
    with file.open("rb") as opened:
        address = libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, opened.fileno(), 0)
        assert address != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
        try:
            assert libc.mincore(address, nbytes, pages) == 0, os.strerror(ctypes.get_errno())
        finally:
            libc.munmap(address, nbytes)
    return [bool(page & 1) for page in pages]
