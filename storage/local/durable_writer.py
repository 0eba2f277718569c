"""The class LocalWriter, which writes a file under a temporary name, and gives it its name when it is durable.

The order of a durable write, and what a crash leaves after each step: write a temporary file (a sweep deletes it), fsync it
(the same), rename or link it to its name (the object is complete, but a power loss may undo the rename), fsync the folder.
`storage/base/fsync.py` explains why a failed fsync is never retried.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice

from ckpt.storage.base.errors import StoreError, is_transient
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.fd_io import AppendFile, convert_os_errors
from ckpt.storage.base.fsync import sync_file, sync_nearest_folder
from ckpt.storage.base.store import ALIGNMENT, TEMPORARY_SUFFIX, Writer

O_DIRECT = getattr(os, "O_DIRECT", 0)


def is_temporary(name: str) -> bool:
    """Return whether this is the name of a temporary file."""
    return name.startswith(".") and name.endswith(TEMPORARY_SUFFIX)


def walk_temporaries(folder: str, folders: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder with the names of its temporary files, the innermost first.

    folders: whether to yield the folders below `folder`, too.

    Raises StoreError if a folder can't be listed now, for example without a free descriptor. A folder that this user may not
    read, or that is damaged, is left out: it stops no other folder from being swept.
    """
    walk = os.walk(folder, topdown=not folders, onerror=_raise_if_transient)
    for base, _, names in walk if folders else islice(walk, 1):
        yield base, [name for name in names if is_temporary(name)]


def _raise_if_transient(error: OSError) -> None:
    if is_transient(error) and error.errno != errno.EIO:
        with convert_os_errors("listing", str(error.filename)):
            raise error


def temporary_name(path: str) -> str:
    """Return a new name for a temporary file in the folder of `path`."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name[:150]}.{secrets.token_hex(6)}{TEMPORARY_SUFFIX}")


def delete_temporaries_of(path: str) -> None:
    """Delete the temporary files that were made for this file and have not got its name, so that none gets it later."""
    folder, name = os.path.split(path)
    with convert_os_errors("deleting", folder), suppress(FileNotFoundError, NotADirectoryError):
        for found in os.listdir(folder):
            if found.startswith(f".{name[:150]}.") and is_temporary(found):
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(folder, found))


def link_new(temporary: str, path: str) -> None:
    """Give a temporary file the name `path` if that is free. link(2) fails if it exists; rename(2) would replace it."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        # Without hard links (FAT, some FUSE mounts), create the name exclusively, and then replace that file by rename.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        created = os.fstat(fd)
        os.close(fd)
        try:
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                found = os.stat(path)
                if os.path.samestat(found, created) and not found.st_size:  # it may be the file of a successor by now
                    os.unlink(path)
            raise


class LocalWriter(Writer):
    """Writes one file. Several threads may call `append` at once.

    size_hint: the expected number of bytes, which are reserved at once; NoSpace is raised if they do not fit.
    direct: whether to use O_DIRECT where the file system has it.
    reuse: moves a spare file of about the given size to the given path, and returns whether it had one.
    publish: gives the temporary file its name.
    """

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
        """Reserve disk space for an object of `nbytes` bytes in total; raise NoSpace if there is not enough."""
        # So a full disk is found before the first byte. On ext4, parallel O_DIRECT writes into reserved extents also need no
        # exclusive inode lock; writes that extend the file do.
        if nbytes > self._reserved_bytes:
            with convert_os_errors("reserving space for", self._path):
                _allocate(self._file.fd, self._reserved_bytes, nbytes - self._reserved_bytes)
            self._reserved_bytes = nbytes

    def descriptors(self) -> list[int]:
        """Return the descriptors through which another process may write the object, for buffered writes and for O_DIRECT.

        The second is missing without O_DIRECT. Afterwards `commit` needs the length of the object.
        """
        return [fd for fd in (self._file.fd, self._file.direct_fd) if fd is not None]

    def append(self, data: memoryview) -> int:
        data = data.cast("B")
        with self._file.reserve_range(len(data)) as position:
            self._file.write(data, position)
        return position

    def commit(self, length: int | None = None) -> int:
        """Make the object durable and visible, and return its length.

        length: the length in bytes if another process wrote through the descriptors; None otherwise.

        Raises StoreError if the file is shorter than that, or can't be made durable.
        """
        if length is None:
            length = self._file.length
        elif (written_bytes := os.fstat(self._file.fd).st_size) <= length - ALIGNMENT:  # an empty append may add less than that
            raise StoreError(f"{self._path} has {written_bytes} bytes instead of {length}; write it again")
        with convert_os_errors("setting the length of", self._path):
            os.ftruncate(self._file.fd, length)
        sync_file(self._file.fd, self._path)
        self._file.close()
        with convert_os_errors("publishing", self._path):
            failpoint("local.rename")
            self._publish(self._temporary, self._path)
        self._is_published = True
        sync_nearest_folder(os.path.dirname(self._path))
        return length

    def abort(self) -> None:
        if not self._is_published:
            with suppress(OSError):  # another process may keep the file open for long, so free its space now
                os.ftruncate(self._file.fd, 0)
            with suppress(OSError):
                os.unlink(self._temporary)
        self._file.close()


def try_open_direct(path: str, flags: int) -> int | None:
    """Return a descriptor with O_DIRECT, or None if the file system does not support it."""
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
    """Return fallocate(2), or None. posix_fallocate(3) won't do: it may write a byte into every block of the file."""
    try:
        found = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):  # not Linux
        return None
    found.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
    return found  # type: ignore[no-any-return]
