"""Which bytes of an open file are in the page cache of Linux, and a copy of them that does not wait for the device."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
from collections.abc import Callable

_CACHESTAT = 451
"""The number of cachestat(2) (Linux 6.5) on all architectures but Alpha."""


def in_page_cache(fd: int, position: int, nbytes: int = 1) -> bool:
    """Return whether the bytes from `position` on are in the page cache; False if the system cannot tell.

    nbytes: how many of them to check where the file system has no reads that do not wait (tmpfs, FUSE, NFS); elsewhere only the
        first is.

    Checking a byte that is not cached can make Linux load it, with its read-ahead for `fd`. In about one of a thousand checks
    the byte is loaded before the answer, which is then True.
    """
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    try:
        os.preadv(fd, [bytearray(1)], position, os.RWF_NOWAIT)
    except OSError as error:
        return error.errno == errno.EOPNOTSUPP and _are_pages_cached(fd, position, nbytes)
    return True


def read_cached(fd: int, position: int, buffer: memoryview) -> int:
    """Copy bytes from `position` on out of the page cache without waiting for the device; return how many it had."""
    if not hasattr(os, "RWF_NOWAIT"):
        return 0
    try:
        return os.preadv(fd, [buffer], position, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:  # the caller reads the bytes otherwise, and then gets the error if there is one
            return 0
    end = min(position + len(buffer), os.fstat(fd).st_size)
    return os.preadv(fd, [buffer], position) if position < end and _are_pages_cached(fd, position, end - position) else 0


def _are_pages_cached(fd: int, position: int, nbytes: int) -> bool:
    """Return whether all pages of a range are in the page cache, by cachestat(2), which reads nothing."""
    syscall = _find_syscall()
    if syscall is None:
        return False
    byte_range, counts = (ctypes.c_uint64 * 2)(position, nbytes), (ctypes.c_uint64 * 5)()
    if syscall(_CACHESTAT, fd, ctypes.byref(byte_range), ctypes.byref(counts), 0):
        return False  # an older Linux, or a file of somebody else
    pages = (position + nbytes - 1) // mmap.PAGESIZE - position // mmap.PAGESIZE + 1
    return counts[0] >= pages


@functools.cache
def _find_syscall() -> Callable[..., int] | None:
    try:
        found = ctypes.CDLL(None, use_errno=True).syscall
    except (AttributeError, OSError):
        return None
    found.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint]
    found.restype = ctypes.c_long
    return found if os.uname().machine != "alpha" else None  # type: ignore[no-any-return]
