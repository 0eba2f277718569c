"""Folders as programs of a file system know them. A namespace keeps names only: a folder is the files below it, and a mark."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable

from ckpt.aggregator.file_io.deletion import Deletion
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.records.paths import check_path
from ckpt.storage.base.errors import AlreadyExists

_CACHE_SECONDS = 5.0
_CACHE_ENTRIES = 10_000


class ParentCheck:
    """Where files can be: not below another file. Who writes by the namespace itself is not asked: a path is a name to it.
    Whether a folder without a mark has this name would have to be asked of nearly all members for each file, and is not.
    Safe to use from many threads."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._valid_until: dict[str, float] = {}  # folders, and until when each is known to exist: most files lie beside others

    def check(self, path: str) -> None:
        """Raises NotADirectoryError where a file can't be written."""
        check_path(path)
        now = time.monotonic()
        self._valid_until.pop(path, None)
        new = [folder for folder in parent_folders(path) if self._valid_until.get(folder, 0.0) < now]
        for folder, file in self._namespace.stat_all(new).items() if new else ():
            if file is not None and file.head.kind == "file":
                raise NotADirectoryError(errno.ENOTDIR, "a file, no folder", folder)
        if len(self._valid_until) > _CACHE_ENTRIES:
            self._valid_until = {}
        self._valid_until |= dict.fromkeys(new, now + _CACHE_SECONDS)


def parent_folders(path: str) -> list[str]:
    """The folders that a path lies in, without the root."""
    parts = path.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts))]


def is_folder(namespace: Namespace, path: str) -> bool:
    """Whether a path is a folder; the root is one."""
    file = namespace.stat(path) if path else None
    return not path or (file.head.kind == "folder" if file is not None else bool(namespace.list(path)))


def remove_folder(namespace: Namespace, path: str) -> None:
    """Remove a folder that is empty, and nothing else. Raises OSError: ENOENT, ENOTDIR or ENOTEMPTY."""
    if not path:
        raise OSError(errno.EBUSY, "the root of a namespace can't be removed", path)
    file = namespace.stat(path)
    if (file is None or file.head.kind == "folder") and namespace.list(path):
        raise OSError(errno.ENOTEMPTY, "the folder is not empty", path)
    deletion = Deletion(lambda current: current.head.kind == "folder")
    if file is not None:
        namespace.update_record(path, deletion.decide)
    before = deletion.seen.get(path)
    if before is None or not before.exists:
        raise FileNotFoundError(errno.ENOENT, "no such folder", path)
    if before.head.kind != "folder":
        raise NotADirectoryError(errno.ENOTDIR, "a file, no folder", path)


def move_folder(namespace: Namespace, old: str, new: str, rename: Callable[[str, str], None]) -> None:
    """Give a folder and all that is in it another name, in place of an empty folder or nothing. Cut off in the middle, some is
    at the old name and some at the new one, each file whole. rename: of one file.

    Raises OSError: ENOENT, EINVAL (into itself), ENOTDIR or ENOTEMPTY (what is at the new name).
    """
    if new == old:
        return
    if not old or f"{new}/".startswith(f"{old}/"):
        raise OSError(errno.EINVAL, "a folder can't be moved into itself", old)
    mark, target, below = namespace.stat(old), namespace.stat(new), namespace.list(old)
    if mark is None and not below:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), old)
    if target is not None and target.head.kind != "folder":
        raise NotADirectoryError(errno.ENOTDIR, "a file, no folder", new)
    if namespace.list(new):
        raise OSError(errno.ENOTEMPTY, "the folder is not empty", new)
    _mark_folder(namespace, new)
    for name, head in below.items():
        to = new + name[len(old) :]
        if head.kind == "file":
            rename(name, to)
        else:
            _mark_folder(namespace, to)
    namespace.delete([*(name for name, head in below.items() if head.kind == "folder"), old])


def _mark_folder(namespace: Namespace, path: str) -> None:
    try:
        namespace.make_folder(path)
    except AlreadyExists:
        if not is_folder(namespace, path):
            raise
