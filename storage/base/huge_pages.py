"""Map memory on huge pages, for staging and for direct I/O."""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress

_MADV_WIPEONFORK = 18
"""MADV_WIPEONFORK of madvise(2), which Python's mmap does not define."""


def map_huge_pages(nbytes: int, wiped_on_fork: bool = True) -> mmap.mmap:
    """Return `nbytes` bytes of private memory, zeroed, on huge pages where the system has them.

    The default of mmap is memory shared with children, for which few systems have huge pages. O_DIRECT from small pages needs
    more requests and more time of the kernel: benchmarks/limits.py measures both (in one run with one thread, writes 1.32 and
    2.00 GB/s, reads 1.06 and 2.07 GB/s).

    wiped_on_fork: whether a forked child sees zeros (MADV_WIPEONFORK); otherwise each page that is written after a fork is
        copied first.
    """
    if sys.platform == "win32":
        return mmap.mmap(-1, nbytes)
    found = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        for advice in (mmap.MADV_HUGEPAGE, *[_MADV_WIPEONFORK] * wiped_on_fork):
            with suppress(OSError):  # the kernel does not support it
                found.madvise(advice)
    return found
