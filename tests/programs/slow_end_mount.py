"""`python slow_end_mount.py FOLDER MOUNT GO`: as passthrough_mount.py, but a read after the first MiB waits for the file GO."""

from __future__ import annotations

import os
import sys
import time

import fuse
from passthrough_mount import Passthrough


class SlowEnd(Passthrough):
    """Delays the reads of the end of a file, so that an exec of a program from it takes that long."""

    def __init__(self, root: str, go: str) -> None:
        super().__init__(root)
        self._go = go

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        while offset >= 1 << 20 and not os.path.exists(self._go):
            time.sleep(0.01)
        return super().read(path, size, offset, fh)


if __name__ == "__main__":
    fuse.FUSE(SlowEnd(sys.argv[1], sys.argv[3]), sys.argv[2], foreground=True, nothreads=True)
