"""A store at any fsspec URL (memory://, hdfs://, sftp://, ftp://, …), with the guarantees that fsspec allows.

- Atomic visibility: if the file system can rename, an object is written under a temporary name and then renamed. If it cannot,
  it is an object store or similar, in which a file appears when it is complete.
- Durability: as much as closing a file gives; fsspec has no fsync. For local disks, use a path or file://.
- `put_new`: exact between the threads of a process, and between processes if the file system has an exclusive create (object
  stores). Otherwise it checks and then writes, and two concurrent processes can both succeed.
"""

from __future__ import annotations

import errno
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

from ckpt.storage.base.errors import AlreadyExists, Changed, NotFound, StoreError, Unavailable, UnknownScheme, first_line
from ckpt.storage.base.forks import fork_safe_lock, fork_safe_rlock
from ckpt.storage.base.store import (
    ALIGNMENT,
    TEMPORARY_SUFFIX,
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
from ckpt.storage.remote.fsspec_lookup import Info, list_entries, look_up, walk_folders

# File systems with thread-safe calls. Others may have a single connection (FTP, SFTP, SMB), so they get one call at a time.
_PARALLEL_PROTOCOLS = {"memory", "file", "local", "hdfs", "arrow_hdfs"}

_call_lock = fork_safe_rlock()
"""Taken for each call of a file system whose calls are not thread-safe. fsspec shares one connection between equal URLs, so one
lock serves all of them."""
_put_new_lock = fork_safe_lock()
"""Taken from the check that a name is free to the end of its creation."""


class FsspecStore(Store):
    """A folder in any file system of fsspec. Its options come from the environment or from fsspec's configuration files."""

    def __init__(self, url: str) -> None:
        self.url = url if url.endswith("://") else url.rstrip("/")
        self._fs, root = _open_file_system(url)
        self._root = root.rstrip("/")
        find = type(self._fs)._find if isinstance(self._fs, AsyncFileSystem) else type(self._fs).find
        # The default `find` of fsspec walks the folders and ignores errors.
        self._has_native_find = find not in (AsyncFileSystem._find, AbstractFileSystem.find)
        # A class without its own rename copies and deletes; there a direct write is as atomic, and cheaper.
        self._has_native_rename = type(self._fs).mv is not AbstractFileSystem.mv
        protocols = {self._fs.protocol} if isinstance(self._fs.protocol, str) else set(self._fs.protocol)
        self.is_remote = bool(self._fs.async_impl)
        parallel = bool(self._fs.async_impl or protocols & _PARALLEL_PROTOCOLS)
        self._call_guard: AbstractContextManager[object] = nullcontext() if parallel else _call_lock

    @property
    def device(self) -> str:
        """The server or bucket of the URL, if its reads can run in parallel."""
        return "/".join(self.url.split("/")[:3]) if self.is_remote else ""

    # --- writing -----------------------------------------------------------------------------------------------

    def put(self, name: str, data: Buffer) -> None:
        path = self._path(name)
        with self._convert_errors("writing", path):
            self._write_object(path, bytes(data))

    def put_new(self, name: str, data: Buffer) -> None:
        path = self._path(name)
        with _put_new_lock, self._convert_errors("writing", path):
            if self._is_taken(path):
                raise FileExistsError(path)
            if self._has_native_rename:
                self._write_object(path, bytes(data))
                return
            self._make_parent(path)
            try:
                self._fs.pipe_file(path, bytes(data), mode="create")
            except (TypeError, NotImplementedError):  # the file system does not support the mode
                self._fs.pipe_file(path, bytes(data))

    def publish(self, name: str, data: Buffer, confirm: Callable[[], None], replaces: Version | None = None) -> None:
        """As in `Store`. If the file system can rename, a successor's sweep deletes the prepared temporary file.

        The publication may still lose a race: not every rename refuses an existing name, and listings may be cached.
        """
        if not self._has_native_rename:
            super().publish(name, data, confirm, replaces)
            return
        path = self._path(name)
        temporary = _temporary_path(path)
        try:
            with self._convert_errors("writing", path):
                self._make_parent(path)
                self._fs.pipe_file(temporary, bytes(data))
            confirm()
            with _put_new_lock:
                current = self.get(name) if self.exists(name) else None
                if replaces is None and current is not None:
                    raise AlreadyExists(f"publishing {path} in {self.url}: it exists already")
                if current != replaces:
                    raise Changed(f"publishing {path} in {self.url}: another writer has changed it meanwhile")
                try:
                    with self._convert_errors("publishing", path):
                        self._move(temporary, path)
                except NotFound as error:
                    raise Changed(f"publishing {path}: another writer has deleted its temporary file") from error
        except BaseException:
            with suppress(Exception), self._call_guard:
                self._fs.rm_file(temporary)
            raise

    def create(self, name: str, size_hint: int = 0) -> Writer:
        return _FsspecWriter(self, self._path(name))

    def _write_object(self, path: str, data: bytes) -> None:
        self._make_parent(path)
        if not self._has_native_rename:
            self._fs.pipe_file(path, data)
            return
        temporary = _temporary_path(path)
        try:
            self._fs.pipe_file(temporary, data)
            self._move(temporary, path)
        except BaseException:
            with suppress(Exception):
                self._fs.rm_file(temporary)
            raise

    def _is_taken(self, path: str) -> bool:
        """Return whether a path exists. The `exists` of fsspec returns False after any error, such as a lost connection."""
        self._fs.invalidate_cache()
        try:
            look_up(self._fs, path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _make_parent(self, path: str) -> None:
        parent = path.rpartition("/")[0]
        if parent:
            self._fs.makedirs(parent, exist_ok=True)

    def _move(self, source: str, target: str) -> None:
        if not self._has_native_rename:
            self._fs.cp_file(source, target)
            self._fs.rm_file(source)
            return
        try:
            self._fs.mv(source, target)
        except Exception:
            # Some servers rename only to a free name; then the object is missing for a moment.
            self._fs.invalidate_cache()
            if not self._fs.exists(target) or not self._fs.exists(source):
                raise
            self._replace(source, target)

    def _replace(self, source: str, target: str) -> None:
        """Rename to a name that is taken. The previous object gets its name back if the server then fails."""
        previous = _temporary_path(target)
        self._fs.mv(target, previous)
        try:
            self._fs.mv(source, target)
        except BaseException:
            with suppress(Exception):
                self._fs.mv(previous, target)
            raise
        with suppress(Exception):  # the next sweep deletes it
            self._fs.rm_file(previous)

    # --- reading -----------------------------------------------------------------------------------------------

    def get(self, name: str) -> bytes:
        return self._get(name, None)

    def get_up_to(self, name: str, limit: int) -> bytes:
        return self._get(name, limit)

    def _get(self, name: str, limit: int | None) -> bytes:
        path = self._path(name)
        require_length(f"{self.url}/{name}", self._object_bytes(path), limit)
        with self._convert_errors("reading", path):
            return bytes(self._fs.cat_file(path))

    def open(self, name: str) -> Reader:
        path = self._path(name)
        return _FsspecReader(self, path, self._object_bytes(path))

    def list(self, prefix: str = "") -> Iterator[Entry]:
        folder = self._folder(prefix)
        with self._convert_errors("listing", folder):
            found = self._find(folder)
        for path, info in found:
            name = path.removeprefix(self._root).lstrip("/")
            if is_name(name):
                if info["type"] == "link":  # what is behind it is unknown, and so is the listing
                    raise StoreError(f"{path} in {self.url} is a link to nothing: restore what it led to, or delete the link")
                yield Entry(name, info["size"])

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        folder = self._folder(prefix)
        with self._convert_errors("listing", folder):
            self._fs.invalidate_cache()
            try:
                found = list_entries(self._fs, folder)
            except (FileNotFoundError, NotADirectoryError):
                return
        for info in found:
            name = info["name"].rstrip("/").rpartition("/")[2]
            if info["type"] in ("directory", "link") and is_name(name):  # a link to nothing may be one to a folder
                yield name

    def _files_in(self, folder: str) -> Iterable[str]:
        self._fs.invalidate_cache()
        try:
            return [info["name"] for info in list_entries(self._fs, folder) if info["type"] == "file"]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _find(self, folder: str) -> Iterable[tuple[str, Info]]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(folder, detail=True) if self._has_native_find else walk_folders(self._fs, folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [(path, info) for path, info in found.items() if path.startswith(f"{folder}/")]

    def _object_bytes(self, path: str) -> int:
        with self._convert_errors("looking up", path):
            self._fs.invalidate_cache()
            try:
                info = look_up(self._fs, path)
            except NotADirectoryError as error:
                raise FileNotFoundError(path) from error
            if info["type"] == "directory":
                raise FileNotFoundError(path)
            return int(info["size"])

    # --- deleting ----------------------------------------------------------------------------------------------

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self._remove(self._path(name))

    def sweep_temporaries(self, prefix: str, *, folders: bool = True) -> None:
        folder = self._folder(prefix)
        with self._convert_errors("listing", folder):
            found = [path for path, _ in self._find(folder)] if folders else self._files_in(folder)
        for path in found:
            last = path.rpartition("/")[2]
            if last.startswith(".") and last.endswith(TEMPORARY_SUFFIX):
                self._remove(path)

    def _remove(self, path: str) -> None:
        with (
            self._convert_errors("deleting", path),
            suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError),
        ):
            self._fs.rm_file(path)

    # --- names and errors --------------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_name(name)}"

    def _folder(self, prefix: str) -> str:
        return self._path(prefix) if prefix else self._root

    @contextmanager
    def _convert_errors(self, action: str, path: str) -> Iterator[None]:
        """Take the lock of the file system if it needs one, and convert its errors, which may be of any type, to StoreError."""
        where = f"{action} {path} in {self.url}"
        try:
            with self._call_guard:
                yield
        except StoreError:
            raise
        except FileNotFoundError as error:
            raise NotFound(f"{where}: no such object") from error
        except FileExistsError as error:
            raise AlreadyExists(f"{where}: it exists already") from error
        except Exception as error:
            # A service has no sectors: file systems of fsspec raise EIO for its errors that have no other number.
            kind = Unavailable if getattr(error, "errno", None) == errno.EIO else StoreError
            raise kind(f"{where} failed: {error!r}; check the server, your permissions and the options of this URL") from error


class _FsspecWriter(Writer):
    """Appends to one sequential file handle, one append at a time."""

    def __init__(self, store: FsspecStore, path: str) -> None:
        self._store = store
        self._path = path
        self._temporary = _temporary_path(path)
        self._lock = threading.Lock()
        """Guards `_length`. Guards changes of `_file`."""
        self._length = 0
        with store._convert_errors("creating", path):
            store._make_parent(path)
            self._file: Any = store._fs.open(self._temporary, "wb")

    def append(self, data: memoryview) -> int:
        data = data.cast("B")
        with self._lock, self._store._convert_errors("writing", self._path):
            self._check_open()
            position = -(-self._length // ALIGNMENT) * ALIGNMENT
            for piece in (bytes(position - self._length), data):
                while piece:
                    piece = piece[self._file.write(piece) :]
            self._length = position + len(data)
            return position

    def commit(self) -> int:
        with self._lock, self._store._convert_errors("publishing", self._path):
            self._check_open()
            self._file.close()
            self._store._move(self._temporary, self._path)
            self._file = None
            return self._length

    def abort(self) -> None:
        with self._lock:
            file, self._file = self._file, None
            if file is None:
                return
            with self._store._call_guard:
                with suppress(Exception):
                    file.close()
                with suppress(Exception):
                    self._store._fs.rm_file(self._temporary)

    def _check_open(self) -> None:
        if self._file is None:
            raise StoreError(f"writing {self._path}: the writer was committed or aborted; create a new one")


class _FsspecReader(Reader):
    """Reads ranges of a file of known length."""

    def __init__(self, store: FsspecStore, path: str, nbytes: int) -> None:
        self._store = store
        self._path = path
        self._nbytes = nbytes

    def read_into(self, position: int, buffer: memoryview) -> int:
        requested_bytes = min(len(buffer), self._nbytes - position)
        if requested_bytes <= 0:
            return 0
        with self._store._convert_errors("reading", self._path):
            data = self._store._fs.cat_file(self._path, start=position, end=position + requested_bytes)
        if len(data) > requested_bytes:
            raise StoreError(
                f"reading {self._path} in {self._store.url}: the server sent {len(data)} bytes where {requested_bytes} were "
                "requested; use one that can send ranges of a file (`python -m http.server` can't), or copy the files"
            )
        buffer[: len(data)] = data
        return len(data)


def _temporary_path(path: str) -> str:
    folder, _, name = path.rpartition("/")
    return f"{folder}/.{name[:150]}.{secrets.token_hex(6)}{TEMPORARY_SUFFIX}"


def _open_file_system(url: str) -> tuple[Any, str]:
    scheme = url.partition("://")[0]
    try:
        file_system, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise UnknownScheme(f"{url}: a package is missing ({error}); install the one for {scheme}:// URLs") from error
    except ValueError as error:
        if scheme in fsspec.available_protocols():
            raise StoreError(f"{url} cannot be opened: {error}; correct the URL") from error
        raise UnknownScheme(
            f"{url}: no store handles {scheme}:// URLs; use a path, file://, s3://, gs://, az:// "
            '(pip install "ckpt-store[s3]"), or another scheme of fsspec'
        ) from error
    except Exception as error:  # some file systems connect at once, and raise errors of any type
        message = f"{url} cannot be opened ({first_line(error)}); check the host, the credentials and the options"
        raise StoreError(message) from error
    return file_system, root
