"""`python failing_mount.py FOLDER MOUNT FILE`: as passthrough_mount.py, but reads of the names in FILE fail with EIO."""

from __future__ import annotations

import errno
import os
import sys

import fuse
from passthrough_mount import Passthrough


class Failing(Passthrough):
    """Fails reads of files whose names end with one of those in a file, as a network file system that has lost its server."""

    def __init__(self, root: str, failing: str) -> None:
        super().__init__(root)
        self._failing = failing

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        if os.path.exists(self._failing):
            with open(self._failing) as file:
                names = tuple(file.read().split())
            if names and path.endswith(names):
                raise fuse.FuseOSError(errno.EIO)
        return super().read(path, size, offset, fh)


if __name__ == "__main__":
    fuse.FUSE(Failing(sys.argv[1], sys.argv[3]), sys.argv[2], foreground=True, nothreads=True)
