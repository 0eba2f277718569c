"""`Store`, the interface to a flat space of named objects, with its `Writer` and `Reader`.

The rest of the project uses stores through this interface only. A store may be used from many threads. Every call blocks until
it is done, and no call retries after a failed fsync. Names are relative paths of plain segments; `check_name` and `is_name`
alone decide which names are valid, for writes and for listings.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from ckpt.storage.base.errors import AlreadyExists, Changed, IntegrityError, InvalidName, NotFound, StoreError, is_bad_sector

ALIGNMENT = 4096
"""Blocks start at multiples of this many bytes in a pack: the page size, and the largest logical sector size in use, so that
O_DIRECT needs no copy."""

TEMPORARY_SUFFIX = ".ckpt-tmp"
"""The end of the name of a file that is still being written. The name also begins with a dot."""

Buffer = bytes | bytearray | memoryview

ByteProgress = Callable[[int], None]
"""Called with the number of bytes just read, written or otherwise processed. Any thread may call it."""

Version = Any
"""Identifies the content of an object at one time; `get_versioned` returns it and `publish` compares it. Each store defines its
own type."""

_BAD_SECTOR = object()
"""The version of an object that the device can't read."""

# Characters that every file system and object store distinguishes. A leading dot is reserved for temporary files.
_SEGMENT = re.compile(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]{0,199}")


def is_name(name: str) -> bool:
    """Return whether `name` is a relative path of plain segments. Listings skip other names, which ckpt did not create."""
    return len(name) <= 1000 and all(_SEGMENT.fullmatch(segment) for segment in name.split("/"))


def check_name(name: str) -> str:
    """Return `name` if it is a relative path of plain segments; raise InvalidName otherwise."""
    if not is_name(name):
        raise InvalidName(
            f"{name[:200]!r} is not a valid object name: use segments of letters, digits, '_', '-' and '.', "
            "not starting with a dot, joined by '/'"
        )
    return name


PROBE_BYTES = 1 << 20
"""The most bytes of an object with which `Store.honours_conditions` probes a store."""


def require_length(where: str, nbytes: int, limit: int | None) -> None:
    """Raise IntegrityError if an object of `nbytes` bytes is longer than `limit`; None means no limit. where: its URL."""
    if limit is not None and nbytes > limit:
        raise IntegrityError(
            f"{where} has {nbytes} bytes, and at most {limit} are expected: it is not what was written; restore it from a "
            "copy, or load another step"
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """One object in a listing."""

    name: str
    nbytes: int


class Writer(ABC):
    """An object that is being written. It exists under its name only after `commit`.

    Several threads may call `append` at once; each call writes to its own range. Leaving the context without commit aborts.
    """

    @abstractmethod
    def append(self, data: memoryview) -> int:
        """Write the bytes of `data` at the next multiple of ALIGNMENT and return that position in bytes.

        `data` may be reused when this returns. It is fastest if `data` starts on a page and its length is a multiple of
        ALIGNMENT.

        Raises:
            StoreError: The write failed; the object can't be committed any more.
        """

    @abstractmethod
    def commit(self) -> int:
        """Make the object durable and visible, and return its length in bytes.

        Raises:
            StoreError: The object is not durable.
        """

    @abstractmethod
    def abort(self) -> None:
        """Discard what was written. Does nothing after `commit` or a first `abort`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()


class Reader(ABC):
    """An object that is open for reading. Several threads may call `read_into` at once."""

    @abstractmethod
    def read_into(self, position: int, buffer: memoryview) -> int:
        """Fill `buffer` with the bytes from `position` on, and return how many were read: fewer only at the end of the object.

        Raises:
            NotFound: The object does not exist.
            StoreError: The read failed.
        """

    def is_cached(self, position: int) -> bool:
        """Return whether the bytes at `position` are in the page cache, so that a read copies them; False where unknown."""
        return False

    def read_cached(self, position: int, buffer: memoryview) -> int:
        """Copy bytes from `position` on out of the page cache without waiting for the device; return how many it had.

        Call it where `is_cached` is true: for other bytes, Linux begins to load the whole range.

        Raises:
            StoreError: The read failed.
        """
        return 0

    def close(self) -> None:  # noqa: B027  many readers have no resources
        """Release the resources of the reader."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Store(ABC):
    """A flat space of named objects: a directory, a bucket, an fsspec URL, a namespace.

    A subclass sets `url` and implements the abstract methods; the other methods have defaults.
    """

    url: str
    """The URL of the store, which names it in messages."""

    past_cache = False
    """Whether readers of `open_once` bypass the page cache, for reads whose position, memory and length are whole pages."""

    is_remote = False
    """Whether each request costs a round trip over a network, so that a reader needs many at a time."""

    fences = False
    """Whether a confirmed `publish` can no longer take effect after a successor has called `sweep_temporaries` and `revoke`. If
    False, a writer that is stopped between `confirm` and the write can still replace what its successor wrote."""

    @property
    def device(self) -> str:
        """The name of the device that answers, under which ckpt keeps how it is read best; "" if its reads are not tuned."""
        return ""

    @property
    def parallel_appends(self) -> int:
        """How many concurrent appends of a few MiB keep the store busy; more wait for each other, and their data leave the
        caches."""
        return 8

    @property
    def parallel_reads(self) -> int:
        """How many threads read fastest through the page cache.

        Each has a read-ahead of its own in Linux, and fewer keep a disk waiting.
        """
        return 4

    @abstractmethod
    def put(self, name: str, data: Buffer) -> None:
        """Store `data` under `name`, atomically and durably; replace an object of that name.

        Raises:
            StoreError: The object was not stored, or it is unknown whether it was.
        """

    @abstractmethod
    def put_new(self, name: str, data: Buffer) -> None:
        """Store `data` under a new name, atomically and durably: of two concurrent callers, one succeeds.

        Raises:
            AlreadyExists: An object of this name exists.
            StoreError: As for `put`.
        """

    def publish(self, name: str, data: Buffer, confirm: Callable[[], None], replaces: Version | None = None) -> None:
        """Store `data` under `name`, only if the object there still has the version `replaces`.

        confirm: called when everything is prepared. It raises an error if this writer may not write any more; then nothing
            becomes visible.
        replaces: the version from `get_versioned`; None if no object of this name may exist.

        Raises:
            AlreadyExists: An object exists where `replaces` is None.
            Changed: The object has another version, or a successor has revoked the publication.
            StoreError: As for `put`.
        """
        confirm()
        if replaces is None:
            self.put_new(name, data)
            return
        self._require_unchanged(name, replaces)
        self.put(name, data)

    def _require_unchanged(self, name: str, expected: Version) -> None:
        """Raise Changed unless an object exists and has exactly the expected content."""
        try:
            if self.get_versioned(name, PROBE_BYTES if expected is _BAD_SECTOR else len(expected))[1] == expected:
                return
        except (NotFound, IntegrityError):
            pass
        raise Changed(f"publishing {self.url}/{name}: another writer has changed it meanwhile")

    def revoke(self, name: str) -> bool:
        """Make every `publish` of this name fail that another writer has prepared; return whether that is certain.

        False means that a publication that replaces the existing object may still take effect. The holder of the writer lease
        calls this after `sweep_temporaries`.
        """
        return True

    def honours_conditions(self, name: str) -> bool:
        """Return whether the store refuses a put whose condition does not hold. name: an existing object; it is not changed."""
        try:
            self.put_new(name, self.get_up_to(name, PROBE_BYTES))
        except AlreadyExists:
            return True
        return False

    @abstractmethod
    def get(self, name: str) -> bytes:
        """Return the whole object.

        Raises:
            NotFound: The object does not exist.
            StoreError: The read failed.
        """

    def get_versioned(self, name: str, limit: int) -> tuple[bytes, Version]:
        """Return the whole object and its version for `publish`; raise the errors of `get_up_to`.

        An object on a bad sector counts as damaged, so that it can be replaced: its content is returned as empty.
        """
        try:
            data = self.get_up_to(name, limit)
        except StoreError as error:
            if not is_bad_sector(error):
                raise
            return b"", _BAD_SECTOR
        return data, data

    def get_up_to(self, name: str, limit: int) -> bytes:
        """Return the whole object if it has at most `limit` bytes; do not allocate memory for a longer one.

        This default reads the object first, for a store that does not know its length before.

        Raises:
            NotFound: The object does not exist.
            IntegrityError: The object is longer than `limit`.
            StoreError: The read failed.
        """
        data = self.get(name)
        require_length(f"{self.url}/{name}", len(data), limit)
        return data

    @abstractmethod
    def open(self, name: str) -> Reader:
        """Open an object for ranged reads.

        Raises:
            NotFound: The object does not exist. Some stores raise it at the first read.
        """

    def open_once(self, name: str) -> Reader:
        """Open an object that no process of this host is expected to read again soon; the page cache need not keep it."""
        return self.open(name)

    @abstractmethod
    def create(self, name: str, size_hint: int = 0) -> Writer:
        """Start writing an object of about `size_hint` bytes. Stores that can do so reserve the space now.

        Raises:
            NoSpace: The space cannot be reserved.
        """

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Yield every object below the folder `prefix` ("" is the root), at any depth, in any order."""

    @abstractmethod
    def list_folders(self, prefix: str = "") -> Iterator[str]:
        """Yield the names of the folders directly below `prefix`, without the prefix."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; a name that does not exist is not an error."""

    def exists(self, name: str) -> bool:
        """Return whether an object of this name exists."""
        try:
            self.open(name).close()
        except NotFound:
            return False
        return True

    def prefetch(self, name: str, nbytes: int, start: int = 0) -> None:  # noqa: B027  a hint, for stores that can follow it
        """Start to load `nbytes` of an object into a cache, because they will be read soon. Raises no error."""

    def answers(self, seconds: float) -> bool:
        """Return whether the store may have objects, within about `seconds` seconds.

        Raises:
            Unavailable: It is unknown, or the objects cannot be read now.
        """
        return True

    def sweep_temporaries(self, prefix: str, *, folders: bool = True) -> None:  # noqa: B027  most stores have none
        """Delete temporary files of killed writers below `prefix`. The holder of the writer lease calls it before it writes.

        folders: whether also those in the folders below `prefix`, at any depth.
        """

    def close(self) -> None:  # noqa: B027
        """Release the resources of the store."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"
