"""The namespace as an fsspec filesystem: fsspec.open("ckpt://…/file"), and with it zarr, h5py, pandas, torch DCP.

A file is written once: it is there, whole, when it is closed, and never before. Writing to a name that is there replaces it
at that moment; appending writes what is new and keeps the rest. Folders are there while something is in them, and those that
were made, until they are removed.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import UTC, datetime
from glob import has_magic
from typing import Any, TypeVar

from fsspec.asyn import AsyncFileSystem
from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.implementations.local import trailing_sep
from fsspec.utils import other_paths, stringify_path

from ckpt.aggregator.files import Head
from ckpt.aggregator.folders import Ground, above, move_folder, remove_folder
from ckpt.aggregator.members import SCHEME, join_url, split_url
from ckpt.aggregator.namespace import Namespace, open_namespace
from ckpt.aggregator.opened import CkptFile, told
from ckpt.storage.threads import Threads

T = TypeVar("T")

_PIECE_BYTES = 8 << 20


class CkptFileSystem(AsyncFileSystem):  # type: ignore[misc]
    """One namespace. `members` is what stands between ckpt:// and the path; `redundancy` that of new files; `near` the member
    that stands on this host."""

    protocol = SCHEME
    root_marker = ""
    cachable = True
    mirror_sync_methods = True

    def __init__(
        self, members: str | None = None, redundancy: str | None = None, near: str | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        if not members:
            raise ValueError("ckpt:// needs members: ckpt://host:port,host:port/path, or ckpt://NAME/path, or members=")
        self.members = members
        self.namespace: Namespace
        self.namespace, _ = open_namespace(join_url(members, redundancy=redundancy, near=near))
        self.ground = Ground(self.namespace)
        self._threads = Threads(16, "ckpt-fs")

    # --- names -------------------------------------------------------------------------------------------------

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(p) for p in path]
        text = stringify_path(path)
        return split_url(text)[1] if text.startswith(f"{SCHEME}://") else text.strip("/")

    @classmethod
    def _get_kwargs_from_urls(cls, urlpath: Any) -> dict[str, Any]:
        text = stringify_path(urlpath)
        if not text.startswith(f"{SCHEME}://"):
            return {}
        members, _, options = split_url(text)
        return {"members": members, **options}

    def unstrip_protocol(self, name: str) -> str:
        """The URL of a path."""
        text = stringify_path(name)
        return text if text.startswith(f"{SCHEME}://") else join_url(self.members, self._strip_protocol(text))

    @property
    def fsid(self) -> str:
        """Two of one namespace are one."""
        return f"{SCHEME}-{self.members}"

    # --- looking -----------------------------------------------------------------------------------------------

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if path:
            file = await self._do(path, self.namespace.stat, path)
            if file is not None:
                return _described(path, file.head)
        below = await self._do(path, self.namespace.list, path)
        if path and not below:
            raise FileNotFoundError(path)
        return {"name": path, "size": 0, "type": "directory"}

    async def _ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        heads: dict[str, Head] = await self._do(path, self.namespace.list, path)
        found: dict[str, dict[str, Any]] = {}
        skip = len(path) + 1 if path else 0
        for name, head in heads.items():
            child, deeper, _rest = name[skip:].partition("/")
            full = name[:skip] + child
            if deeper:
                found.setdefault(full, {"name": full, "size": 0, "type": "directory"})
            else:
                found[full] = _described(full, head)
        if not found and path:
            here: dict[str, Any] = await self._info(path)
            if here["type"] == "file":
                found[path] = here
        return [found[name] if detail else name for name in sorted(found)]

    async def _isfile(self, path: str) -> bool:
        return await self._type(path) == "file"

    async def _isdir(self, path: str) -> bool:
        return await self._type(path) == "directory"

    async def _type(self, path: str) -> str | None:
        """None where nothing is. What can't be looked at is neither there nor not: that is an error."""
        try:
            found: str = (await self._info(path))["type"]
            return found
        except FileNotFoundError:
            return None

    async def _walk(
        self, path: str, maxdepth: int | None = None, topdown: bool = True, on_error: Any = None, below: Any = None,
        **options: Any,
    ) -> AsyncIterator[tuple[str, Any, Any]]:  # fmt: skip
        """A folder that can't be listed is an error, unless `on_error` says otherwise: those who copy or remove what is in it
        would take it for empty. below: on_error once more, which fsspec does not hand on to the folders below by itself."""
        on_error = on_error or below or _raise_unless_gone
        async for found in super()._walk(path, maxdepth, topdown, on_error, below=on_error, **options):
            yield found

    async def _find(self, path: str, maxdepth: int | None = None, withdirs: bool = False, **options: Any) -> Any:
        path = self._strip_protocol(path)
        if maxdepth is not None or withdirs:
            return await super()._find(path, maxdepth=maxdepth, withdirs=withdirs, **options)
        heads: dict[str, Head] = await self._do(path, self.namespace.list, path)
        files = {name: _described(name, head) for name, head in heads.items() if head.kind == "file"}
        if not files and path:
            file = await self._do(path, self.namespace.stat, path)
            if file is not None and file.head.kind == "file":
                files = {path: _described(path, file.head)}
        return files if options.get("detail") else sorted(files)

    def created(self, path: str) -> datetime:
        """When the file was first written."""
        return datetime.fromtimestamp(self._times(path)["created"], UTC)

    def modified(self, path: str) -> datetime:
        """When the content was written."""
        return datetime.fromtimestamp(self._times(path)["mtime"], UTC)

    def _times(self, path: str) -> dict[str, Any]:
        info: dict[str, Any] = self.info(path)
        if "mtime" not in info:
            raise FileNotFoundError(f"{path}: a folder that only its content makes has no times")
        return info

    # --- reading and writing -----------------------------------------------------------------------------------

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        path = self._strip_protocol(path)

        def read() -> bytes:
            with self.namespace.open(path) as reader:
                size = reader.file.head.nbytes
                first, last = _range(size, start, end)
                data = bytearray(max(0, last - first))
                reader.read_into(first, memoryview(data))
                return bytes(data)

        found: bytes = await self._do(path, read)
        return found

    async def _pipe_file(self, path: str, value: Any, mode: str = "overwrite", **_: Any) -> None:
        path = self._strip_protocol(path)
        await self._do(path, self._write, path, value, mode == "create")

    def _write(self, path: str, value: Any, new: bool = False) -> None:
        self.ground.check(path)
        self.namespace.put(path, value, new)

    async def _put_file(
        self, lpath: str, rpath: str, callback: Any = DEFAULT_CALLBACK, mode: str = "overwrite", **_: Any
    ) -> None:
        rpath = self._strip_protocol(rpath)
        if os.path.isdir(lpath):
            await self._makedirs(rpath, exist_ok=True)
            return

        def put() -> None:
            size = os.path.getsize(lpath)
            callback.set_size(size)
            new = mode == "create"
            self.ground.check(rpath)
            with open(lpath, "rb") as source, self.namespace.create(rpath, None, size, new=new, aligned=False) as writer:
                while data := source.read(_PIECE_BYTES):
                    writer.append(memoryview(data))
                    callback.relative_update(len(data))
                writer.commit()

        await self._do(rpath, put)

    async def _get_file(self, rpath: str, lpath: str, callback: Any = DEFAULT_CALLBACK, **_: Any) -> None:
        rpath = self._strip_protocol(rpath)
        if (await self._info(rpath))["type"] == "directory":
            os.makedirs(lpath, exist_ok=True)
            return

        def get() -> None:
            with self.namespace.open(rpath) as reader:
                size = reader.file.head.nbytes
                callback.set_size(size)
                os.makedirs(os.path.dirname(os.path.abspath(lpath)), exist_ok=True)
                with open(lpath, "wb") as target:
                    buffer = memoryview(bytearray(min(size, _PIECE_BYTES) or 1))
                    for position in range(0, size, _PIECE_BYTES):
                        count = reader.read_into(position, buffer[: min(_PIECE_BYTES, size - position)])
                        target.write(buffer[:count])
                        callback.relative_update(count)

        await self._do(rpath, get)

    async def _cp_file(self, path1: str, path2: str, **_: Any) -> None:
        path1, path2 = self._strip_protocol(path1), self._strip_protocol(path2)
        if (await self._info(path1))["type"] == "directory":
            await self._makedirs(path2, exist_ok=True)
            return

        def copy() -> None:
            self.ground.check(path2)
            with self.namespace.open(path1) as reader:
                size = reader.file.head.nbytes
                with self.namespace.create(path2, None, size, aligned=False) as writer:
                    for position in range(0, size, _PIECE_BYTES):
                        buffer = memoryview(bytearray(min(_PIECE_BYTES, size - position)))
                        reader.read_into(position, buffer)
                        writer.append(buffer)
                    writer.commit()

        await self._do(path1, copy)

    def _open(
        self, path: str, mode: str = "rb", block_size: int | None = None, autocommit: bool = True,
        cache_options: dict[str, Any] | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        return CkptFile(
            self, self._strip_protocol(path), mode, block_size or 4 << 20, autocommit, cache_options=cache_options, **options
        )

    def mv(self, path1: Any, path2: Any, recursive: bool = False, maxdepth: int | None = None, **_: Any) -> None:
        """Move files, and (`recursive`) folders with all that is in them, by their names: nothing is copied."""
        if maxdepth is not None:
            raise ValueError("mv moves a folder with all that is in it; there is no maxdepth")
        moves = self._moves(path1, path2)
        folders = {old for old, _ in moves if self.info(old)["type"] == "directory"}  # told before anything is moved
        if folders and not recursive:
            raise IsADirectoryError(
                errno.EISDIR, "a folder; mv(…, recursive=True) moves it with all that is in it", sorted(folders)[0]
            )
        for old, new in moves:
            told(new, self.ground.check, new)
            if old in folders:
                told(old, move_folder, self.namespace, old, new, self.namespace.rename)
            else:
                told(old, self.namespace.rename, old, new)

    def _moves(self, path1: Any, path2: Any) -> list[tuple[str, str]]:
        """What goes where: into a folder that is there, as fsspec copies."""
        if isinstance(path1, list) and isinstance(path2, list):
            return list(zip(self._strip_protocol(path1), self._strip_protocol(path2), strict=True))
        old, new = self._strip_protocol(path1), self._strip_protocol(path2)
        if isinstance(old, str) and not has_magic(old):
            into = trailing_sep(stringify_path(path2)) or (not trailing_sep(stringify_path(path1)) and self.isdir(new))
            return [(old, f"{new}/{old.rpartition('/')[2]}".lstrip("/") if into else new)]
        found = self.expand_path(old)
        below = tuple(f"{path}/" for path in found)
        found = [path for path in found if not path.startswith(below)]  # what lies in a folder goes with it
        targets = [path.strip("/") for path in other_paths(found, new, exists=len(found) == 1, flatten=isinstance(old, list))]
        if len(set(targets)) < len(targets):
            raise ValueError(f"mv to {path2}: two of the files would have the same name")
        return list(zip(found, targets, strict=True))

    # --- changing ----------------------------------------------------------------------------------------------

    async def _rm_file(self, path: str, **_: Any) -> None:
        path = self._strip_protocol(path)
        if (await self._info(path))["type"] == "directory":
            raise IsADirectoryError(errno.EISDIR, "a folder, no file", path)
        if not await self._do(path, self.namespace.delete, [path]):
            raise FileNotFoundError(path)

    async def _rm(
        self, path: Any, recursive: bool = False, batch_size: int | None = None, maxdepth: int | None = None, **_: Any
    ) -> None:
        paths = await self._expand_path(path, recursive=recursive, maxdepth=maxdepth)
        for each in paths:
            if not recursive and (await self._info(each))["type"] == "directory":
                raise IsADirectoryError(f"{each} is a folder; rm(…, recursive=True) removes it with all that is in it")
        await self._do(str(path), self.namespace.delete, [p for p in paths if p])

    async def _mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        path = self._strip_protocol(path)
        for folder in above(path):
            if await self._isfile(folder):
                raise NotADirectoryError(errno.ENOTDIR, "a file, no folder", folder)
        if path:
            await self._do(path, self.namespace.make_folder, path)

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        path = self._strip_protocol(path)
        if not path:
            return
        there = await self._do(path, self.namespace.stat, path)
        if there is None and (exist_ok or not await self._exists(path)):
            try:  # marked also where there are files below it already, which may go before the folder does
                await self._mkdir(path)
                return
            except FileExistsError:  # another one made it at the same time
                there = await self._do(path, self.namespace.stat, path)
        if not exist_ok or there is None or there.head.kind != "folder":
            raise FileExistsError(path)

    async def _rmdir(self, path: str) -> None:
        path = self._strip_protocol(path)
        await self._do(path, remove_folder, self.namespace, path)

    def rmdir(self, path: str) -> None:
        """Remove a folder that is empty."""
        _sync(self, self._rmdir, path)

    async def _touch(self, path: str, truncate: bool = True, **_: Any) -> None:
        path = self._strip_protocol(path)
        if truncate:
            await self._do(path, self._write, path, b"")
        elif await self._do(path, self.namespace.stat, path) is None:
            with suppress(FileExistsError):  # another one made it meanwhile
                await self._do(path, self._write, path, b"", True)

    def touch(self, path: str, truncate: bool = True, **options: Any) -> None:
        """Make an empty file, or (`truncate=False`) leave what is there."""
        _sync(self, self._touch, path, truncate, **options)

    async def _do(self, path: str, work: Callable[..., T], *args: Any) -> T:
        """Run a call of the namespace on a thread, its errors as those of a file system."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(told, path, work, *args))


def _described(path: str, head: Head) -> dict[str, Any]:
    return {
        "name": path,
        "size": head.nbytes if head.kind == "file" else 0,
        "type": "file" if head.kind == "file" else "directory",
        "created": head.created,
        "mtime": head.modified,
        "ukey": head.version,
    }


def _raise_unless_gone(error: OSError) -> None:
    """Of a listing: a folder may go while its parent is walked through."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _range(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    first = 0 if start is None else start if start >= 0 else max(0, size + start)
    last = size if end is None else end if end >= 0 else max(0, size + end)
    return first, min(last, size)


def _sync(fs: CkptFileSystem, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    from fsspec.asyn import sync

    return sync(fs.loop, call, *args, **options)
