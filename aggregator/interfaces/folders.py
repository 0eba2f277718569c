"""Folders with the rules of a file system: a folder exists while it has a mark or a file below it."""

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
    """The check that a new file is not below another file. The namespace itself has no such rule. Safe for many threads.

    It does not check whether a folder without a mark has the name of the file: that would need a call to nearly all members for
    each file.
    """

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._valid_until: dict[str, float] = {}
        """The checked folders, which most files share, and until when each check counts. Threads change it without a lock: an
        entry that is lost costs one more check."""

    def check(self, path: str) -> None:
        """Raise NotADirectoryError if the path is below a file, and InvalidName if it can't name a file."""
        check_path(path)
        now = time.monotonic()
        self._valid_until.pop(path, None)
        new = [folder for folder in parent_folders(path) if self._valid_until.get(folder, 0.0) < now]
        for folder, file in self._namespace.stat_all(new).items() if new else ():
            if file is not None and file.head.kind == "file":
                raise NotADirectoryError(errno.ENOTDIR, "a file, not a folder", folder)
        if len(self._valid_until) > _CACHE_ENTRIES:
            self._valid_until = {}
        self._valid_until |= dict.fromkeys(new, now + _CACHE_SECONDS)


def parent_folders(path: str) -> list[str]:
    """Return the folders above a path, without the root, the highest first."""
    parts = path.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts))]


def is_namespace_folder(namespace: Namespace, path: str) -> bool:
    """Return whether a path is a folder. The root is one."""
    file = namespace.stat(path) if path else None
    return not path or (file.head.kind == "folder" if file is not None else bool(namespace.list(path)))


def remove_folder(namespace: Namespace, path: str) -> None:
    """Remove an empty folder. Raises OSError: EBUSY for the root, ENOENT, ENOTDIR or ENOTEMPTY."""
    if not path:
        raise OSError(errno.EBUSY, "the root of a namespace can't be removed", path)
    file = namespace.stat(path)
    if (file is None or file.head.kind == "folder") and namespace.list(path):
        raise OSError(errno.ENOTEMPTY, "the folder is not empty", path)
    deletion = Deletion(lambda current: current.head.kind == "folder")
    after = None if file is None else namespace.update_record(path, deletion.decide)
    if deletion.is_done(path, after):
        return
    before = deletion.seen.get(path)
    if before is None or not before.exists:
        raise FileNotFoundError(errno.ENOENT, "no such folder", path)
    if before.head.kind != "folder":
        raise NotADirectoryError(errno.ENOTDIR, "a file, not a folder", path)


def move_folder(namespace: Namespace, old: str, new: str, rename: Callable[[str, str], None]) -> None:
    """Rename a folder and everything in it. At the new name there may only be an empty folder.

    If it is interrupted, some files have their old and some their new names, and each is complete. rename: renames one file.
    Raises OSError: ENOENT, EINVAL (into itself), and ENOTDIR or ENOTEMPTY for the new name.
    """
    if new == old:
        return
    if not old or f"{new}/".startswith(f"{old}/"):
        raise OSError(errno.EINVAL, "a folder can't be moved into itself", old)
    mark, target, below = namespace.stat(old), namespace.stat(new), namespace.list(old)
    if mark is None and not below:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), old)
    if target is not None and target.head.kind != "folder":
        raise NotADirectoryError(errno.ENOTDIR, "a file, not a folder", new)
    if namespace.list(new):
        raise OSError(errno.ENOTEMPTY, "the folder is not empty", new)
    _mark_folder(namespace, new)
    for name, head in below.items():
        new_name = new + name[len(old) :]
        if head.kind == "file":
            rename(name, new_name)
        else:
            _mark_folder(namespace, new_name)
    folders = [*(name for name, head in below.items() if head.kind == "folder"), old]
    namespace.delete(folders, only_folders=True)  # another client may have written a file of such a name meanwhile


def _mark_folder(namespace: Namespace, path: str) -> None:
    """Create a folder mark; a folder that exists is no error."""
    try:
        namespace.make_folder(path)
    except AlreadyExists:
        if not is_namespace_folder(namespace, path):
            raise
