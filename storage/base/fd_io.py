"""Read and write through open file descriptors, past the page cache where that is faster."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pickle import PickleBuffer

from ckpt.storage.base.errors import AlreadyExists, NoSpace, NotFound, Refused, StoreError, Unavailable
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.file_system_kind import depends_on_a_server
from ckpt.storage.base.page_cache import in_page_cache, read_cached
from ckpt.storage.base.store import ALIGNMENT, Reader

_ADVICE_BY_ERRNO = {
    errno.ENOSPC: "the disk is full: free space or keep fewer steps",
    errno.EDQUOT: "the disk quota is used up: free space or keep fewer steps",
    errno.EACCES: "check its owner and mode, and those of its folder",
    errno.EPERM: "check its owner and mode, and those of its folder",
    errno.EROFS: "mount the file system writable, or name another folder",
    errno.EIO: "the device reported an I/O error: check the disk",
    errno.ENOTDIR: "a part of this path is a file: name a folder",
    errno.EMFILE: "this process has too many files open: raise the limit (ulimit -n) or close some",
    errno.ENFILE: "this host has too many files open: raise the limit (sysctl fs.file-max) or close some",
    errno.ENAMETOOLONG: "the path is too long for this file system: name a shorter one",
    errno.EAGAIN: "a limit of this user or host is reached: end other processes, or raise it (ulimit -u)",
    errno.ENOMEM: "the host has no memory left: free some",
    errno.EISDIR: "a folder has this name: remove it, or name another path",
    errno.ESTALE: "the server of this network file system has replaced the file: try again, or mount it again",
}
_OTHER_ADVICE = "see the log of the kernel (dmesg), and check the file system"


_WRONG_PATH_ERRNOS = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}
_REFUSED_ERRNOS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR}


@contextmanager
def convert_os_errors(action: str, where: str) -> Iterator[None]:
    """Turn an OSError into NotFound, AlreadyExists, NoSpace, Refused, Unavailable or another StoreError.

    An I/O error (EIO) of a network file system is Unavailable: it is mostly one of the connection, and the bytes may be intact.

    action: such as "reading".
    where: the file.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"{action} {where}: no such file") from error
    except FileExistsError as error:
        raise AlreadyExists(f"{action} {where}: it exists already") from error
    except OSError as error:
        if error.errno == errno.EIO and depends_on_a_server(where):
            raise Unavailable(
                f"{action} {where} failed: {error.strerror}; check the mount and the server of this file system, and try again"
            ) from error
        full, refused = error.errno in (errno.ENOSPC, errno.EDQUOT), error.errno in _REFUSED_ERRNOS
        kind = NoSpace if full else Refused if refused else StoreError
        raise kind(f"{action} {where} failed: {describe_os_error(error)}") from error


def describe_os_error(error: OSError) -> str:
    """Return the message of an error, and what to do."""
    return f"{error.strerror or error}; {_ADVICE_BY_ERRNO.get(error.errno or 0, _OTHER_ADVICE)}"


def describe_unreadable_file(error: OSError | UnicodeDecodeError) -> str:
    """Return the message of an error about a file whose path the user gave, and what to do."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not text; name a text file"
    if error.errno in _WRONG_PATH_ERRNOS:
        return f"{error.strerror}; name a file that this user can read"
    return describe_os_error(error)


def write_all(fd: int, data: memoryview, position: int, where: str) -> None:
    """Write `data` at `position`, through the page cache."""
    with convert_os_errors("writing", where):
        while data:
            written = os.pwrite(fd, data, position)
            data, position = data[written:], position + written


_MIN_DIRECT_BYTES = 256 << 10
"""Shorter reads go through the page cache, which gains from read-ahead."""

_UNCACHED_SPAN_BYTES = 8 << 20
"""If a byte is not in the page cache, this many bytes from it on count as uncached too: each check costs a read-ahead."""


class _Descriptor:
    """An open file descriptor, which is closed with its last reference.

    So a read that keeps a reference is never served by another file that got the same number.
    """

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


_CLOSED = _Descriptor(-1)


class DescriptorReader(Reader):
    """Reads an open file. Its descriptors are closed once `close` was called and the running reads have ended.

    where: the file, for messages.
    direct_fd: the same file, opened with O_DIRECT. Bytes that are not in the page cache are then read past it, if position,
        memory and length are whole pages: filling the cache costs more than such a read (benchmarks/limits.py: into huge pages
        2.07 GB/s, through the cache 1.38 GB/s).
    """

    def __init__(self, fd: int, where: str, direct_fd: int | None = None) -> None:
        self._file = _Descriptor(fd)
        self._direct_file = None if direct_fd is None else _Descriptor(direct_fd)
        self._where = where
        self._uncached_span = range(0)
        # Double the read-ahead, since packs are mostly read in order. With O_DIRECT, disable it: one cached page would load the
        # next ones, which would then be cached too, and the rest of the file would go through the page cache.
        self._advise("POSIX_FADV_SEQUENTIAL" if direct_fd is None else "POSIX_FADV_RANDOM")

    def _advise(self, advice: str) -> None:
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                file = self._file
                os.posix_fadvise(file.number, 0, 0, getattr(os, advice))

    def read_into(self, position: int, buffer: memoryview) -> int:
        # Prevents a release of the caller's view while the kernel writes to it; a slice of the view would not prevent that.
        pinned = PickleBuffer(buffer)
        file, direct_file = self._file, self._direct_file
        done = 0
        try:
            with convert_os_errors("reading", self._where):
                failpoint("local.read")
                if direct_file is not None and self._can_bypass_cache(position, buffer):
                    done = self._read_direct(direct_file, position, buffer)
                while done < len(buffer):
                    count = os.preadv(file.number, [buffer[done:]], position + done)
                    if not count:
                        break
                    done += count
        finally:
            pinned.release()
        return done

    def _can_bypass_cache(self, position: int, buffer: memoryview) -> bool:
        return len(buffer) >= _MIN_DIRECT_BYTES and not (position | len(buffer)) % ALIGNMENT and not self.is_cached(position)

    def is_cached(self, position: int) -> bool:
        if position in self._uncached_span:
            return False
        file = self._file
        found = in_page_cache(file.number, position)
        self._uncached_span = range(0) if found else range(position, position + _UNCACHED_SPAN_BYTES)
        return found

    def read_cached(self, position: int, buffer: memoryview) -> int:
        pinned, file = PickleBuffer(buffer), self._file  # see read_into
        try:
            with convert_os_errors("reading", self._where):
                return read_cached(file.number, position, buffer)
        finally:
            pinned.release()

    def _read_direct(self, file: _Descriptor, position: int, buffer: memoryview) -> int:
        """Return the number of bytes read: fewer at the end of the file, or if memory or file system do not allow O_DIRECT."""
        done = 0
        try:
            done = os.preadv(file.number, [buffer], position)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._advise("POSIX_FADV_SEQUENTIAL")
        return done

    def close(self) -> None:
        self._file, self._direct_file = _CLOSED, None


class AppendFile:
    """A file that is open for writing; each append writes to its own range. It may be used from many threads.

    direct_fd: the same file, opened with O_DIRECT; None if that is not possible.
    """

    def __init__(self, fd: int, direct_fd: int | None, where: str) -> None:
        self.fd = fd
        self.direct_fd = direct_fd
        self.length = 0
        """The highest end of a range that was written completely."""
        self._where = where
        self._changed = threading.Condition()
        """Guards `_next_position`. Guards changes of `length`, `_pending_appends` and `_is_closed`. Notified when an append
        ends."""
        self._next_position = 0
        self._is_direct_allowed = direct_fd is not None
        """Any appending thread may set it to False; it never becomes True again."""
        self._pending_appends = 0
        self._is_closed = False

    @contextmanager
    def reserve_range(self, nbytes: int) -> Iterator[int]:
        """Reserve `nbytes` bytes and give their position. Raises StoreError if the file is closed.

        The descriptors stay open until the context ends: otherwise another file could get the same descriptor number.
        """
        with self._changed:
            if self._is_closed:
                raise StoreError(f"{self._where} is finished already; create it again to write it")
            position = self._next_position
            self._next_position += -(-nbytes // ALIGNMENT) * ALIGNMENT
            self._pending_appends += 1
        try:
            yield position
            with self._changed:
                self.length = max(self.length, position + nbytes)
        finally:
            with self._changed:
                self._pending_appends -= 1
                self._changed.notify_all()
                if self._is_closed:
                    self._close_if_idle()

    def write(self, data: memoryview, position: int) -> None:
        """Write at a reserved position, with O_DIRECT where memory, length and file system allow it."""
        with convert_os_errors("writing", self._where):
            failpoint("local.append")
        if self._is_direct_allowed and self.direct_fd is not None and not len(data) % ALIGNMENT:
            if _try_direct(self.direct_fd, data, position, self._where):
                return
            self._is_direct_allowed = False  # memory or file system do not allow it: use the page cache from now on
        write_all(self.fd, data, position, self._where)

    def close(self, timeout_seconds: float = 0.0) -> bool:
        """Accept no more appends; return whether all running ones ended in time. The last one closes the descriptors."""
        with self._changed:
            self._is_closed = True
            ended = self._changed.wait_for(lambda: not self._pending_appends, timeout_seconds)
            self._close_if_idle()
            return ended

    def __del__(self) -> None:
        # For a writer that is neither committed nor aborted: a thread pool that ends drops those calls.
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        """Close the descriptors if no append runs. The caller has the lock, or is `__del__`, when no thread has the file."""
        if self._pending_appends:
            return
        fd, direct_fd, self.fd, self.direct_fd = self.fd, self.direct_fd, -1, None
        if fd >= 0:
            os.close(fd)
        if direct_fd is not None:
            os.close(direct_fd)


def _try_direct(fd: int, data: memoryview, position: int, where: str) -> bool:
    """Write all of `data` through O_DIRECT; False where memory or file system do not allow it."""
    try:
        written = os.pwrite(fd, data, position)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        with convert_os_errors("writing", where):
            raise
    if written < len(data):
        # A direct write is short mostly for lack of space; the next call then raises the error.
        write_all(fd, data[written:], position + written, where)
    return True
