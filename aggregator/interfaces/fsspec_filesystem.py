"""The namespace as an fsspec filesystem: fsspec.open("ckpt://…/file"), and with it zarr, h5py, pandas, torch DCP.

A file is written once: it is there, whole, when it is closed, and never before. Writing to a name that is there replaces it
at that moment; appending writes what is new and keeps the rest. Folders are there while something is in them, and those that
were made, until they are removed.

A path is one of two kinds. `run/a` is a path in the namespace of this filesystem, and answers to it are such paths.
`host:port,host:port/run/a` (or `@NAME/run/a`) says its namespace itself. It is a URL without `ckpt://`, and what a URL becomes
when its protocol is stripped, so that programs can build the URL from both again; answers to it are of this kind. A filesystem
that was made without `members` takes paths of the second kind only, of any namespace.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from glob import has_magic
from typing import Any, TypeVar

from fsspec.asyn import AsyncFileSystem
from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.implementations.local import trailing_sep
from fsspec.utils import other_paths, stringify_path

from ckpt.aggregator.cluster.config import NAMESPACE_SCHEME, full_path, is_full_path, join_url, split_full_path, split_url
from ckpt.aggregator.file_io.namespace import Namespace, open_namespace
from ckpt.aggregator.interfaces.file_transfer import copy_file, download_file, read_range, upload_file
from ckpt.aggregator.interfaces.folders import ParentCheck, move_folder, parent_folders, remove_folder
from ckpt.aggregator.interfaces.fsspec_file import CkptFile, call_with_os_errors
from ckpt.aggregator.records.file_record import RecordHead
from ckpt.storage.base.threads import DaemonThreadPool

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _ResolvedPath:
    """Where a path leads."""

    namespace: Namespace
    parent_check: ParentCheck
    path: str
    """In the namespace."""
    member_list: str = ""
    """What names the members, where the path says it."""

    def full_name(self, path: str) -> str:
        """Another path of the namespace, of the kind that this one was given in."""
        return full_path(self.member_list, path) if self.member_list else path


class CkptFileSystem(AsyncFileSystem):  # type: ignore[misc]
    """One namespace. `members` is what stands between ckpt:// and the path; `redundancy` that of new files; `near` the member
    that stands on this host. Without `members` each path says its namespace."""

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

    def resolve(self, path: Any) -> _ResolvedPath:
        """Where a path leads, of either kind. Raises ValueError where it says no namespace, and nothing else does."""
        text = stringify_path(path)
        if text.startswith(f"{NAMESPACE_SCHEME}://"):
            return self._resolve_in(*split_url(text)[:2])
        text = text.strip("/")
        if self.members:
            own_prefix = full_path(self.members)
            if text == own_prefix or text.startswith(f"{own_prefix}/"):
                return self._resolve_in(*split_full_path(text))
            return _ResolvedPath(self.namespace, self.parent_check, text)
        if not is_full_path(text):
            raise ValueError(
                f"{text!r} names no namespace: write ckpt://host:port,host:port/path, or ckpt://NAME/path, or give members="
            )
        return self._resolve_in(*split_full_path(text))

    def _resolve_in(self, member_list: str, path: str) -> _ResolvedPath:
        if member_list == self.members:
            return _ResolvedPath(self.namespace, self.parent_check, path, member_list)
        namespace, _ = open_namespace(join_url(member_list, redundancy=self._redundancy))
        return _ResolvedPath(namespace, self._parent_checks.setdefault(member_list, ParentCheck(namespace)), path, member_list)

    # --- names -------------------------------------------------------------------------------------------------

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(p) for p in path]
        text = stringify_path(path)
        return full_path(*split_url(text)[:2]) if text.startswith(f"{NAMESPACE_SCHEME}://") else text.strip("/")

    @classmethod
    def _get_kwargs_from_urls(cls, urlpath: Any) -> dict[str, Any]:
        text = stringify_path(urlpath)
        if not text.startswith(f"{NAMESPACE_SCHEME}://"):
            return {}
        members, _, options = split_url(text)
        return {"members": members, **options}

    def unstrip_protocol(self, name: str) -> str:
        """The URL of a path."""
        text: str = stringify_path(name)
        if text.startswith(f"{NAMESPACE_SCHEME}://"):
            return text
        location = self.resolve(text)
        # One that says its namespace is a URL already: so it is the same, character by character, when it comes back.
        return (
            f"{NAMESPACE_SCHEME}://{self._strip_protocol(text)}"
            if location.member_list
            else join_url(self.members or "", location.path)
        )

    @property
    def fsid(self) -> str:
        """Two of one namespace are one."""
        return f"{NAMESPACE_SCHEME}-{self.members or ''}"

    # --- looking -----------------------------------------------------------------------------------------------

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        at = self.resolve(path)
        name = at.full_name(at.path)
        if at.path:
            file = await self._call_in_thread(name, at.namespace.stat, at.path)
            if file is not None:
                return _file_info(name, file.head)
        below = await self._call_in_thread(name, at.namespace.list, at.path)
        if at.path and not below:
            raise FileNotFoundError(name)
        return {"name": name, "size": 0, "type": "directory"}

    async def _ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        at = self.resolve(path)
        heads: dict[str, RecordHead] = await self._call_in_thread(at.full_name(at.path), at.namespace.list, at.path)
        found: dict[str, dict[str, Any]] = {}
        skip = len(at.path) + 1 if at.path else 0
        for name, head in heads.items():
            child, deeper, _rest = name[skip:].partition("/")
            full = at.full_name(name[:skip] + child)
            if deeper:
                found.setdefault(full, {"name": full, "size": 0, "type": "directory"})
            else:
                found[full] = _file_info(full, head)
        if not found and at.path:
            own_info: dict[str, Any] = await self._info(path)
            if own_info["type"] == "file":
                found[own_info["name"]] = own_info
        return [found[name] if detail else name for name in sorted(found)]

    async def _isfile(self, path: str) -> bool:
        return await self._entry_type(path) == "file"

    async def _isdir(self, path: str) -> bool:
        return await self._entry_type(path) == "directory"

    async def _entry_type(self, path: str) -> str | None:
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
        on_error = on_error or below or _raise_unless_missing
        async for found in super()._walk(path, maxdepth, topdown, on_error, below=on_error, **options):
            yield found

    async def _find(self, path: str, maxdepth: int | None = None, withdirs: bool = False, **options: Any) -> Any:
        at = self.resolve(path)
        if maxdepth is not None or withdirs:
            return await super()._find(self._strip_protocol(path), maxdepth=maxdepth, withdirs=withdirs, **options)
        heads: dict[str, RecordHead] = await self._call_in_thread(at.full_name(at.path), at.namespace.list, at.path)
        found = [_file_info(at.full_name(name), head) for name, head in heads.items() if head.kind == "file"]
        if not found and at.path:
            file = await self._call_in_thread(at.full_name(at.path), at.namespace.stat, at.path)
            if file is not None and file.head.kind == "file":
                found = [_file_info(at.full_name(at.path), file.head)]
        files = {each["name"]: each for each in found}
        return files if options.get("detail") else sorted(files)

    def created(self, path: str) -> datetime:
        """When the file was first written."""
        return datetime.fromtimestamp(self._file_times(path)["created"], UTC)

    def modified(self, path: str) -> datetime:
        """When the content was written."""
        return datetime.fromtimestamp(self._file_times(path)["mtime"], UTC)

    def _file_times(self, path: str) -> dict[str, Any]:
        info: dict[str, Any] = self.info(path)
        if "mtime" not in info:
            raise FileNotFoundError(f"{path}: a folder that only its content makes has no times")
        return info

    # --- reading and writing -----------------------------------------------------------------------------------

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        at = self.resolve(path)
        found: bytes = await self._call_in_thread(path, read_range, at.namespace, at.path, start, end)
        return found

    async def _pipe_file(self, path: str, value: Any, mode: str = "overwrite", **_: Any) -> None:
        await self._call_in_thread(path, self._put_whole, self.resolve(path), value, mode == "create")

    def _put_whole(self, location: _ResolvedPath, value: Any, new: bool = False) -> None:
        location.parent_check.check(location.path)
        location.namespace.put(location.path, value, new)

    async def _put_file(
        self, lpath: str, rpath: str, callback: Any = DEFAULT_CALLBACK, mode: str = "overwrite", **_: Any
    ) -> None:
        at = self.resolve(rpath)
        if os.path.isdir(lpath):
            await self._makedirs(rpath, exist_ok=True)
            return
        new = mode == "create"
        await self._call_in_thread(rpath, upload_file, lpath, at.namespace, at.path, at.parent_check, new, callback)

    async def _get_file(self, rpath: str, lpath: str, callback: Any = DEFAULT_CALLBACK, **_: Any) -> None:
        at = self.resolve(rpath)
        if (await self._info(rpath))["type"] == "directory":
            os.makedirs(lpath, exist_ok=True)
            return
        await self._call_in_thread(rpath, download_file, at.namespace, at.path, lpath, callback)

    async def _cp_file(self, path1: str, path2: str, **_: Any) -> None:
        source, target = self.resolve(path1), self.resolve(path2)
        if (await self._info(path1))["type"] == "directory":
            await self._makedirs(path2, exist_ok=True)
            return

        def copy() -> None:
            target.parent_check.check(target.path)
            copy_file(source.namespace, source.path, target.namespace, target.path)

        await self._call_in_thread(path1, copy)

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
        moves = self._plan_moves(path1, path2)
        folders = {old for old, _ in moves if self.info(old)["type"] == "directory"}  # told before anything is moved
        if folders and not recursive:
            raise IsADirectoryError(
                errno.EISDIR, "a folder; mv(…, recursive=True) moves it with all that is in it", sorted(folders)[0]
            )
        for old, new in moves:
            source, target = self.resolve(old), self.resolve(new)
            if source.namespace is not target.namespace:
                raise OSError(errno.EXDEV, "another namespace: copy it there, and remove it here", new)
            call_with_os_errors(new, target.parent_check.check, target.path)
            if old in folders:
                call_with_os_errors(old, move_folder, source.namespace, source.path, target.path, source.namespace.rename)
            else:
                call_with_os_errors(old, source.namespace.rename, source.path, target.path)

    def _plan_moves(self, path1: Any, path2: Any) -> list[tuple[str, str]]:
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
        at = self.resolve(path)
        if (await self._info(path))["type"] == "directory":
            raise IsADirectoryError(errno.EISDIR, "a folder, no file", path)
        if not await self._call_in_thread(path, at.namespace.delete, [at.path]):
            raise FileNotFoundError(path)

    async def _rm(
        self, path: Any, recursive: bool = False, batch_size: int | None = None, maxdepth: int | None = None, **_: Any
    ) -> None:
        paths = await self._expand_path(path, recursive=recursive, maxdepth=maxdepth)
        for each in paths:
            if not recursive and (await self._info(each))["type"] == "directory":
                raise IsADirectoryError(f"{each} is a folder; rm(…, recursive=True) removes it with all that is in it")
        paths_by_namespace: dict[Namespace, list[str]] = defaultdict(list)
        for at in map(self.resolve, paths):
            if at.path:
                paths_by_namespace[at.namespace].append(at.path)
        for namespace, below in paths_by_namespace.items():
            await self._call_in_thread(str(path), namespace.delete, below)

    async def _mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        at = self.resolve(path)
        for folder in map(at.full_name, parent_folders(at.path)):
            if await self._isfile(folder):
                raise NotADirectoryError(errno.ENOTDIR, "a file, no folder", folder)
        if at.path:
            await self._call_in_thread(path, at.namespace.make_folder, at.path)

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        at = self.resolve(path)
        if not at.path:
            return
        record = await self._call_in_thread(path, at.namespace.stat, at.path)
        if record is None and (exist_ok or not await self._exists(path)):
            try:  # marked also where there are files below it already, which may go before the folder does
                await self._mkdir(path)
                return
            except FileExistsError:  # another one made it at the same time
                record = await self._call_in_thread(path, at.namespace.stat, at.path)
        if not exist_ok or record is None or record.head.kind != "folder":
            raise FileExistsError(path)

    async def _rmdir(self, path: str) -> None:
        at = self.resolve(path)
        await self._call_in_thread(path, remove_folder, at.namespace, at.path)

    def rmdir(self, path: str) -> None:
        """Remove a folder that is empty."""
        _call_sync(self, self._rmdir, path)

    async def _touch(self, path: str, truncate: bool = True, **_: Any) -> None:
        at = self.resolve(path)
        if truncate:
            await self._call_in_thread(path, self._put_whole, at, b"")
        elif await self._call_in_thread(path, at.namespace.stat, at.path) is None:
            with suppress(FileExistsError):  # another one made it meanwhile
                await self._call_in_thread(path, self._put_whole, at, b"", True)

    def touch(self, path: str, truncate: bool = True, **options: Any) -> None:
        """Make an empty file, or (`truncate=False`) leave what is there."""
        _call_sync(self, self._touch, path, truncate, **options)

    async def _call_in_thread(self, path: str, work: Callable[..., T], *args: Any) -> T:
        """Run a call of the namespace on a thread, its errors as those of a file system."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(call_with_os_errors, path, work, *args))


def _file_info(path: str, head: RecordHead) -> dict[str, Any]:
    return {
        "name": path,
        "size": head.nbytes if head.kind == "file" else 0,
        "type": "file" if head.kind == "file" else "directory",
        "created": head.created,
        "mtime": head.modified,
        "ukey": head.version,
    }


def _raise_unless_missing(error: OSError) -> None:
    """Of a listing: a folder may go while its parent is walked through."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _call_sync(fs: CkptFileSystem, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    from fsspec.asyn import sync

    return sync(fs.loop, call, *args, **options)
