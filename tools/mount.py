"""ckpt-mount: a namespace as a directory, through FUSE.

Each byte of a file is written once, in any order, and is there, durably, when the file is closed. What would change a file
that is there is refused (EOPNOTSUPP); replacing it and writing on at its end are not. Closing tells where that failed.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

import ckpt
from ckpt.aggregator.files import INLINE_BYTES, File, Head
from ckpt.aggregator.namespace import Namespace, open_namespace
from ckpt.aggregator.reading import FileReader
from ckpt.aggregator.writing import FileWriter
from ckpt.storage.errors import AlreadyExists, CkptError, InvalidName, NoSpace, NotFound, Refused, Unavailable
from ckpt.tools import common

_PIECE_BYTES = 8 << 20
_WINDOWS = 32
"""Parts of a file that may be incomplete at a time; each takes 8 MiB."""
_NUMBERS = (
    (NotFound, errno.ENOENT), (AlreadyExists, errno.EEXIST), (InvalidName, errno.EINVAL), (NoSpace, errno.ENOSPC),
    (Refused, errno.EACCES), (Unavailable, errno.EHOSTDOWN),
)  # fmt: skip


class _Window:
    """A part of a file in memory, until all of it was written."""

    def __init__(self) -> None:
        self.data = bytearray(_PIECE_BYTES)
        self.filled: list[tuple[int, int]] = []  # in order, apart from each other

    def put(self, begin: int, data: bytes) -> bool:
        """Take bytes; whether the window is full now."""
        end = begin + len(data)
        self.data[begin:end] = data
        apart = [(b, e) for b, e in self.filled if e < begin or b > end]
        touching = [(b, e) for b, e in self.filled if not (e < begin or b > end)]
        merged = (min([begin, *(b for b, _ in touching)]), max([end, *(e for _, e in touching)]))
        self.filled = sorted([*apart, merged])
        return self.filled == [(0, _PIECE_BYTES)]


class _Writing:
    """A file that is being written, in any order, each byte once. Every close of it makes visible what there is."""

    def __init__(self, namespace: Namespace, path: str, there: File | None) -> None:
        self._namespace = namespace
        self._path = path
        self._there = there
        self._writer: FileWriter | None = None
        self._windows: dict[int, _Window] = {}
        self._stored: set[int] = set()  # windows that are full and gone to the members
        self._solid = 0 if there is None else there.head.nbytes  # nothing below can be changed any more
        self.length = self._solid
        self._dirty = False
        self.handles = 0
        self.lock = threading.Lock()

    def write(self, data: bytes, offset: int) -> int:
        with self.lock:
            if offset < self._solid:
                raise OSError(errno.EOPNOTSUPP, "what a file has can't be changed")
            self._dirty = True
            done = 0
            while done < len(data):
                number, begin = divmod(offset + done, _PIECE_BYTES)
                part = data[done : done + _PIECE_BYTES - begin]
                if number in self._stored or (number not in self._windows and len(self._windows) >= _WINDOWS):
                    raise OSError(errno.EOPNOTSUPP, "each byte is written once, and not in too many places at a time")
                if self._windows.setdefault(number, _Window()).put(begin, part):
                    self._store(number)
                done += len(part)
            self.length = max(self.length, offset + len(data))
        return len(data)

    def cut(self, length: int) -> None:
        """ftruncate: longer, or shorter as far as nothing of it is visible yet."""
        with self.lock:
            if length < self._solid:
                raise OSError(errno.EOPNOTSUPP, "a file can be emptied, not cut")
            self._dirty = self._dirty or length != self.length
            self.length = length

    def publish(self) -> None:
        """Make visible, durably, what was written."""
        with self.lock:
            if not self._dirty:
                return
            there = self._there
            small = there is None or there.layout is None
            if self.length <= INLINE_BYTES and small and not self._stored:
                window = self._windows.get(0)
                content = bytes(there.data or b"") if there is not None else b""
                data = bytearray(window.data[: self.length] if window is not None else bytes(self.length))
                data[: len(content)] = content
                self._there = self._namespace.put(self._path, data)
                self._windows.clear()
            else:
                for number in sorted(self._windows):
                    self._store(number)
                writer = self._begun()
                writer.cut(self.length)
                self._there = writer.publish()
                self._writer = None
            self._solid = self.length
            self._stored.clear()
            self._dirty = False

    def _store(self, number: int) -> None:
        window = self._windows.pop(number)
        if not window.filled:
            return
        begin = max(window.filled[0][0], self._solid - number * _PIECE_BYTES)
        end = window.filled[-1][1]
        self._begun().write_at(number * _PIECE_BYTES + begin, memoryview(window.data)[begin:end])
        if window.filled == [(0, _PIECE_BYTES)]:
            self._stored.add(number)

    def _begun(self) -> FileWriter:
        if self._writer is None:
            self._writer = self._namespace.create(self._path, aligned=False, base=self._there)
        return self._writer

    def end(self) -> None:
        """Throw away what could not be made visible."""
        if self._writer is not None:
            self._writer.abort()


class Tree:
    """The operations of a mounted namespace, in the terms of fusepy."""

    def __init__(self, namespace: Namespace, root: str) -> None:
        self._namespace = namespace
        self._root = root
        self._open: dict[int, FileReader | _Writing] = {}
        self._written: dict[str, _Writing] = {}
        self._next = 1
        self._lock = threading.Lock()
        self._began = time.time()

    def __call__(self, operation: str, *args: Any) -> Any:
        from fuse import FuseOSError

        work: Callable[..., Any] | None = getattr(self, operation, None)
        if work is None:
            raise FuseOSError(errno.ENOSYS)
        try:
            return work(*args)
        except FuseOSError:
            raise
        except CkptError as error:
            number = next((n for kind, n in _NUMBERS if isinstance(error, kind)), errno.EIO)
            raise FuseOSError(number) from error
        except OSError as error:
            raise FuseOSError(error.errno or errno.EIO) from error

    def _path(self, path: str) -> str:
        return "/".join(p for p in (self._root, path.strip("/")) if p)

    # --- looking -----------------------------------------------------------------------------------------------

    def getattr(self, path: str, handle: int | None = None) -> dict[str, Any]:
        full = self._path(path)
        writing = self._written.get(full)
        if writing is not None:
            return self._attributes("file", writing.length, time.time(), time.time())
        if path != "/":
            file = self._namespace.stat(full)
            if file is not None:
                return self._of(file.head)
        if path != "/" and not self._namespace.list(full):
            raise OSError(errno.ENOENT, path)
        return self._attributes("folder", 0, self._began, self._began)

    def _of(self, head: Head) -> dict[str, Any]:
        return self._attributes(head.kind, head.nbytes, head.created, head.modified)

    def _attributes(self, kind: str, nbytes: int, created: float, modified: float) -> dict[str, Any]:
        mode = stat.S_IFDIR | 0o755 if kind == "folder" else stat.S_IFREG | 0o644
        return {
            "st_mode": mode, "st_nlink": 2 if kind == "folder" else 1, "st_size": nbytes, "st_ctime": created,
            "st_mtime": modified, "st_atime": modified, "st_uid": os.getuid(), "st_gid": os.getgid(),
            "st_blocks": -(-nbytes // 512), "st_blksize": 1 << 20,
        }  # fmt: skip

    def readdir(self, path: str, handle: int) -> list[str]:
        full = self._path(path)
        skip = len(full) + 1 if full else 0
        return [".", "..", *sorted({name[skip:].partition("/")[0] for name in self._namespace.list(full)})]

    def statfs(self, path: str) -> dict[str, int]:
        calls = {name: place.info for name, place in self._namespace.places.items()}
        answers, _ = self._namespace.fan_out.ask(calls, self._namespace.config.access.deadline_seconds)
        overhead = self._namespace.config.redundancy.overhead
        free = int(sum(info.free_bytes or 0 for info in answers.values()) / overhead)
        used = int(sum(info.used_bytes or 0 for info in answers.values()) / overhead)
        unit = 4096
        return {"f_bsize": unit, "f_frsize": unit, "f_blocks": (free + used) // unit, "f_bfree": free // unit,
                "f_bavail": free // unit, "f_namemax": 255}  # fmt: skip

    # --- files -------------------------------------------------------------------------------------------------

    def open(self, path: str, flags: int) -> int:
        full = self._path(path)
        if flags & os.O_ACCMODE == os.O_RDONLY:
            return self._keep(self._namespace.open(full))
        with self._lock:
            writing = self._written.get(full)
        if writing is None:
            there = self._namespace.stat(full)
            writing = _Writing(self._namespace, full, None if flags & os.O_TRUNC else there)
        return self._join(full, writing)

    def create(self, path: str, mode: int, info: Any = None) -> int:
        full = self._path(path)
        self._namespace.put(full, b"", new=True)
        return self._join(full, _Writing(self._namespace, full, None))

    def truncate(self, path: str, length: int, handle: int | None = None) -> None:
        full = self._path(path)
        writing = self._written.get(full)
        if writing is not None:
            writing.cut(length)
            return
        file = self._namespace.stat(full)
        if file is None:
            raise OSError(errno.ENOENT, path)
        if length == file.head.nbytes:
            return
        if length:
            raise OSError(errno.EOPNOTSUPP, "a file can be emptied, not cut")
        self._namespace.put(full, b"")

    def read(self, path: str, size: int, offset: int, handle: int) -> bytes:
        reader = self._open[handle]
        if not isinstance(reader, FileReader):
            raise OSError(errno.EBADF, path)
        data = bytearray(size)
        return bytes(data[: reader.read_into(offset, memoryview(data))])

    def write(self, path: str, data: bytes, offset: int, handle: int) -> int:
        writing = self._open[handle]
        if not isinstance(writing, _Writing):
            raise OSError(errno.EBADF, path)
        return writing.write(data, offset)

    def flush(self, path: str, handle: int) -> None:
        """Close: the only call whose error the program sees."""
        writing = self._open.get(handle)
        if isinstance(writing, _Writing):
            writing.publish()

    def fsync(self, path: str, datasync: int, handle: int) -> None:
        """What is written is durable when the file is closed, which can't be done before its end is known."""

    def release(self, path: str, handle: int) -> None:
        with self._lock:
            held = self._open.pop(handle, None)
            if isinstance(held, _Writing):
                held.handles -= 1
                if held.handles:
                    return
                if self._written.get(self._path(path)) is held:
                    del self._written[self._path(path)]
        if isinstance(held, FileReader):
            held.close()
        elif held is not None:
            held.end()

    # --- names -------------------------------------------------------------------------------------------------

    def unlink(self, path: str) -> None:
        if not self._namespace.delete([self._path(path)]):
            raise OSError(errno.ENOENT, path)

    def mkdir(self, path: str, mode: int) -> None:
        self._namespace.make_folder(self._path(path))

    def rmdir(self, path: str) -> None:
        full = self._path(path)
        if self._namespace.list(full):
            raise OSError(errno.ENOTEMPTY, path)
        self._namespace.delete([full])

    def rename(self, old: str, new: str) -> None:
        first, second = self._path(old), self._path(new)
        file = self._namespace.stat(first)
        if file is not None and file.head.kind == "file":
            self._namespace.rename(first, second)
            return
        below = self._namespace.list(first)
        if file is None and not below:
            raise OSError(errno.ENOENT, old)
        self._namespace.make_folder(second)
        for name, head in below.items():
            target = second + name[len(first) :]
            if head.kind == "file":
                self._namespace.rename(name, target)
            else:
                self._namespace.make_folder(target)
        self._namespace.delete([*(n for n, h in below.items() if h.kind == "folder"), first])

    # What a copying program asks for, and nothing here depends on.
    def chmod(self, path: str, mode: int) -> None: ...

    def chown(self, path: str, uid: int, gid: int) -> None: ...

    def utimens(self, path: str, times: Any = None) -> None: ...

    def access(self, path: str, mode: int) -> int:
        self.getattr(path)
        return 0

    def _keep(self, what: FileReader | _Writing) -> int:
        with self._lock:
            handle, self._next = self._next, self._next + 1
            self._open[handle] = what
        return handle

    def _join(self, path: str, writing: _Writing) -> int:
        """Another handle of a file that is being written: all of them write one file."""
        with self._lock:
            writing = self._written.setdefault(path, writing)
            writing.handles += 1
        return self._keep(writing)


@contextmanager
def mounted(url: str, folder: Path, options: dict[str, Any]) -> Iterator[None]:
    """Serve until the folder is unmounted."""
    try:
        import fuse
    except (ImportError, OSError) as error:
        raise CkptError(
            f'mounting needs FUSE ({error}): pip install "ckpt-store[mount]", and libfuse2 and fuse3 of the system'
        ) from error
    namespace, root = open_namespace(url)
    _ = namespace.ring  # whether the nodes are there is told now
    try:
        fuse.FUSE(Tree(namespace, root), str(folder), **options)
    except RuntimeError as error:
        told = f"mounting {url} at {folder} failed; see what FUSE says above, and that /dev/fuse may be used"
        raise CkptError(told) from error
    yield


@click.command(
    "ckpt-mount",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  ckpt-mount ckpt://host1:7070,host2:7070/ /mnt/ckpt
  fusermount3 -u /mnt/ckpt                      to end it""",
)
@click.argument("url")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--background", is_flag=True, help="Return when it is mounted.")
@click.option("--allow-other", is_flag=True, help="Other users may look, too (see fuse.conf).")
@click.version_option(ckpt.__version__, package_name="ckpt-store")
def command(url: str, folder: Path, background: bool, allow_other: bool) -> int:
    """Show the namespace at URL as the directory FOLDER.

    Each byte of a file is written once, and is there when the file is closed. Files can be replaced, renamed, removed and
    written on at their end; what would change what they have is refused (EOPNOTSUPP).
    """
    options = {"foreground": not background, "fsname": "ckpt", "subtype": "ckpt", "big_writes": True}
    if allow_other:
        options["allow_other"] = True
    with mounted(url, folder, options):
        pass
    return 0


def main() -> None:
    """The console script."""
    common.run(command)


if __name__ == "__main__":
    main()
