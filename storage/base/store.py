"""What a store is: a flat space of named bytes, written once or replaced whole. Everything above uses only this file.

A store is safe to use from many threads. Every call blocks until it is done; none retries after a failed fsync.
Names are relative paths of plain segments; `check_name` is the only judge of them, on the way in and out.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from ckpt.storage.base.errors import AlreadyExists, Changed, IntegrityError, InvalidName, NotFound

ALIGNMENT = 4096
"""Blocks start at multiples of this many bytes in a pack: the page, and the largest logical sector in use, so that
O_DIRECT needs no copy."""

Buffer = bytes | bytearray | memoryview

Version = Any
"""What tells the content of an object from what it was before and after: of `get_versioned`, for `publish`."""

# One segment: what every file system and every object store keeps apart. No leading dot: such names are temporary.
_SEGMENT = re.compile(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]{0,199}")


def is_name(name: str) -> bool:
    """Whether `name` is a relative path of plain segments; listings skip what is not, for it is not ours."""
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
"""The longest object by which a store is probed (`Store.honours_conditions`)."""


def require_length(where: str, nbytes: int, limit: int | None) -> None:
    """Raise IntegrityError where an object is longer than a reader expects; limit: None expects any length."""
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
    """One object being written, in order. It exists under its name only after `commit`.

    `append` may be called from several threads at once; each call gets a place of its own.
    Leaving the context without commit aborts.
    """

    @abstractmethod
    def append(self, data: memoryview) -> int:
        """Write `data` at the next multiple of ALIGNMENT and return that position. `data` is free for reuse after.

        Fastest where `data` starts on a page and its length is a multiple of ALIGNMENT.
        """

    @abstractmethod
    def commit(self) -> int:
        """Make the object durable and visible; return its length in bytes."""

    @abstractmethod
    def abort(self) -> None:
        """Throw away what was written. Harmless after commit and when called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()


class Reader(ABC):
    """One object opened for reading; `read_into` may be called from several threads at once."""

    @abstractmethod
    def read_into(self, position: int, buffer: memoryview) -> int:
        """Fill `buffer` from `position` on; return the bytes read, fewer than asked only at the end of the object."""

    def close(self) -> None:  # noqa: B027  many readers hold nothing
        """Give back what the reader holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Store(ABC):
    """A place that keeps named bytes. `url` names it in messages."""

    url: str

    past_cache = False
    """Whether what `open_once` opens is read past the page cache, where position, memory and length lie on pages."""

    fences = False
    """Whether a `publish` that was confirmed can't come through any more after a successor has called `sweep_temporaries` and
    `revoke`. Where not, a writer that stands still between both can still replace what its successor wrote."""

    @property
    def parallel_appends(self) -> int:
        """How many at once, of some MiB, keep the store busy. More only take turns, and their data leaves the caches."""
        return 8

    @abstractmethod
    def put(self, name: str, data: Buffer) -> None:
        """Store `data` under `name`, atomically and durably, replacing what was there."""

    @abstractmethod
    def put_new(self, name: str, data: Buffer) -> None:
        """Like `put`, but raise AlreadyExists where `name` is there: of two callers at once, one wins."""

    def publish(self, name: str, data: Buffer, confirm: Callable[[], None], replaces: Version | None = None) -> None:
        """Store `data` under `name` in place of exactly what `get_versioned` gave as `replaces`; None: where nothing is there.

        confirm: called when all is prepared. It raises where this writer may not write any more; nothing is visible then.

        Raises AlreadyExists or Changed where something else is there, Changed where a successor has revoked the publication.
        """
        confirm()
        if replaces is None:
            self.put_new(name, data)
            return
        self._require_unchanged(name, replaces)
        self.put(name, data)

    def _require_unchanged(self, name: str, expected: bytes) -> None:
        """Raise Changed where an object has another content, of whatever length."""
        try:
            if self.get_up_to(name, len(expected)) == expected:
                return
        except (NotFound, IntegrityError):
            pass
        raise Changed(f"publishing {self.url}/{name}: another writer has changed it meanwhile")

    def revoke(self, name: str) -> bool:
        """Let every `publish` of this name fail that another writer has prepared; False where one that replaces the object
        which is there may still come through. For who holds the repository, after `sweep_temporaries`."""
        return True

    def honours_conditions(self, name: str) -> bool:
        """Whether a put whose condition does not hold is refused. name: an object that is there; it keeps its bytes."""
        try:
            self.put_new(name, self.get_up_to(name, PROBE_BYTES))
        except AlreadyExists:
            return True
        return False

    @abstractmethod
    def get(self, name: str) -> bytes:
        """Return the whole object; raise NotFound."""

    def get_versioned(self, name: str, limit: int) -> tuple[bytes, Version]:
        """Return the whole object, and by what `publish` knows it; raise NotFound, IntegrityError as `get_up_to`."""
        data = self.get_up_to(name, limit)
        return data, data

    def get_up_to(self, name: str, limit: int) -> bytes:
        """Like `get`, but raise IntegrityError where the object is longer than `limit` bytes: what lies under a name may have
        any length, and no memory is taken for it. Here it is read whole first: for a store that can't tell the length before.
        """
        data = self.get(name)
        require_length(f"{self.url}/{name}", len(data), limit)
        return data

    @abstractmethod
    def open(self, name: str) -> Reader:
        """Open an object for ranged reads; raise NotFound here or at the first read."""

    def open_once(self, name: str) -> Reader:
        """Like `open`, for what nobody on this host is known to read again soon: it need not be kept in the page cache."""
        return self.open(name)

    @abstractmethod
    def create(self, name: str, size_hint: int = 0) -> Writer:
        """Start writing an object of about `size_hint` bytes; space is reserved now where the store can."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Every object below the folder `prefix` ("" is the root), at any depth, in no order; none if there is none."""

    @abstractmethod
    def list_folders(self, prefix: str = "") -> Iterator[str]:
        """The names of the folders right below `prefix`, without it."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; a name that is not there is no error."""

    def exists(self, name: str) -> bool:
        """Whether an object of this name is there."""
        try:
            self.open(name).close()
        except NotFound:
            return False
        return True

    def prefetch(self, name: str, nbytes: int, start: int = 0) -> None:  # noqa: B027  a hint, for stores that can follow it
        """Begin to bring `nbytes` of an object nearer, because they will be read soon. Raises nothing."""

    def answers(self, seconds: float) -> bool:
        """Whether anything may be here, found out within about so many seconds. Raises Unavailable where that can't be known,
        or what is here can't be read now."""
        return True

    def sweep_temporaries(self, prefix: str) -> None:  # noqa: B027  most stores have none
        """Remove what killed writers left below `prefix`. For who holds the repository, with no write under way."""

    def close(self) -> None:  # noqa: B027
        """Give back what the store holds."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"
