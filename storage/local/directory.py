"""A directory as a store: O_DIRECT where the file system has it, and nothing visible before it is durable.

Order of a publish, and what a crash between two steps leaves: temporary file (swept later) → fsync of it (still
temporary) → rename or link to the name (whole, though perhaps not yet there after a power loss) → fsync of the folder.
After a failed fsync the kernel may have dropped the dirty pages (see "fsyncgate"), so it is never retried: the object
fails.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import functools
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from ckpt.storage.base.call_timeout import call_in_thread, can_block_on, interruptible
from ckpt.storage.base.errors import Changed, NotFound, StoreError
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.fd_io import AppendFile, DescriptorReader, convert_os_errors, in_page_cache, write_all
from ckpt.storage.base.store import (
    ALIGNMENT,
    Buffer,
    Entry,
    Reader,
    Store,
    Version,
    Writer,
    check_name,
    is_name,
    require_length,
)

T = TypeVar("T")

O_DIRECT = getattr(os, "O_DIRECT", 0)

_MAX_ADVICE_BYTES = 1 << 20
"""Linux takes no more of one advice than the device's largest request or its read-ahead, and forgets the rest."""


def _fsync(fd: int, path: str) -> None:
    with convert_os_errors("making durable", path):
        failpoint("local.fsync")
        os.fsync(fd)


def sync_folder(path: str) -> None:
    """Make the names in a folder durable."""
    with convert_os_errors("making durable", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _fsync(fd, path)
    finally:
        os.close(fd)


_durable_roots: set[str] = set()
"""Folders from the roots of stores upwards that this process has seen to be durable in their parents."""

_NO_FSYNC_ERRNOS = (errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EROFS)
"""A folder that this user can't open, or a file system that can't make a folder durable by itself."""


def _fsync_if_possible(folder: str) -> None:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in _NO_FSYNC_ERRNOS:
            raise


def _make_durable_root(root: str) -> None:
    """Make the root of a store and the folders above it, each durable in its parent, as far as the next mount point."""
    folder, chain = root, list[str]()
    while not (folder in _durable_roots and os.path.isdir(folder)) and folder != os.path.dirname(folder):
        chain.append(folder)
        folder = os.path.dirname(folder)
    for folder in reversed(chain):
        parent = os.path.dirname(folder)
        if not os.path.isdir(folder):
            with convert_os_errors("making the directory", folder), suppress(FileExistsError):
                _make_directory(folder)
            sync_folder(parent)
        elif _is_same_file_system(folder, parent):
            with convert_os_errors("making durable", parent):
                _fsync_if_possible(parent)
        _durable_roots.add(folder)


def _is_same_file_system(folder: str, parent: str) -> bool:
    """Whether a folder is part of its parent, and not the root of another file system."""
    with convert_os_errors("looking up", folder):
        return os.stat(folder).st_dev == os.stat(parent).st_dev


class LocalStore(Store):
    """A directory, made when first written to. `direct=False` keeps to buffered writes."""

    fences = True

    def __init__(self, path: str | os.PathLike[str], *, direct: bool = True) -> None:
        self.root = os.path.abspath(os.path.expanduser(path))
        self.url = Path(self.root).as_uri()
        self._direct = self.past_cache = direct and bool(O_DIRECT)
        self._durable_folders: set[str] = set()
        self._parallel_appends: int | None = None

    @property
    def parallel_appends(self) -> int:
        """Half as many for a disk of this machine, which takes each apart by itself. Other file systems have no device."""
        if self._parallel_appends is None:  # looked up once: a save asks for it in the training thread
            self._parallel_appends = self._find_parallel_appends()
        return self._parallel_appends

    @interruptible
    def _find_parallel_appends(self) -> int:
        folder = self.root
        while folder and not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        return 4 if os.major(os.stat(folder).st_dev) else super().parallel_appends

    # --- writing -----------------------------------------------------------------------------------------------

    @interruptible
    def put(self, name: str, data: Buffer) -> None:
        path, temporary = self._write_temporary(name, data)
        try:
            with convert_os_errors("publishing", path):
                self._publish_temporary(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        failpoint("local.put")
        with suppress(NotFound):  # who waited for it has taken it, and has deleted the folder: nothing is left to be durable
            sync_folder(os.path.dirname(path))

    @interruptible
    def put_new(self, name: str, data: Buffer) -> None:
        path, temporary = self._write_temporary(name, data)
        try:
            with convert_os_errors("publishing", path):
                self._publish_new_temporary(temporary, path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
        sync_folder(os.path.dirname(path))

    @interruptible
    def publish(self, name: str, data: Buffer, confirm: Callable[[], None], replaces: Version | None = None) -> None:
        """As in `Store`. The temporary file exists before `confirm`, so that a successor, whose sweep removes it, can't be
        overtaken: link(2) and rename(2) then find nothing to publish."""
        path, temporary = self._write_temporary(name, data)
        try:
            confirm()
            failpoint("local.publish")
            if replaces is not None:
                self._require_unchanged(name, replaces)
            with convert_os_errors("publishing", path):
                try:
                    (self._publish_new_temporary if replaces is None else self._publish_temporary)(temporary, path)
                except FileNotFoundError as error:
                    raise Changed(f"publishing {path}: another writer has removed what was prepared for it") from error
        finally:
            with suppress(OSError):
                os.unlink(temporary)
        with suppress(NotFound):
            sync_folder(os.path.dirname(path))

    def create(self, name: str, size_hint: int = 0) -> LocalWriter:
        path = self._path(name)
        self._make_folder(os.path.dirname(path))
        return LocalWriter(path, size_hint, self._direct, publish=self._publish_temporary)

    def _publish_temporary(self, temporary: str, path: str) -> None:
        os.replace(temporary, path)

    def _publish_new_temporary(self, temporary: str, path: str) -> None:
        _link_new(temporary, path)

    def _write_temporary(self, name: str, data: Buffer) -> tuple[str, str]:
        path = self._path(name)
        self._make_folder(os.path.dirname(path))
        temporary = temporary_name(path)
        with convert_os_errors("writing", path):
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            write_all(fd, memoryview(data).cast("B"), 0, path)
            _fsync(fd, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        finally:
            os.close(fd)
        return path, temporary

    def _make_folder(self, path: str) -> None:
        """Make a folder and its parents, each durable in its parent, as fsync(2) asks.

        Also those that exist: another process may have made them just now, and may end before its own fsync.
        """
        unknown = []
        while not (path in self._durable_folders and os.path.isdir(path)):
            unknown.append(path)
            if path == self.root:
                break
            path = os.path.dirname(path)
        for folder in reversed(unknown):
            if folder == self.root:
                _make_durable_root(folder)
            else:
                with convert_os_errors("making the directory", folder), suppress(FileExistsError):
                    _make_directory(folder)
                sync_folder(os.path.dirname(folder))
            self._durable_folders.add(folder)

    # --- reading -----------------------------------------------------------------------------------------------

    def get(self, name: str) -> bytes:
        return self._get(name, None)

    def get_up_to(self, name: str, limit: int) -> bytes:
        return self._get(name, limit)

    @interruptible
    def _get(self, name: str, limit: int | None) -> bytes:
        path = self._path(name)
        fd = _open_to_read(path)
        with os.fdopen(fd, "rb") as file, convert_os_errors("reading", path):
            require_length(f"{self.url}/{name}", os.fstat(fd).st_size, limit)
            return file.read()

    @interruptible
    def open(self, name: str) -> Reader:
        path = self._path(name)
        return DescriptorReader(_open_to_read(path), path)

    def open_once(self, name: str) -> Reader:
        path = self._path(name)
        fd = _open_to_read(path)
        # By its descriptor: another may have the name by now.
        return DescriptorReader(fd, path, _try_open_direct(f"/proc/self/fd/{fd}", os.O_RDONLY) if self._direct else None)

    @interruptible
    def descriptor(self, name: str) -> int:
        """An object, open for reading. The caller closes it."""
        return _open_to_read(self._path(name))

    @interruptible
    def prefetch(self, name: str, nbytes: int, start: int = 0) -> None:
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                fd = os.open(self._path(name), os.O_RDONLY)
                try:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # nothing but what is named below
                    end = start + nbytes
                    for position in range(start, end, _MAX_ADVICE_BYTES):
                        if not in_page_cache(fd, position):  # else the kernel would look for each page of it
                            os.posix_fadvise(fd, position, min(_MAX_ADVICE_BYTES, end - position), os.POSIX_FADV_WILLNEED)
                finally:
                    os.close(fd)

    @interruptible
    def exists(self, name: str) -> bool:
        return super().exists(name)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        return self._run_listing(self._walk(self._folder(prefix), f"{prefix}/" if prefix else ""))

    def _run_listing(self, found: Iterator[T]) -> Iterator[T]:
        """A listing: piece by piece, or as a whole in another thread."""
        if can_block_on(self.root):
            return found
        return iter(call_in_thread(partial(builtins.list, found), f"listing {self.root}"))

    def _walk(self, path: str, prefix: str) -> Iterator[Entry]:
        with convert_os_errors("listing", path), suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
            for entry in entries:
                if not is_name(entry.name):  # temporary, or not ours
                    continue
                with suppress(FileNotFoundError):  # deleted since the folder was read
                    if entry.is_dir(follow_symlinks=False):
                        yield from self._walk(entry.path, f"{prefix}{entry.name}/")
                    elif entry.is_file(follow_symlinks=False):
                        yield Entry(prefix + entry.name, entry.stat(follow_symlinks=False).st_size)

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        return self._run_listing(self._scan_folders(self._folder(prefix)))

    def _scan_folders(self, path: str) -> Iterator[str]:
        with convert_os_errors("listing", path), suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) and is_name(entry.name):
                    yield entry.name

    # --- deleting ----------------------------------------------------------------------------------------------

    @interruptible
    def delete(self, names: Iterable[str]) -> None:
        """Also removes the folders that become empty, and makes each batch durable."""
        folders = set()
        for name in names:
            path = self._path(name)
            # A folder, or a name below an object, is no object either.
            with convert_os_errors("deleting", path), suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                failpoint("local.delete")
                self._remove_file(path)
                folders.add(os.path.dirname(path))
        for folder in sorted(folders, key=len, reverse=True):
            if not self._remove_empty_folders(folder):
                sync_folder(folder)

    def _remove_file(self, path: str) -> None:
        os.unlink(path)

    @interruptible
    def sweep_temporaries(self, prefix: str) -> None:
        """Remove the temporary files that a killed writer left below `prefix`. Only for who holds the repository."""
        for base, _, files in os.walk(self._folder(prefix), topdown=False):
            for name in files:
                if is_temporary(name):
                    with suppress(NotFound), convert_os_errors("deleting", os.path.join(base, name)):
                        os.unlink(os.path.join(base, name))
            self._remove_empty_folders(base)

    def _remove_empty_folders(self, folder: str) -> bool:
        """Remove `folder` and then its parents below the root as long as they are empty; whether any was."""
        removed = False
        while folder != self.root and folder.startswith(self.root):
            try:
                os.rmdir(folder)
            except OSError:
                break
            self._durable_folders.discard(folder)
            removed = True
            folder = os.path.dirname(folder)
        if removed:
            with suppress(NotFound):
                sync_folder(folder)
        return removed

    # --- names -------------------------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return os.path.join(self.root, check_name(name))

    def _folder(self, prefix: str) -> str:
        return self._path(prefix) if prefix else self.root


_TEMPORARY_SUFFIX = ".ckpt-tmp"


def is_temporary(name: str) -> bool:
    """Whether a file of this name is half-written."""
    return name.startswith(".") and name.endswith(_TEMPORARY_SUFFIX)


def temporary_name(path: str) -> str:
    """A name beside `path` for a file that is not whole."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name[:150]}.{secrets.token_hex(6)}{_TEMPORARY_SUFFIX}")


def _link_new(temporary: str, path: str) -> None:
    """Publish under `path` unless it exists. link(2) fails on an existing name; rename(2) would replace it."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        # No hard links here (FAT, some FUSE mounts): take the name by an exclusive create, then fill it by rename.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        try:
            os.replace(temporary, path)
        except BaseException:
            os.unlink(path)
            raise


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
        self._file = AppendFile(fd, _try_open_direct(self._temporary, os.O_WRONLY) if direct else None, path)
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
        _fsync(self._file.fd, self._path)
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


def _try_open_direct(path: str, flags: int) -> int | None:
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


def _make_directory(folder: str) -> None:
    try:
        os.mkdir(folder)
    except FileNotFoundError as error:
        if os.path.isdir(os.path.dirname(folder)):
            raise PermissionError(errno.EPERM, "that file system takes no directories", folder) from error
        raise


@functools.cache
def _load_fallocate() -> Callable[[int, int, int, int], int] | None:
    """fallocate(2). Where a file system has none, posix_fallocate(3) writes a byte into every block instead."""
    try:
        found = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):  # not Linux
        return None
    found.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
    return found  # type: ignore[no-any-return]


def _open_to_read(path: str) -> int:
    """Open an object; a folder, and a name below an object, are none: NotFound, as in an object store."""
    with convert_os_errors("opening", path):
        try:
            fd = os.open(path, os.O_RDONLY)
        except NotADirectoryError as error:
            raise FileNotFoundError(errno.ENOENT, "no such file", path) from error
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, "a folder", path)
        return fd
