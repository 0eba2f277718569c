"""Memory on huge pages: what the disk is written from, and what is copied into."""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress

_MADV_WIPEONFORK = 18
"""MADV_WIPEONFORK, of which Python's mmap knows nothing; see madvise(2)."""


def map_huge_pages(nbytes: int) -> mmap.mmap:
    """So many bytes of memory of this process alone, zeros at first, on huge pages where the system has them.

    mmap's own default is memory shared with children, for which few systems have huge pages. O_DIRECT from small pages
    takes more requests and more of the kernel's time: benchmarks/limits.py measures both (in one run with one thread 1.32
    and 2.00 GB/s, reads 1.06 and 2.07). A forked child finds zeros here, else each page that is written after a fork
    would have to be copied first.
    """
    if sys.platform == "win32":
        return mmap.mmap(-1, nbytes)
    found = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        for advice in (mmap.MADV_HUGEPAGE, _MADV_WIPEONFORK):
            with suppress(OSError):  # a kernel without it
                found.madvise(advice)
    return found
