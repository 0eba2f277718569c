"""The class MountOperations, the file-system operations of a mounted namespace, as FUSE calls them."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.interfaces.folders import move_folder, remove_folder
from ckpt.aggregator.records.file_record import FileRecord, RecordHead
from ckpt.storage.base.errors import CkptError, error_number
from ckpt.tools.mount_file import MountFile
from ckpt.tools.mount_reader import MountReader

_HIDDEN_PREFIX = ".fuse_hidden"
"""The prefix of the name that libfuse gives an open file when it is removed or replaced, until it is closed."""

_FOLDER_SECONDS = 1.0
"""How long a folder is not looked up again, though another client may remove it. The kernel asks for each folder of a path."""
_MAX_FOLDERS = 10_000


@dataclass(frozen=True, slots=True)
class Ownership:
    """The owner and mode of every file and folder. A namespace stores neither. The kernel checks them at each access."""

    uid: int = field(default_factory=os.getuid)
    gid: int = field(default_factory=os.getgid)
    umask: int = 0o022

    def attributes(self, is_folder: bool) -> dict[str, int]:
        """Return mode and owner as stat attributes."""
        mode = stat.S_IFDIR | 0o777 if is_folder else stat.S_IFREG | 0o666
        return {"st_mode": mode & ~self.umask, "st_uid": self.uid, "st_gid": self.gid}


class MountOperations:
    """The file-system operations of a mounted namespace, as fusepy calls them. Each may raise OSError.

    Threads of FUSE call them at the same time.
    """

    def __init__(self, namespace: Namespace, root: str, ownership: Ownership | None = None) -> None:
        self._namespace = namespace
        self._root = root
        self._ownership = ownership or Ownership()
        self._handles: dict[int, MountReader | MountFile] = {}
        self._files_in_writing: dict[str, MountFile] = {}
        self._paths_in_change: Counter[str] = Counter()
        """How many threads change the file of a path. Until they have marked its open handles, nobody knows who changed it."""
        # By path: until when an entry is valid, and the attributes. Used without a lock: each entry is replaced as a whole,
        # and a lost one is looked up again.
        self._folders: dict[str, tuple[float, dict[str, float]]] = {}
        self._next_handle = 1
        self._lock = threading.Lock()
        """Guards `_next_handle` and `_paths_in_change`. Guards changes of `_handles` and `_files_in_writing`."""
        self._mounted_at = time.time()
        self.was_mounted = False
        """Whether the kernel has mounted the folder, also when it is unmounted by now."""

    def init(self, path: str) -> None:
        self.was_mounted = True

    def unsynced_files(self) -> list[str]:
        """Return the paths of the files with writes that are not durable."""
        with self._lock:
            return sorted(path for path, file in self._files_in_writing.items() if file.has_unsynced_writes)

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
            raise FuseOSError(error_number(error)) from error
        except OSError as error:
            raise FuseOSError(error.errno or errno.EIO) from error

    def _full_path(self, path: str) -> str:
        return "/".join(p for p in (self._root, path.strip("/")) if p)

    # --- attributes and listings -------------------------------------------------------------------------------

    def getattr(self, path: str, handle: int | None = None) -> dict[str, float]:
        full = self._full_path(path)
        writing = self._files_in_writing.get(full)
        if writing is not None:
            return self._stat_attributes("file", writing.length, time.time(), time.time())
        reader = None if handle is None else self._handles.get(handle)
        if isinstance(reader, MountReader):  # the length of the bytes that it reads
            reader.require_current()
            return self._file_attributes(reader.file.head)
        until, attributes = self._folders.get(full, (0.0, {}))
        if time.monotonic() < until:
            return attributes
        file = self._namespace.stat(full) if path != "/" else None
        if file is not None and file.head.kind == "file":
            self._notice(full, file)
            return self._file_attributes(file.head)
        if file is None and path != "/" and not self._namespace.list(full):
            raise OSError(errno.ENOENT, path)
        mounted_at = self._mounted_at
        found = self._stat_attributes("folder", 0, mounted_at, mounted_at) if file is None else self._file_attributes(file.head)
        if len(self._folders) >= _MAX_FOLDERS:
            self._folders.clear()
        self._folders[full] = time.monotonic() + _FOLDER_SECONDS, found
        return found

    def _file_attributes(self, head: RecordHead) -> dict[str, float]:
        return self._stat_attributes(head.kind, head.nbytes, head.created, head.modified)

    def _stat_attributes(self, kind: str, nbytes: int, created: float, modified: float) -> dict[str, float]:
        return {
            **self._ownership.attributes(kind == "folder"), "st_nlink": 2 if kind == "folder" else 1, "st_size": nbytes,
            "st_ctime": created, "st_mtime": modified, "st_atime": modified, "st_blocks": -(-nbytes // 512),
            "st_blksize": 1 << 20,
        }  # fmt: skip

    def readdir(self, path: str, handle: int) -> list[str]:
        full = self._full_path(path)
        skip = len(full) + 1 if full else 0
        return [".", "..", *sorted({name[skip:].partition("/")[0] for name in self._namespace.list(full)})]

    def statfs(self, path: str) -> dict[str, int]:
        calls = {name: open_member.info for name, open_member in self._namespace.open_members.items()}
        answers, _ = self._namespace.fan_out.ask(calls, self._namespace.config.credentials.deadline_seconds)
        overhead = self._namespace.config.redundancy.overhead
        free = int(sum(info.free_bytes or 0 for info in answers.values()) / overhead)
        used = int(sum(info.used_bytes or 0 for info in answers.values()) / overhead)
        unit = 4096
        return {"f_bsize": unit, "f_frsize": unit, "f_blocks": (free + used) // unit, "f_bfree": free // unit,
                "f_bavail": free // unit, "f_namemax": 255}  # fmt: skip

    # --- files -------------------------------------------------------------------------------------------------

    def open(self, path: str, flags: int) -> int:
        full = self._full_path(path)
        if flags & os.O_ACCMODE == os.O_RDONLY:
            reader = MountReader(self._namespace, full)
            self._notice(full, reader.file)
            return self._add_handle(reader)
        with self._lock:
            writing = self._files_in_writing.get(full)
        if writing is None:
            file = self._namespace.stat(full)
            if file is None or file.head.kind != "file":
                raise OSError(errno.ENOENT if file is None else errno.EISDIR, path)
            writing = MountFile(self._namespace, full, None if flags & os.O_TRUNC else file)
        return self._add_write_handle(full, writing)

    def create(self, path: str, mode: int, info: object = None) -> int:
        full = self._full_path(path)
        created = self._namespace.put(full, b"", new=True)
        self._discard_writes(full)  # those to a file that another client deleted during a write here
        return self._add_write_handle(full, MountFile(self._namespace, full, created))

    def truncate(self, path: str, length: int, handle: int | None = None) -> None:
        full = self._full_path(path)
        writing = self._files_in_writing.get(full) if handle is None else self._handles.get(handle)
        if isinstance(writing, MountFile):
            with self._change(writing.path):
                writing.truncate(length, replace=handle is None)  # without a handle, an open with O_TRUNC follows
            return
        file = self._namespace.stat(full)
        if file is None:
            raise OSError(errno.ENOENT, path)
        if length == file.head.nbytes:
            return
        if length:
            raise OSError(errno.EOPNOTSUPP, "a file can be emptied, but not resized")
        with self._change(full):
            self._namespace.put(full, b"")

    def read(self, path: str, size: int, offset: int, handle: int) -> bytes:
        reader = self._handles[handle]
        if not isinstance(reader, MountReader):
            raise OSError(errno.EBADF, path)
        writing = self._files_in_writing.get(reader.path)
        return reader.read(offset, size) if writing is None else writing.read(offset, size, reader)

    def write(self, path: str, data: bytes, offset: int, handle: int) -> int:
        writing = self._handles[handle]
        if not isinstance(writing, MountFile):
            raise OSError(errno.EBADF, path)
        return writing.write(data, offset)

    def flush(self, path: str, handle: int) -> None:
        """Make the writes durable and visible when a program closes the file; the program gets any error."""
        writing = self._handles.get(handle)
        if isinstance(writing, MountFile) and writing.has_unsynced_writes:
            with self._change(writing.path):
                writing.publish()

    def fsync(self, path: str, datasync: int, handle: int) -> None:
        """Make the writes durable and visible. After that, the file can be appended to, but not changed."""
        self.flush(path, handle)

    def release(self, path: str, handle: int) -> None:
        with self._lock:
            file = self._handles.pop(handle, None)
            if isinstance(file, MountFile):
                file.handles -= 1
                if file.handles:
                    return
                if self._files_in_writing.get(file.path) is file:
                    del self._files_in_writing[file.path]
        if isinstance(file, MountReader):
            file.close()
        elif file is not None:
            self._mark_outdated(file.path)
            file.discard()

    # --- names -------------------------------------------------------------------------------------------------

    def unlink(self, path: str) -> None:
        full = self._full_path(path)
        try:
            existed = self._namespace.delete([full])
        finally:
            self._folders.clear()  # a folder without a record disappears with its last file
        self._discard_writes(full)
        if not existed:
            raise OSError(errno.ENOENT, path)

    def mkdir(self, path: str, mode: int) -> None:
        self._namespace.make_folder(self._full_path(path))

    def rmdir(self, path: str) -> None:
        with suppress(FileNotFoundError):  # a folder without a record disappears with its last file
            try:
                remove_folder(self._namespace, self._full_path(path))
            finally:
                self._folders.clear()

    def rename(self, old: str, new: str) -> None:
        first, second = self._full_path(old), self._full_path(new)
        file = self._namespace.stat(first)
        try:
            if file is not None and file.head.kind == "file":
                self._rename_file(first, second)
            else:
                move_folder(self._namespace, first, second, self._rename_file)
        finally:
            self._folders.clear()

    def _rename_file(self, old: str, new: str) -> None:
        """Rename a file. If it is open for writing, earlier and later writes belong to the new name."""
        with self._lock:
            writing = self._files_in_writing.get(old)
        if writing is None:
            self._namespace.rename(old, new)
            self._rename_readers(old, new)
        elif new.rpartition("/")[2].startswith(_HIDDEN_PREFIX):
            writing.remove(new)
            self._rename_readers(old, new)
        else:
            with self._change(old):
                writing.rename(new)  # after it has made the writes visible
                self._rename_readers(old, new, is_changed=True)
        if old == new:
            return
        self._discard_writes(new)
        with self._lock:
            if writing is not None and writing.handles:
                self._files_in_writing[new] = self._files_in_writing.pop(old)

    def _rename_readers(self, old: str, new: str, is_changed: bool = False) -> None:
        for reader in self._readers(old):
            reader.rename(new, is_changed)

    def _readers(self, path: str) -> list[MountReader]:
        """Return the open files of a path that are read."""
        return [each for each in list(self._handles.values()) if isinstance(each, MountReader) and each.path == path]

    @contextmanager
    def _change(self, path: str) -> Iterator[None]:
        """Change the file of a path in the body, and let its open handles follow if that succeeds.

        Meanwhile, no other thread takes the change for one of another client.
        """
        with self._lock:
            self._paths_in_change[path] += 1
        try:
            yield
            self._mark_outdated(path)
        finally:
            with self._lock:
                self._paths_in_change[path] -= 1
                self._paths_in_change += Counter()  # removes zeros

    def _mark_outdated(self, path: str) -> None:
        """Let the open files of a path follow a change of this mount."""
        for reader in self._readers(path):
            reader.mark_outdated()

    def _notice(self, path: str, current: FileRecord) -> None:
        """Let the open files of a path follow to the file that it has now, before the kernel gets the length of that."""
        with self._lock:
            if path in self._paths_in_change:  # they follow when they are marked
                return
        for reader in self._readers(path):
            reader.notice(path, current)

    def _discard_writes(self, path: str) -> None:
        """Discard what is written to a deleted or replaced file through open handles."""
        with self._lock:
            writing = self._files_in_writing.pop(path, None)
        if writing is not None:
            writing.remove()

    # Copying programs call the next three. They have no effect.
    def chmod(self, path: str, mode: int) -> None: ...

    def chown(self, path: str, uid: int, gid: int) -> None: ...

    def utimens(self, path: str, times: object = None) -> None: ...

    def access(self, path: str, mode: int) -> int:
        self.getattr(path)
        return 0

    def _add_handle(self, file: MountReader | MountFile) -> int:
        with self._lock:
            handle, self._next_handle = self._next_handle, self._next_handle + 1
            self._handles[handle] = file
        return handle

    def _add_write_handle(self, path: str, writing: MountFile) -> int:
        """Return a new handle of a file that is being written. All its handles share one MountFile."""
        with self._lock:
            writing = self._files_in_writing.setdefault(path, writing)
            writing.handles += 1
        return self._add_handle(writing)
