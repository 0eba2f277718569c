"""An open file of a namespace for fsspec, its path, entries of listings, and the mapping of errors to OSError."""

from __future__ import annotations

import errno
import functools
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict, TypeVar, TypeVarTuple

from fsspec.spec import AbstractBufferedFile

from ckpt.aggregator.cluster.config import full_path
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.interfaces.file_transfer import append_in_stripes
from ckpt.aggregator.interfaces.folders import ParentCheck
from ckpt.aggregator.records.file_record import RecordHead
from ckpt.storage.base.errors import AlreadyExists, Changed, InvalidName, StoreError, error_number

if TYPE_CHECKING:
    from ckpt.aggregator.file_io.reader import FileReader
    from ckpt.aggregator.file_io.writer import FileWriter
    from ckpt.aggregator.interfaces.fsspec_filesystem import CkptFileSystem

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class FileInfo(TypedDict):
    """The entry of a file or a folder in the listings of fsspec."""

    name: str
    size: int
    type: Literal["file", "directory"]
    created: NotRequired[float]
    mtime: NotRequired[float]
    ukey: NotRequired[str]


@dataclass(frozen=True, slots=True)
class ResolvedPath:
    """The namespace of a path, and the path in it."""

    namespace: Namespace
    parent_check: ParentCheck
    path: str
    """The path in the namespace."""
    member_list: str = ""
    """The members' part of a path that contains its namespace."""

    def full_name(self, path: str) -> str:
        """Return another path of the namespace, of the same kind as the path that was resolved."""
        return full_path(self.member_list, path) if self.member_list else path


def call_with_os_errors(path: str, call: Callable[[*Ts], T], *args: *Ts) -> T:
    """Return the result of a call. Raises OSError with an error number for a StoreError, and ValueError for an InvalidName."""
    try:
        return call(*args)
    except InvalidName as error:
        raise ValueError(str(error)) from error
    except StoreError as error:  # OSError(…) returns the subclass for its error number
        raise OSError(error_number(error), str(error), path) from error


def file_info(path: str, head: RecordHead) -> FileInfo:
    """Return the entry of a file or a folder in the listings of fsspec."""
    return {
        "name": path,
        "size": head.nbytes if head.kind == "file" else 0,
        "type": "file" if head.kind == "file" else "directory",
        "created": head.created,
        "mtime": head.modified,
        "ukey": head.version,
    }


def raise_unless_missing(error: OSError) -> None:
    """Raise an error of a listing, unless the folder was removed while its parent was walked through."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _commit_or_discard(path: str, commit: Callable[[], object], discard: Callable[[], object]) -> None:
    try:
        call_with_os_errors(path, commit)
    except BaseException:
        discard()
        raise


@dataclass(frozen=True, slots=True)
class DeferredFile:
    """A file that was written in a transaction of fsspec, which publishes or discards it at its end."""

    path: str
    writer: FileWriter

    def commit(self) -> None:
        """Make the file visible. Raises OSError."""
        _commit_or_discard(self.path, self.writer.commit, self.writer.abort)

    def discard(self) -> None:
        """Discard the written data."""
        self.writer.abort()


class CkptFile(AbstractBufferedFile):  # type: ignore[misc]
    """An open file. Written data becomes visible when the file is closed, and never if it is discarded.

    path: of either kind that the filesystem knows. mode: rb, wb, ab or xb. block_size: of reads and writes in bytes.
    autocommit: whether closing the file makes it visible, or a later `commit` does. options: of `AbstractBufferedFile`.

    Raises ValueError for another mode, and OSError with the error numbers of a file system.
    """

    def __init__(self, fs: CkptFileSystem, path: str, mode: str, block_size: int, autocommit: bool, **options: Any) -> None:
        location = self._location = fs.resolve(path)
        self._reader: FileReader | None = None
        self._writer: FileWriter | None = None
        if mode not in ("rb", "wb", "ab", "xb"):
            raise ValueError(f"mode {mode!r}: use rb, wb, ab or xb; an existing file can't be changed in its middle")
        if mode == "rb":
            self._reader = call_with_os_errors(path, location.namespace.open, location.path)
            options["size"] = self._reader.file.head.nbytes
        if mode == "xb" and call_with_os_errors(path, location.namespace.stat, location.path) is not None:
            raise FileExistsError(errno.EEXIST, "a file of this name exists already", path)
        existing = call_with_os_errors(path, location.namespace.stat, location.path) if mode == "ab" else None
        if existing is not None and existing.head.kind != "file":
            raise IsADirectoryError(errno.EISDIR, "a folder, not a file", path)
        if mode != "rb" and existing is None:
            call_with_os_errors(path, location.parent_check.check, location.path)
        super().__init__(fs, path, mode, block_size, autocommit, **options)
        if mode != "rb":
            self.blocksize = max(block_size, 1 << 20)
        if mode == "ab":
            self.loc = 0 if existing is None else existing.head.nbytes
            self._base = existing

    def _fetch_range(self, start: int, end: int) -> bytes:
        assert self._reader is not None
        data = bytearray(max(0, end - start))
        count = call_with_os_errors(self.path, self._reader.read_into, start, memoryview(data))
        return bytes(data[:count])

    def _initiate_upload(self) -> None:
        base = self._base if self.mode == "ab" else None
        # An append to a file that did not exist must not replace a file that another client writes meanwhile.
        new = self.mode == "xb" or (self.mode == "ab" and base is None)
        create = functools.partial(self._location.namespace.create, new=new, aligned=False, base=base)
        self._writer = call_with_os_errors(self.path, create, self._location.path)

    def _upload_chunk(self, final: bool = False) -> bool:
        data = self.buffer.getbuffer()
        if len(data):
            assert self._writer is not None
            call_with_os_errors(self.path, append_in_stripes, data, self._writer)
        if final and self.autocommit:
            self.commit()
        return True

    def commit(self) -> None:
        """Make the written data visible. Raises OSError."""
        _commit_or_discard(self.path, self._commit_writer, self._abort_writer)

    def _commit_writer(self) -> None:
        assert self._writer is not None
        try:
            self._writer.commit()
        except AlreadyExists as error:
            if self.mode == "ab":  # no file existed when it was opened
                raise Changed(f"{error}, written by another client meanwhile; nothing was added, try again") from error
            raise

    def discard(self) -> None:
        """Discard the written data."""
        self._abort_writer()
        self.buffer = io.BytesIO()

    def _abort_writer(self) -> None:
        """Delete the written data on the members, unless it may be visible already."""
        if self._writer is not None:
            self._writer.abort()

    def close(self) -> None:
        try:
            super().close()
        except BaseException:
            self._abort_writer()
            raise
        finally:
            if self._reader is not None:
                self._reader.close()
