"""`python recording_mount.py FOLDER MOUNT LOG`: a FUSE mount that shows FOLDER, and writes each change to LOG in its order.

A file or folder has a number in LOG, which is never used again. LOG has a line of JSON for each change; `helpers.crash_states`
reads it. A lookup of `.ack-NAME` in the root writes NAME to LOG: in this way a program records what it considers durable.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path
from typing import Any

import fuse

sys.path.insert(0, str(Path(__file__).parent))
from passthrough_mount import Passthrough

ACKNOWLEDGED = "/.ack-"


class Recording(Passthrough):
    """Makes each operation on the folder below, and records it once it has succeeded. One thread serves all calls."""

    def __init__(self, root: str, log: str) -> None:
        super().__init__(root)
        self._log = open(log, "a")
        self._numbers: dict[tuple[int, int], int] = {}
        self._next = 1
        self._number(os.lstat(root), is_new=True)

    def _number(self, found: os.stat_result, is_new: bool = False) -> int:
        """Return the number of a file or folder. The system may give a new file the inode of a deleted one."""
        key = found.st_dev, found.st_ino
        if is_new or key not in self._numbers:
            self._numbers[key] = self._next
            self._next += 1
        return self._numbers[key]

    def _place(self, path: str) -> tuple[int, str]:
        """Return the number of the folder of a path, and the name in it."""
        folder, name = os.path.split(path)
        return self._number(os.lstat(folder)), name

    def _record(self, kind: str, *values: Any) -> None:
        self._log.write(json.dumps([kind, *values]) + "\n")
        self._log.flush()

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        if path.startswith(self._root + ACKNOWLEDGED):
            self._record("acknowledged", path.removeprefix(self._root + ACKNOWLEDGED))
        return super().getattr(path, fh)

    def mkdir(self, path: str, mode: int) -> None:
        super().mkdir(path, mode)
        self._record("mkdir", *self._place(path), self._number(os.lstat(path), is_new=True))

    def rmdir(self, path: str) -> None:
        super().rmdir(path)
        self._record("remove", *self._place(path))

    def unlink(self, path: str) -> None:
        super().unlink(path)
        self._record("remove", *self._place(path))

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        self._record("rename", *self._place(old), *self._place(self._root + new))

    def link(self, target: str, source: str) -> None:
        super().link(target, source)
        self._record("link", *self._place(target), self._number(os.lstat(target)))

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        file = super().create(path, mode, fi)
        self._record("create", *self._place(path), self._number(os.fstat(file), is_new=True))
        return file

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        written = super().write(path, data, offset, fh)
        self._record("write", self._number(os.fstat(fh)), offset, base64.b64encode(data[:written]).decode())
        return written

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        super().truncate(path, length, fh)
        self._record("truncate", self._number(os.lstat(path)), length)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        self._record("fsync", self._number(os.fstat(fh)))

    def fsyncdir(self, path: str, datasync: int, fh: int) -> None:
        self._record("fsync", self._number(os.lstat(path)))


if __name__ == "__main__":
    fuse.FUSE(Recording(sys.argv[1], sys.argv[3]), sys.argv[2], foreground=True, nothreads=True)
