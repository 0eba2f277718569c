"""`python passthrough_mount.py FOLDER MOUNT`: a FUSE mount that shows FOLDER. Stop this process, and the mount hangs."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

import fuse


class Passthrough(fuse.Operations):  # type: ignore[misc]
    """A file system that makes each operation on the folder below."""

    def __init__(self, root: str) -> None:
        self._root = root

    def __call__(self, op: str, path: str, *args: Any) -> Any:
        return super().__call__(op, self._root + path, *args)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.lstat(path)
        names = ("st_atime", "st_ctime", "st_gid", "st_mode", "st_mtime", "st_nlink", "st_size", "st_uid", "st_blocks")
        return {name: getattr(found, name) for name in names}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(path)]

    def access(self, path: str, mode: int) -> int:
        return 0

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(path, mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def rename(self, old: str, new: str) -> None:
        os.replace(old, self._root + new)

    def link(self, target: str, source: str) -> None:
        os.link(self._root + source, target)

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags & ~os.O_DIRECT)

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(path, length)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        os.fsync(fh)

    def release(self, path: str, fh: int) -> None:
        os.close(fh)

    def statfs(self, path: str) -> dict[str, Any]:
        found = os.statvfs(path)
        return {name: getattr(found, name) for name in ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_files", "f_frsize")}

    def chmod(self, path: str, mode: int) -> None:
        raise fuse.FuseOSError(errno.ENOSYS)


if __name__ == "__main__":
    fuse.FUSE(Passthrough(sys.argv[1]), sys.argv[2], foreground=True, nothreads=True)
