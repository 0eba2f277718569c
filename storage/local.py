"""A directory as a store: O_DIRECT where the file system has it, and nothing visible before it is durable.

Order of a publish, and what a crash between two steps leaves: temporary file (swept later) → fsync of it (still
temporary) → rename or link to the name (whole, though perhaps not yet there after a power loss) → fsync of the folder.
After a failed fsync the kernel may have dropped the dirty pages (see "fsyncgate"), so it is never retried: the object
fails.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt.storage.base import ALIGNMENT, Buffer, Entry, Reader, Store, Writer, check_name, is_name
from ckpt.storage.errors import AlreadyExists, NoSpace, NotFound, StoreError
from ckpt.storage.failpoints import failpoint

O_DIRECT = getattr(os, "O_DIRECT", 0)

_ADVICE = {
    errno.ENOSPC: "the disk is full: free space or keep fewer steps",
    errno.EDQUOT: "the disk quota is used up: free space or keep fewer steps",
    errno.EACCES: "permission denied: check the owner and mode of the directory",
    errno.EPERM: "not permitted: check the owner and mode of the directory",
    errno.EROFS: "the file system is read-only",
    errno.EIO: "the device reported an I/O error: check the disk",
    errno.ENAMETOOLONG: "the path is too long for this file system",
}


@contextmanager
def _told(doing: str, path: str) -> Iterator[None]:
    """Turn an OSError into a StoreError that says what was being done and where."""
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"{doing} {path}: no such file") from error
    except FileExistsError as error:
        raise AlreadyExists(f"{doing} {path}: it exists already") from error
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "see the cause")
        kind = NoSpace if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreError
        raise kind(f"{doing} {path} failed: {error.strerror or error}; {advice}") from error


def _fsync(fd: int, path: str) -> None:
    with _told("making durable", path):
        failpoint("local.fsync")
        os.fsync(fd)


def _fsync_folder(path: str) -> None:
    with _told("making durable", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _fsync(fd, path)
    finally:
        os.close(fd)


class LocalStore(Store):
    """A directory, made when first written to. `direct=False` keeps to buffered writes."""

    def __init__(self, path: str | os.PathLike[str], *, direct: bool = True) -> None:
        self.root = os.path.abspath(os.path.expanduser(path))
        self.url = Path(self.root).as_uri()
        self._direct = direct and bool(O_DIRECT)
        self._folders: set[str] = set()

    # --- writing -----------------------------------------------------------------------------------------------

    def put(self, name: str, data: Buffer) -> None:
        path, temporary = self._put_temporary(name, data)
        try:
            with _told("publishing", path):
                os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        failpoint("local.put")
        with suppress(NotFound):  # who waited for it has taken it, and has deleted the folder: nothing is left to be durable
            _fsync_folder(os.path.dirname(path))

    def put_new(self, name: str, data: Buffer) -> None:
        path, temporary = self._put_temporary(name, data)
        try:
            with _told("publishing", path):
                _link_new(temporary, path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
        _fsync_folder(os.path.dirname(path))

    def create(self, name: str, size_hint: int = 0) -> Writer:
        path = self._path(name)
        self._make_folder(os.path.dirname(path))
        return LocalWriter(path, size_hint, self._direct)

    def _put_temporary(self, name: str, data: Buffer) -> tuple[str, str]:
        path = self._path(name)
        self._make_folder(os.path.dirname(path))
        temporary = temporary_name(path)
        with _told("writing", path):
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            _write_all(fd, memoryview(data).cast("B"), 0, path)
            _fsync(fd, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        finally:
            os.close(fd)
        return path, temporary

    def _make_folder(self, path: str) -> None:
        """Make a folder and its parents, each durable in its parent, as fsync(2) asks."""
        if path in self._folders and os.path.isdir(path):
            return
        missing = []
        parent = path
        while not os.path.isdir(parent):
            missing.append(parent)
            parent = os.path.dirname(parent)
        for folder in reversed(missing):
            with _told("making the directory", folder), suppress(FileExistsError):
                os.mkdir(folder)
            _fsync_folder(os.path.dirname(folder))
        self._folders.add(path)

    # --- reading -----------------------------------------------------------------------------------------------

    def get(self, name: str) -> bytes:
        path = self._path(name)
        fd = _open_to_read(path)
        with os.fdopen(fd, "rb") as file, _told("reading", path):
            return file.read()

    def open(self, name: str) -> Reader:
        return _LocalReader(self._path(name))

    def prefetch(self, name: str, nbytes: int) -> None:
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                fd = os.open(self._path(name), os.O_RDONLY)
                try:
                    os.posix_fadvise(fd, 0, nbytes, os.POSIX_FADV_WILLNEED)
                finally:
                    os.close(fd)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        yield from self._walk(self._folder(prefix), f"{prefix}/" if prefix else "")

    def _walk(self, path: str, prefix: str) -> Iterator[Entry]:
        with _told("listing", path), suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
            for entry in entries:
                if not is_name(entry.name):  # temporary, or not ours
                    continue
                with suppress(FileNotFoundError):  # deleted since the folder was read
                    if entry.is_dir(follow_symlinks=False):
                        yield from self._walk(entry.path, f"{prefix}{entry.name}/")
                    elif entry.is_file(follow_symlinks=False):
                        yield Entry(prefix + entry.name, entry.stat(follow_symlinks=False).st_size)

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        path = self._folder(prefix)
        with _told("listing", path), suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) and is_name(entry.name):
                    yield entry.name

    # --- deleting ----------------------------------------------------------------------------------------------

    def delete(self, names: Iterable[str]) -> None:
        """Also removes the folders that become empty, and makes each batch durable."""
        folders = set()
        for name in names:
            path = self._path(name)
            # A folder, or a name below an object, is no object either.
            with _told("deleting", path), suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                failpoint("local.delete")
                self._remove(path)
                folders.add(os.path.dirname(path))
        for folder in sorted(folders, key=len, reverse=True):
            if not self._remove_empty(folder):
                _fsync_folder(folder)

    def _remove(self, path: str) -> None:
        os.unlink(path)

    def sweep_temporaries(self, prefix: str) -> None:
        """Remove the temporary files that a killed writer left below `prefix`. Only for who holds the repository."""
        for base, _, files in os.walk(self._folder(prefix), topdown=False):
            for name in files:
                if is_temporary(name):
                    with suppress(NotFound), _told("deleting", os.path.join(base, name)):
                        os.unlink(os.path.join(base, name))
            self._remove_empty(base)

    def _remove_empty(self, folder: str) -> bool:
        """Remove `folder` and then its parents below the root as long as they are empty; whether any was."""
        removed = False
        while folder != self.root and folder.startswith(self.root):
            try:
                os.rmdir(folder)
            except OSError:
                break
            self._folders.discard(folder)
            removed = True
            folder = os.path.dirname(folder)
        if removed:
            with suppress(NotFound):
                _fsync_folder(folder)
        return removed

    # --- names -------------------------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return os.path.join(self.root, check_name(name))

    def _folder(self, prefix: str) -> str:
        return self._path(prefix) if prefix else self.root


_SUFFIX = ".ckpt-tmp"


def is_temporary(name: str) -> bool:
    """Whether a file of this name is half-written."""
    return name.startswith(".") and name.endswith(_SUFFIX)


def temporary_name(path: str) -> str:
    """A name beside `path` for a file that is not whole."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name[:150]}.{secrets.token_hex(6)}{_SUFFIX}")


def _link_new(temporary: str, path: str) -> None:
    """Publish under `path` unless it exists. link(2) fails on an existing name; rename(2) would replace it."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        # No hard links here (FAT, some FUSE mounts): take the name by an exclusive create, then fill it by rename.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        os.replace(temporary, path)


def _write_all(fd: int, data: memoryview, position: int, path: str) -> None:
    with _told("writing", path):
        while data:
            written = os.pwrite(fd, data, position)
            data, position = data[written:], position + written


class LocalWriter(Writer):
    """reuse: puts a file whose pages may be written over at a path, if it has one."""

    def __init__(
        self, path: str, size_hint: int, direct: bool, reuse: Callable[[str, int], bool] | None = None
    ) -> None:
        self._path = path
        self._temporary = temporary_name(path)
        self._lock = threading.Lock()
        self._end = 0
        self._length = 0
        self._direct_fd: int | None = None
        self._direct = direct
        self._published = False
        with _told("creating", path):
            reused = reuse is not None and reuse(self._temporary, size_hint)
            self._fd = os.open(self._temporary, os.O_WRONLY | (0 if reused else os.O_CREAT | os.O_EXCL), 0o666)
            self._direct_fd = _open_direct(self._temporary) if direct else None
        try:
            if size_hint:
                # Reserved now: a full disk is found before the first byte, and parallel O_DIRECT writes into
                # unwritten extents need no exclusive inode lock, as writes that extend the file do on ext4.
                with _told("reserving space for", path):
                    _reserve(self._fd, size_hint)
        except BaseException:
            self.abort()
            raise

    def append(self, data: memoryview) -> int:
        padded = -(-len(data) // ALIGNMENT) * ALIGNMENT
        with self._lock:
            position = self._end
            self._end += padded
            self._length = max(self._length, position + len(data))
        with _told("writing", self._path):
            failpoint("local.append")
        if self._direct and self._direct_fd is not None and padded == len(data):
            if _try_direct(self._direct_fd, data, position, self._path):
                return position
            # This memory or file system refuses O_DIRECT: buffered from now on. The descriptor stays open until the
            # end, for another thread may be writing through it: closed here, its number could be another file's.
            self._direct = False
        _write_all(self._fd, data, position, self._path)
        return position

    def commit(self) -> int:
        with _told("cutting to length", self._path):
            os.ftruncate(self._fd, self._length)
        _fsync(self._fd, self._path)
        self._close()
        with _told("publishing", self._path):
            failpoint("local.rename")
            os.replace(self._temporary, self._path)
        self._published = True
        _fsync_folder(os.path.dirname(self._path))
        return self._length

    def abort(self) -> None:
        self._close()
        if not self._published:
            with suppress(OSError):
                os.unlink(self._temporary)

    def _close(self) -> None:
        fd, direct_fd, self._fd, self._direct_fd = self._fd, self._direct_fd, -1, None
        if fd >= 0:
            os.close(fd)
        if direct_fd is not None:
            os.close(direct_fd)


def _open_direct(path: str) -> int | None:
    try:
        return os.open(path, os.O_WRONLY | O_DIRECT)
    except OSError:  # tmpfs before Linux 6.6, some network and FUSE file systems
        return None


def _try_direct(fd: int, data: memoryview, position: int, path: str) -> bool:
    """Write all of `data` through O_DIRECT; False where memory or file system do not allow it."""
    try:
        written = os.pwrite(fd, data, position)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        with _told("writing", path):
            raise
    if written < len(data):
        # A short direct write ends where the device stopped, most often for lack of space: the next call tells.
        _write_all(fd, data[written:], position + written, path)
    return True


def _reserve(fd: int, nbytes: int) -> None:
    fallocate = _fallocate()
    if fallocate is not None and fallocate(fd, 0, 0, nbytes):
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise OSError(number, os.strerror(number))


@functools.cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    """fallocate(2). Where a file system has none, posix_fallocate(3) writes a byte into every block instead."""
    try:
        found = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):  # not Linux
        return None
    found.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
    return found  # type: ignore[no-any-return]


def _open_to_read(path: str) -> int:
    """Open an object; a folder, and a name below an object, are none: NotFound, as in an object store."""
    with _told("opening", path):
        try:
            fd = os.open(path, os.O_RDONLY)
        except NotADirectoryError as error:
            raise FileNotFoundError(errno.ENOENT, "no such file", path) from error
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, "a folder", path)
        return fd


class _LocalReader(Reader):
    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = _open_to_read(path)
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # twice the read-ahead: packs are mostly read in order
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def read_into(self, position: int, buffer: memoryview) -> int:
        done = 0
        with _told("reading", self._path):
            while done < len(buffer):
                count = os.preadv(self._fd, [buffer[done:]], position + done)
                if not count:
                    break
                done += count
        return done

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
