"""Mounts a folder a second time, with a delay of each read and write, as a network file system has.

    python benchmarks/slow_mount.py FOLDER MOUNTPOINT --delay-ms 2

It needs fusepy and libfuse2, and runs until the mount is removed (`fusermount3 -u MOUNTPOINT`).
"""

from __future__ import annotations

import argparse
import errno
import os
import time
from pathlib import Path
from typing import Any

import fuse


class SlowFolder(fuse.Operations):
    """The operations of a file system that passes each request on to a folder."""

    def __init__(self, folder: Path, delay_seconds: float) -> None:
        self._folder = str(folder)
        self._delay_seconds = delay_seconds

    def _path(self, path: str) -> str:
        return self._folder + path

    # --- names -------------------------------------------------------------------------------------------------

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.lstat(self._path(path))
        return {name: getattr(found, name) for name in dir(found) if name.startswith("st_") and not name.endswith("_ns")}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._path(path))]

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._path(path))
        return {name: getattr(found, name) for name in dir(found) if name.startswith("f_") and name != "f_fsid"}

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._path(path), mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._path(path))

    def unlink(self, path: str) -> None:
        os.unlink(self._path(path))

    def rename(self, old: str, new: str) -> None:
        os.rename(self._path(old), self._path(new))

    def link(self, target: str, source: str) -> None:
        os.link(self._path(source), self._path(target))

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._path(path), mode)

    def utimens(self, path: str, times: tuple[float, float] | None = None) -> None:
        os.utime(self._path(path), times)

    # --- bytes -------------------------------------------------------------------------------------------------

    def open(self, path: str, flags: int) -> int:
        return os.open(self._path(path), flags & ~os.O_DIRECT)

    def create(self, path: str, mode: int, fi: object = None) -> int:
        return os.open(self._path(path), os.O_RDWR | os.O_CREAT, mode)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(self._path(path), length)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        time.sleep(self._delay_seconds)
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        time.sleep(self._delay_seconds)
        return os.pwrite(fh, data, offset)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        time.sleep(self._delay_seconds)
        os.fsync(fh)

    def fsyncdir(self, path: str, datasync: int, fh: int) -> None:
        time.sleep(self._delay_seconds)

    def release(self, path: str, fh: int) -> None:
        os.close(fh)

    def getxattr(self, path: str, name: str, position: int = 0) -> bytes:
        raise fuse.FuseOSError(errno.ENOTSUP)


def main() -> None:
    """Mount the folder and serve it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("mountpoint", type=Path)
    parser.add_argument("--delay-ms", type=float, default=2)
    args = parser.parse_args()
    operations = SlowFolder(args.folder.resolve(), args.delay_ms / 1e3)
    fuse.FUSE(operations, str(args.mountpoint), foreground=True, big_writes=True, kernel_cache=True)


if __name__ == "__main__":
    main()
