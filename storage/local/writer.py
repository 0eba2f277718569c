"""A file that is being written under a temporary name, beside the name that it gets once it is whole and durable."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import secrets
from collections.abc import Callable
from contextlib import suppress

from ckpt.storage.base.errors import StoreError
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.fd_io import AppendFile, convert_os_errors
from ckpt.storage.base.store import ALIGNMENT, Writer
from ckpt.storage.local.durability import sync_file, sync_folder

O_DIRECT = getattr(os, "O_DIRECT", 0)

_TEMPORARY_SUFFIX = ".ckpt-tmp"


def is_temporary(name: str) -> bool:
    """Whether a file of this name is half-written."""
    return name.startswith(".") and name.endswith(_TEMPORARY_SUFFIX)


def temporary_name(path: str) -> str:
    """A name beside `path` for a file that is not whole."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name[:150]}.{secrets.token_hex(6)}{_TEMPORARY_SUFFIX}")


class LocalWriter(Writer):
    """reuse: puts a file whose pages may be written over at a path, if it has one. publish: gives a whole file its name."""

    def __init__(
        self, path: str, size_hint: int, direct: bool, reuse: Callable[[str, int], bool] | None = None,
        publish: Callable[[str, str], None] = os.replace,
    ) -> None:  # fmt: skip
        self._path = path
        self._publish = publish
        self._temporary = temporary_name(path)
        self._reserved_bytes = 0
        self._is_published = False
        with convert_os_errors("creating", path):
            reused = reuse is not None and reuse(self._temporary, size_hint)
            fd = os.open(self._temporary, os.O_WRONLY | (0 if reused else os.O_CREAT | os.O_EXCL), 0o666)
        self._file = AppendFile(fd, try_open_direct(self._temporary, os.O_WRONLY) if direct else None, path)
        try:
            self.reserve(size_hint)
        except BaseException:
            self.abort()
            raise

    def reserve(self, nbytes: int) -> None:
        """Take so many bytes of the disk, for all of the object. Raises NoSpace."""
        # A full disk is found before the first byte, and parallel O_DIRECT writes into unwritten extents need no
        # exclusive inode lock, as writes that extend the file do on ext4.
        if nbytes > self._reserved_bytes:
            with convert_os_errors("reserving space for", self._path):
                _allocate(self._file.fd, self._reserved_bytes, nbytes - self._reserved_bytes)
            self._reserved_bytes = nbytes

    def descriptors(self) -> list[int]:
        """For another process to write the object through, which then says to `commit` how long it is: one for buffered
        writes and, where there is that, one for O_DIRECT."""
        return [fd for fd in (self._file.fd, self._file.direct_fd) if fd is not None]

    def append(self, data: memoryview) -> int:
        with self._file.reserve_range(len(data)) as position:
            self._file.write(data, position)
        return position

    def commit(self, length: int | None = None) -> int:
        """length: of what was written through the descriptors."""
        if length is None:
            length = self._file.length
        elif (written_bytes := os.fstat(self._file.fd).st_size) <= length - ALIGNMENT:  # less is what an empty append adds
            raise StoreError(f"{self._path} has {written_bytes} bytes, {length} were to be written; write it anew")
        with convert_os_errors("cutting to length", self._path):
            os.ftruncate(self._file.fd, length)
        sync_file(self._file.fd, self._path)
        self._file.close()
        with convert_os_errors("publishing", self._path):
            failpoint("local.rename")
            self._publish(self._temporary, self._path)
        self._is_published = True
        sync_folder(os.path.dirname(self._path))
        return length

    def abort(self) -> None:
        if not self._is_published:
            with suppress(OSError):  # another process may keep it open for long: its bytes go now
                os.ftruncate(self._file.fd, 0)
            with suppress(OSError):
                os.unlink(self._temporary)
        self._file.close()


def try_open_direct(path: str, flags: int) -> int | None:
    """A descriptor for O_DIRECT; None where the file system has none."""
    try:
        return os.open(path, flags | O_DIRECT)
    except OSError:  # tmpfs before Linux 6.6, some network and FUSE file systems
        return None


def _allocate(fd: int, start: int, nbytes: int) -> None:
    fallocate = _load_fallocate()
    if fallocate is not None and fallocate(fd, 0, start, nbytes):
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise OSError(number, os.strerror(number))


@functools.cache
def _load_fallocate() -> Callable[[int, int, int, int], int] | None:
    """fallocate(2). Where a file system has none, posix_fallocate(3) writes a byte into every block instead."""
    try:
        found = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):  # not Linux
        return None
    found.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
    return found  # type: ignore[no-any-return]
