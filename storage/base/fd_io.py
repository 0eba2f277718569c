"""Reading and writing through open descriptors, whoever opened them: a directory, or a node for a client of its host."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pickle import PickleBuffer

from ckpt.storage.base.errors import AlreadyExists, NoSpace, NotFound, Refused, StoreError
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.store import ALIGNMENT, Reader

_ADVICE_BY_ERRNO = {
    errno.ENOSPC: "the disk is full: free space or keep fewer steps",
    errno.EDQUOT: "the disk quota is used up: free space or keep fewer steps",
    errno.EACCES: "check the owner and mode of it and of its folder",
    errno.EPERM: "check the owner and mode of it and of its folder",
    errno.EROFS: "the file system is read-only",
    errno.EIO: "the device reported an I/O error: check the disk",
    errno.ENOTDIR: "a part of this path is a file: name a folder",
    errno.EMFILE: "this process has too many files open: raise the limit (ulimit -n) or close some",
    errno.ENFILE: "this host has too many files open: raise the limit (sysctl fs.file-max) or close some",
    errno.ENAMETOOLONG: "the path is too long for this file system",
}


_REFUSED_ERRNOS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR}


@contextmanager
def convert_os_errors(action: str, where: str) -> Iterator[None]:
    """Turn an OSError into a StoreError that says what was being done and where."""
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"{action} {where}: no such file") from error
    except FileExistsError as error:
        raise AlreadyExists(f"{action} {where}: it exists already") from error
    except OSError as error:
        full, refused = error.errno in (errno.ENOSPC, errno.EDQUOT), error.errno in _REFUSED_ERRNOS
        kind = NoSpace if full else Refused if refused else StoreError
        raise kind(f"{action} {where} failed: {describe_os_error(error)}") from error


def describe_os_error(error: OSError) -> str:
    """What it says, and what to do."""
    return f"{error.strerror or error}; {_ADVICE_BY_ERRNO.get(error.errno or 0, 'see the cause')}"


def write_all(fd: int, data: memoryview, position: int, where: str) -> None:
    """Write `data` at `position`, through the page cache."""
    with convert_os_errors("writing", where):
        while data:
            written = os.pwrite(fd, data, position)
            data, position = data[written:], position + written


_MIN_DIRECT_BYTES = 256 << 10
"""Less than that comes through the page cache, with what is read ahead."""

_UNCACHED_SPAN_BYTES = 8 << 20
"""So far what follows a byte that is not in the page cache is taken not to be there either: each look costs a read ahead."""

_DIRECT_READ_BYTES = 1 << 20
"""What one direct read asks for: several such from several threads overlap better than whole blocks (benchmarks/limits.py
has both)."""


def in_page_cache(fd: int, position: int) -> bool:
    """Whether the byte at `position` is in the page cache; False where this system or file system can't tell.

    To ask for a byte that is not there makes Linux bring it, with what it would read ahead of `fd`. About once in a thousand
    times it is there before the answer, which is then True.
    """
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    try:
        os.preadv(fd, [bytearray(1)], position, os.RWF_NOWAIT)
    except OSError:
        return False
    return True


class DescriptorReader(Reader):
    """A file that is open for reading, and closed with this. `where` names it in messages.

    direct_fd: the same file, opened with O_DIRECT. What is not in the page cache then goes past it, where position, memory
    and length lie on pages: to fill the cache costs more than such a read (benchmarks/limits.py: into huge pages 2.07 GB/s,
    through the cache 1.38).
    """

    def __init__(self, fd: int, where: str, direct_fd: int | None = None) -> None:
        self._fd = fd
        self._direct_fd = direct_fd
        self._where = where
        self._uncached_span = range(0)
        # Twice the read-ahead: packs are mostly read in order. None beside O_DIRECT: one page that is there would bring what
        # follows, which would so be there, too, and all the rest would come through the page cache.
        self._advise("POSIX_FADV_SEQUENTIAL" if direct_fd is None else "POSIX_FADV_RANDOM")

    def _advise(self, advice: str) -> None:
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(self._fd, 0, 0, getattr(os, advice))

    def read_into(self, position: int, buffer: memoryview) -> int:
        # So that nobody releases the caller's view while the kernel writes there: a slice of it would not prevent that.
        pinned = PickleBuffer(buffer)
        done = 0
        try:
            with convert_os_errors("reading", self._where):
                failpoint("local.read")
                if self._direct_fd is not None and self._can_bypass_cache(position, buffer):
                    done = self._read_direct(position, buffer)
                while done < len(buffer):
                    count = os.preadv(self._fd, [buffer[done:]], position + done)
                    if not count:
                        break
                    done += count
        finally:
            pinned.release()
        return done

    def _can_bypass_cache(self, position: int, buffer: memoryview) -> bool:
        if len(buffer) < _MIN_DIRECT_BYTES or (position | len(buffer)) % ALIGNMENT:
            return False
        if position not in self._uncached_span:
            found = in_page_cache(self._fd, position)
            self._uncached_span = range(0) if found else range(position, position + _UNCACHED_SPAN_BYTES)
        return position in self._uncached_span

    def _read_direct(self, position: int, buffer: memoryview) -> int:
        """The bytes read: fewer at the end of the file, or where memory or file system do not allow it."""
        assert self._direct_fd is not None
        done = 0
        try:
            while done < len(buffer):
                part = buffer[done : done + _DIRECT_READ_BYTES]
                count = os.preadv(self._direct_fd, [part], position + done)
                done += count
                if count < len(part):
                    break
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._advise("POSIX_FADV_SEQUENTIAL")
        return done

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        direct_fd, self._direct_fd = self._direct_fd, None
        if direct_fd is not None:
            os.close(direct_fd)


class AppendFile:
    """A file that is open for writing, in which each append gets a place of its own. Safe to use from many threads.

    direct_fd: the same file, opened with O_DIRECT, where there is that.
    """

    def __init__(self, fd: int, direct_fd: int | None, where: str) -> None:
        self.fd = fd
        self.direct_fd = direct_fd
        self.length = 0
        """The end of what was appended whole."""
        self._where = where
        self._changed = threading.Condition()
        self._next_position = 0
        self._is_direct_allowed = direct_fd is not None
        self._pending_appends = 0
        self._is_closed = False

    @contextmanager
    def reserve_range(self, nbytes: int) -> Iterator[int]:
        """The position for so many bytes. The descriptors stay open until the context is left: a number that were closed
        meanwhile could be another file's."""
        with self._changed:
            if self._is_closed:
                raise StoreError(f"{self._where} is finished already; create it anew to write it again")
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
        """Write at a place, through O_DIRECT where memory, length and file system allow it."""
        with convert_os_errors("writing", self._where):
            failpoint("local.append")
        if self._is_direct_allowed and self.direct_fd is not None and not len(data) % ALIGNMENT:
            if _try_direct(self.direct_fd, data, position, self._where):
                return
            self._is_direct_allowed = False  # this memory or file system refuses: buffered from now on
        write_all(self.fd, data, position, self._where)

    def close(self, timeout_seconds: float = 0.0) -> bool:
        """Take no more appends; whether all under way ended within `seconds`. With the last of them the descriptors go."""
        with self._changed:
            self._is_closed = True
            ended = self._changed.wait_for(lambda: not self._pending_appends, timeout_seconds)
            self._close_if_idle()
            return ended

    def __del__(self) -> None:
        # Whose writer nobody commits or gives up any more: a pool of threads that ends drops the calls for it.
        self._close_if_idle()

    def _close_if_idle(self) -> None:
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
        # A short direct write ends where the device stopped, most often for lack of space: the next call tells.
        write_all(fd, data[written:], position + written, where)
    return True
