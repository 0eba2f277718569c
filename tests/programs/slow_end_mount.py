"""`python slow_end_mount.py FOLDER MOUNT SECONDS`: as passthrough_mount.py, but a read after the first MiB takes SECONDS."""

from __future__ import annotations

import sys
import time

import fuse
from passthrough_mount import Passthrough


class SlowEnd(Passthrough):
    """Delays the reads of the end of a file, so that an exec of a program from it takes that long."""

    def __init__(self, root: str, seconds: float) -> None:
        super().__init__(root)
        self._seconds = seconds

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        if offset >= 1 << 20:
            time.sleep(self._seconds)
        return super().read(path, size, offset, fh)


if __name__ == "__main__":
    fuse.FUSE(SlowEnd(sys.argv[1], float(sys.argv[3])), sys.argv[2], foreground=True, nothreads=True)
