"""A file of the namespace as fsspec opens it, and our errors as those of a file system."""

from __future__ import annotations

import errno
import functools
import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from fsspec.spec import AbstractBufferedFile

from ckpt.storage.base.errors import AlreadyExists, Changed, InvalidName, StoreError, error_number

if TYPE_CHECKING:
    from ckpt.aggregator.interfaces.fsspec_filesystem import CkptFileSystem

T = TypeVar("T")


def call_with_os_errors(path: str, call: Callable[..., T], *args: Any) -> T:
    """Our errors as those that users of a file system catch."""
    try:
        return call(*args)
    except InvalidName as error:
        raise ValueError(str(error)) from error
    except StoreError as error:  # OSError makes itself the subclass of its number
        raise OSError(error_number(error), str(error), path) from error


class CkptFile(AbstractBufferedFile):  # type: ignore[misc]
    """An open file. What is written is visible when it is closed, not before, and not at all if it is discarded."""

    def __init__(self, fs: CkptFileSystem, path: str, mode: str, block_size: int, autocommit: bool, **options: Any) -> None:
        location = self._location = fs.resolve(path)
        self._reader: Any = None
        self._writer: Any = None
        if mode not in ("rb", "wb", "ab", "xb"):
            raise ValueError(f"mode {mode!r}: use rb, wb, ab or xb; a file that is there can't be changed in its middle")
        if mode == "rb":
            self._reader = call_with_os_errors(path, location.namespace.open, location.path)
            options["size"] = self._reader.file.head.nbytes
        if mode == "xb" and call_with_os_errors(path, location.namespace.stat, location.path) is not None:
            raise FileExistsError(17, "there is a file of this name already", path)
        existing = call_with_os_errors(path, location.namespace.stat, location.path) if mode == "ab" else None
        if existing is not None and existing.head.kind != "file":
            raise IsADirectoryError(errno.EISDIR, "a folder, no file", path)
        if mode != "rb" and existing is None:
            call_with_os_errors(path, location.parent_check.check, location.path)
        super().__init__(fs, path, mode, block_size, autocommit, **options)
        if mode != "rb":
            self.blocksize = max(block_size, 1 << 20)
        if mode == "ab":
            self.loc = 0 if existing is None else existing.head.nbytes
            self._base = existing

    def _fetch_range(self, start: int, end: int) -> bytes:
        data = bytearray(max(0, end - start))
        count = call_with_os_errors(self.path, self._reader.read_into, start, memoryview(data))
        return bytes(data[:count])

    def _initiate_upload(self) -> None:
        base = self._base if self.mode == "ab" else None
        new = self.mode == "xb" or (self.mode == "ab" and base is None)  # what another writes meanwhile is not replaced
        create = functools.partial(self._location.namespace.create, new=new, aligned=False, base=base)
        self._writer = call_with_os_errors(self.path, create, self._location.path)

    def _upload_chunk(self, final: bool = False) -> bool:
        data = self.buffer.getbuffer()
        if len(data):
            call_with_os_errors(self.path, self._writer.append, data)
        if final and self.autocommit:
            self.commit()
        return True

    def commit(self) -> None:
        """Make what was written visible."""
        try:
            call_with_os_errors(self.path, self._commit_writer)
        except BaseException:
            self._abort_writer()
            raise

    def _commit_writer(self) -> None:
        try:
            self._writer.commit()
        except AlreadyExists as error:
            if self.mode == "ab":  # nothing was there when it was opened
                raise Changed(f"{error}, written by another meanwhile; nothing was added, do it again") from error
            raise

    def discard(self) -> None:
        """Forget what was written."""
        self._abort_writer()
        self.buffer = io.BytesIO()

    def _abort_writer(self) -> None:
        """Leave nothing on the members, but what may be visible after all."""
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
