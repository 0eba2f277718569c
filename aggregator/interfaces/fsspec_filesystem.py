"""A namespace as an fsspec filesystem: fsspec.open("ckpt://…/file"), also for zarr, h5py, pandas and torch DCP.

A file becomes visible, complete, when it is closed. A write to an existing name replaces the file at that moment; an append
writes only the new data and keeps the rest. A folder exists while a file is in it; a folder that was made exists until it is
removed.

There are two kinds of paths. `run/a` is a path in the namespace of this filesystem, and results for it are such paths.
`host:port,host:port/run/a` (or `@NAME/run/a`) contains its namespace. It is a URL without `ckpt://`: fsspec makes it when it
strips the protocol, and programs add the protocol again to get the URL. Results for it are of this kind. A filesystem without
`members` accepts paths of the second kind only, of any namespace.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TypeVar, TypeVarTuple

from fsspec.asyn import AsyncFileSystem
from fsspec.callbacks import DEFAULT_CALLBACK, Callback
from fsspec.utils import stringify_path

from ckpt.aggregator.cluster.config import NAMESPACE_SCHEME, full_path, is_full_path, join_url, split_full_path, split_url
from ckpt.aggregator.file_io.namespace import Namespace, open_namespace
from ckpt.aggregator.interfaces import file_transfer
from ckpt.aggregator.interfaces.folders import ParentCheck, parent_folders, remove_folder
from ckpt.aggregator.interfaces.fsspec_file import (
    CkptFile,
    DeferredFile,
    FileInfo,
    ResolvedPath,
    call_with_os_errors,
    file_info,
    raise_unless_missing,
)
from ckpt.aggregator.interfaces.fsspec_moves import move_paths
from ckpt.storage.base.store import Buffer, Writer
from ckpt.storage.base.threads import DaemonThreadPool

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_OnError = str | Callable[[OSError], object]
"""What a walk does where a folder can't be listed: "omit" or "raise", or a call with the error."""


class CkptFileSystem(AsyncFileSystem):  # type: ignore[misc]
    """The fsspec filesystem of a namespace.

    members: the part of the URL between ckpt:// and the path; without it, each path contains its namespace. redundancy: of new
    files, such as "2x" or "4+2"; default is that of the namespace. near: the member on this host, which gets first copies.

        fs = fsspec.filesystem("ckpt", members="host1:7070,host2:7070", redundancy="2x")
        fs.pipe("run/a", b"data")

    Raises ValueError if the arguments name no namespace. The methods raise OSError with the error numbers of a file system.
    """

    protocol = NAMESPACE_SCHEME
    root_marker = ""
    cachable = True
    mirror_sync_methods = True

    def __init__(
        self, members: str | None = None, redundancy: str | None = None, near: str | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.members = members
        self._redundancy = redundancy
        self._threads = DaemonThreadPool(16, "ckpt-fs")
        self._parent_checks: dict[str, ParentCheck] = {}
        if members:
            self.namespace, _ = open_namespace(join_url(members, redundancy=redundancy, near=near))
            self.parent_check = ParentCheck(self.namespace)

    def resolve(self, path: str | os.PathLike[str]) -> ResolvedPath:
        """Return the namespace of a path of either kind, and the path in it. Raises ValueError if there is no namespace."""
        text = stringify_path(path)
        if text.startswith(f"{NAMESPACE_SCHEME}://"):
            return self._resolve_in(*split_url(text)[:2])
        text = text.strip("/")
        if self.members:
            own_prefix = full_path(self.members)
            if text == own_prefix or text.startswith(f"{own_prefix}/"):
                return self._resolve_in(*split_full_path(text))
            return ResolvedPath(self.namespace, self.parent_check, text)
        if not is_full_path(text):
            raise ValueError(
                f"{text!r} names no namespace: write ckpt://host:port,host:port/path or ckpt://NAME/path, or give members="
            )
        return self._resolve_in(*split_full_path(text))

    def _resolve_in(self, member_list: str, path: str) -> ResolvedPath:
        if member_list == self.members:
            return ResolvedPath(self.namespace, self.parent_check, path, member_list)
        namespace, _ = open_namespace(join_url(member_list, redundancy=self._redundancy))
        return ResolvedPath(namespace, self._parent_checks.setdefault(member_list, ParentCheck(namespace)), path, member_list)

    # --- names -------------------------------------------------------------------------------------------------

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(p) for p in path]
        text = stringify_path(path)
        return full_path(*split_url(text)[:2]) if text.startswith(f"{NAMESPACE_SCHEME}://") else text.strip("/")

    def path_with_parent(self, path: Any) -> Any:
        """Return a path with a slash for the same file: a path at the root gets its namespace in front, others stay.

        fsspec takes the folder of a path from its text, and treats a path without a slash as its own folder.
        """
        if not self.members or not isinstance(path, str) or not path.strip("/") or "/" in path.strip("/"):
            return path
        return f"{full_path(self.members)}/{path.lstrip('/')}"

    async def _get(self, rpath: Any, lpath: Any, *args: Any, **options: Any) -> Any:
        return await super()._get(self.path_with_parent(rpath), lpath, *args, **options)

    async def _copy(self, path1: Any, path2: Any, *args: Any, **options: Any) -> Any:
        return await super()._copy(self.path_with_parent(path1), path2, *args, **options)

    @classmethod
    def _get_kwargs_from_urls(cls, urlpath: str | os.PathLike[str]) -> dict[str, str]:
        text = stringify_path(urlpath)
        if not text.startswith(f"{NAMESPACE_SCHEME}://"):
            return {}
        members, _, options = split_url(text)
        return {"members": members, **options}

    def unstrip_protocol(self, name: str) -> str:
        """Return the URL of a path."""
        text: str = stringify_path(name)
        if text.startswith(f"{NAMESPACE_SCHEME}://"):
            return text
        location = self.resolve(text)
        # A path that contains its namespace gets the protocol only, so that its URL is the original one.
        return (
            f"{NAMESPACE_SCHEME}://{self._strip_protocol(text)}"
            if location.member_list
            else join_url(self.members or "", location.path)
        )

    @property
    def fsid(self) -> str:
        """The same text for all filesystems of one namespace."""
        return f"{NAMESPACE_SCHEME}-{self.members or ''}"

    # --- information -------------------------------------------------------------------------------------------

    async def _info(self, path: str, **_: object) -> FileInfo:
        location = self.resolve(path)
        name = location.full_name(location.path)
        if location.path:
            file = await self._call_in_thread(name, location.namespace.stat, location.path)
            if file is not None:
                return file_info(name, file.head)
        below = await self._call_in_thread(name, location.namespace.list, location.path)
        if location.path and not below:
            raise FileNotFoundError(name)
        return {"name": name, "size": 0, "type": "directory"}

    async def _ls(self, path: str, detail: bool = True, **_: object) -> list[FileInfo] | list[str]:
        location = self.resolve(path)
        heads = await self._call_in_thread(location.full_name(location.path), location.namespace.list, location.path)
        found: dict[str, FileInfo] = {}
        skip = len(location.path) + 1 if location.path else 0
        for name, head in heads.items():
            child, deeper, _rest = name[skip:].partition("/")
            full = location.full_name(name[:skip] + child)
            if deeper:
                found.setdefault(full, {"name": full, "size": 0, "type": "directory"})
            else:
                found[full] = file_info(full, head)
        if not found and location.path:
            own_info = await self._info(path)
            if own_info["type"] == "file":
                found[own_info["name"]] = own_info
        return [found[name] for name in sorted(found)] if detail else sorted(found)

    async def _isfile(self, path: str) -> bool:
        return await self._entry_type(path) == "file"

    async def _isdir(self, path: str) -> bool:
        return await self._entry_type(path) == "directory"

    async def _entry_type(self, path: str) -> str | None:
        """Return the type of a path, None where nothing exists. Other errors do not show that, and are raised."""
        try:
            return (await self._info(path))["type"]
        except FileNotFoundError:
            return None

    async def _walk(
        self, path: str, maxdepth: int | None = None, topdown: bool = True, on_error: _OnError | None = None,
        below: _OnError | None = None, **options: Any,
    ) -> AsyncIterator[tuple[str, Any, Any]]:  # fmt: skip
        """Walk as fsspec does, but raise where a folder can't be listed, unless `on_error` is given: a copy or a removal would
        treat the folder as empty. below: `on_error` for the folders below, to which fsspec does not pass it."""
        on_error = on_error or below or raise_unless_missing
        async for found in super()._walk(path, maxdepth, topdown, on_error, below=on_error, **options):
            yield found

    async def _find(self, path: str, maxdepth: int | None = None, withdirs: bool = False, **options: Any) -> Any:
        location = self.resolve(path)
        if maxdepth is not None or withdirs:
            return await super()._find(self._strip_protocol(path), maxdepth=maxdepth, withdirs=withdirs, **options)
        heads = await self._call_in_thread(location.full_name(location.path), location.namespace.list, location.path)
        found = [file_info(location.full_name(name), head) for name, head in heads.items() if head.kind == "file"]
        if not found and location.path:
            file = await self._call_in_thread(location.full_name(location.path), location.namespace.stat, location.path)
            if file is not None and file.head.kind == "file":
                found = [file_info(location.full_name(location.path), file.head)]
        files = {each["name"]: each for each in found}
        return files if options.get("detail") else sorted(files)

    def created(self, path: str) -> datetime:
        """Return the time when the file was first written."""
        return datetime.fromtimestamp(self._file_times(path)["created"], UTC)

    def modified(self, path: str) -> datetime:
        """Return the time when the current content of the file was written."""
        return datetime.fromtimestamp(self._file_times(path)["mtime"], UTC)

    def _file_times(self, path: str) -> FileInfo:
        info: FileInfo = self.info(path)
        if "mtime" not in info:
            raise FileNotFoundError(
                f"{path}: a folder that was not made, but has files in it, has no times; make it with mkdir"
            )
        return info

    # --- reading and writing -----------------------------------------------------------------------------------

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: object) -> bytes:
        location = self.resolve(path)
        return await self._call_in_thread(path, file_transfer.read_file_range, location.namespace, location.path, start, end)

    async def _pipe_file(self, path: str, value: Buffer, mode: str = "overwrite", **_: object) -> None:
        await self._call_in_thread(path, self._put_whole, self.resolve(path), value, mode == "create")

    def _put_whole(self, location: ResolvedPath, value: Buffer, new: bool = False) -> None:
        if self._intrans:
            self._write(location, memoryview(value).nbytes, functools.partial(file_transfer.append_in_stripes, value), new)
            return
        location.parent_check.check(location.path)
        location.namespace.put(location.path, value, new)

    def _write(self, location: ResolvedPath, size: int, append: Callable[[Writer], object], new: bool = False) -> None:
        """Write a file, which becomes visible at the end of the transaction, or at once outside of one.

        size: the expected bytes. append: appends all data to a writer. new: raise AlreadyExists if a file exists.
        """
        in_transaction = self._intrans
        location.parent_check.check(location.path)
        writer = location.namespace.create(location.path, None, size, new=new, aligned=False)
        try:
            append(writer)
            if not in_transaction:
                writer.commit()
        except BaseException:
            writer.abort()
            raise
        if in_transaction:
            self.transaction.files.append(DeferredFile(location.path, writer))

    async def _put_file(
        self, lpath: str, rpath: str, callback: Callback = DEFAULT_CALLBACK, mode: str = "overwrite", **_: object
    ) -> None:
        location = self.resolve(rpath)
        if os.path.isdir(lpath):
            await self._makedirs(rpath, exist_ok=True)
            return
        size = os.path.getsize(lpath)
        callback.set_size(size)
        append = functools.partial(file_transfer.append_local_file, lpath, callback)
        await self._call_in_thread(rpath, self._write, location, size, append, mode == "create")

    async def _get_file(self, rpath: str, lpath: str, callback: Callback = DEFAULT_CALLBACK, **_: object) -> None:
        location = self.resolve(rpath)
        if (await self._info(rpath))["type"] == "directory":
            os.makedirs(lpath, exist_ok=True)
            return
        await self._call_in_thread(rpath, file_transfer.download_file, location.namespace, location.path, lpath, callback)

    async def _cp_file(self, path1: str, path2: str, **_: object) -> None:
        source, target = self.resolve(path1), self.resolve(path2)
        if (await self._info(path1))["type"] == "directory":
            await self._makedirs(path2, exist_ok=True)
            return

        await self._call_in_thread(path1, self._copy_between, source, target)

    def _copy_between(self, source: ResolvedPath, target: ResolvedPath) -> None:
        with source.namespace.open(source.path) as reader:
            self._write(target, reader.file.head.nbytes, functools.partial(file_transfer.append_file, reader))

    def _open(
        self, path: str, mode: str = "rb", block_size: int | None = None, autocommit: bool = True,
        cache_options: dict[str, object] | None = None, **options: Any,
    ) -> CkptFile:  # fmt: skip
        return CkptFile(
            self, self._strip_protocol(path), mode, block_size or 4 << 20, autocommit, cache_options=cache_options, **options
        )

    def mv(self, path1: Any, path2: Any, recursive: bool = False, maxdepth: int | None = None, **_: object) -> None:
        """Rename files, and with `recursive` folders with all their content, without a copy.

        Raises OSError: EXDEV between two namespaces, EISDIR for a folder without `recursive`, and those of a rename.
        """
        if maxdepth is not None:
            raise ValueError("mv moves a folder with all its content, so leave maxdepth out")
        move_paths(self, path1, path2, recursive)

    # --- changing ----------------------------------------------------------------------------------------------

    async def _rm_file(self, path: str, **_: object) -> None:
        location = self.resolve(path)
        if (await self._info(path))["type"] == "directory":
            raise IsADirectoryError(errno.EISDIR, "a folder, not a file", path)
        if not await self._call_in_thread(path, location.namespace.delete, [location.path]):
            raise FileNotFoundError(path)

    async def _rm(
        self, path: Any, recursive: bool = False, batch_size: int | None = None, maxdepth: int | None = None, **_: object
    ) -> None:
        paths = await self._expand_path(path, recursive=recursive, maxdepth=maxdepth)
        for each in paths:
            if not recursive and (await self._info(each))["type"] == "directory":
                raise IsADirectoryError(f"{each} is a folder; rm(…, recursive=True) removes it with all its content")
        paths_by_namespace: dict[Namespace, list[str]] = defaultdict(list)
        for location in map(self.resolve, paths):
            if location.path:
                paths_by_namespace[location.namespace].append(location.path)
        for namespace, below in paths_by_namespace.items():
            await self._call_in_thread(str(path), namespace.delete, below)

    async def _mkdir(self, path: str, create_parents: bool = True, **_: object) -> None:
        location = self.resolve(path)
        for folder in map(location.full_name, parent_folders(location.path)):
            if await self._isfile(folder):
                raise NotADirectoryError(errno.ENOTDIR, "a file, not a folder", folder)
        if location.path:
            await self._call_in_thread(path, location.namespace.make_folder, location.path)

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        location = self.resolve(path)
        if not location.path:
            return
        record = await self._call_in_thread(path, location.namespace.stat, location.path)
        if record is None and (exist_ok or not await self._exists(path)):
            try:  # a mark is needed also where files are below: they may be removed before the folder is
                await self._mkdir(path)
                return
            except FileExistsError:  # another client made it at the same time
                record = await self._call_in_thread(path, location.namespace.stat, location.path)
        if not exist_ok or record is None or record.head.kind != "folder":
            raise FileExistsError(path)

    async def _rmdir(self, path: str) -> None:
        location = self.resolve(path)
        await self._call_in_thread(path, remove_folder, location.namespace, location.path)

    def rmdir(self, path: str) -> None:
        """Remove an empty folder. Raises OSError: ENOENT, ENOTDIR or ENOTEMPTY."""
        _call_sync(self, self._rmdir, path)

    async def _touch(self, path: str, truncate: bool = True, **_: object) -> None:
        location = self.resolve(path)
        if truncate:
            await self._call_in_thread(path, self._put_whole, location, b"")
        elif await self._call_in_thread(path, location.namespace.stat, location.path) is None:
            with suppress(FileExistsError):  # another client made it meanwhile
                await self._call_in_thread(path, self._put_whole, location, b"", True)

    def touch(self, path: str, truncate: bool = True, **options: Any) -> None:
        """Make an empty file. With `truncate=False`, keep an existing file."""
        _call_sync(self, self._touch, path, truncate, **options)

    async def _call_in_thread(self, path: str, work: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run a call of the namespace on a thread. Raises the errors of a file system."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(call_with_os_errors, path, work, *args))


def _call_sync(fs: CkptFileSystem, call: Callable[..., Awaitable[object]], *args: object, **options: object) -> object:
    from fsspec.asyn import sync

    return sync(fs.loop, call, *args, **options)
