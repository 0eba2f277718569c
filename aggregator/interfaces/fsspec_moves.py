"""Renames for fsspec: which paths `mv` moves, and where to."""

from __future__ import annotations

import errno
from glob import has_magic
from typing import TYPE_CHECKING, Any

from fsspec.implementations.local import trailing_sep
from fsspec.utils import other_paths, stringify_path

from ckpt.aggregator.interfaces.folders import move_folder
from ckpt.aggregator.interfaces.fsspec_file import call_with_os_errors

if TYPE_CHECKING:
    from ckpt.aggregator.interfaces.fsspec_filesystem import CkptFileSystem


def move_paths(fs: CkptFileSystem, path1: Any, path2: Any, recursive: bool) -> None:
    """Rename files and, with `recursive`, folders, without a copy. Raises OSError, before the first move where it can."""
    moves = _plan_moves(fs, path1, path2)
    folders = {old for old, _ in moves if fs.info(old)["type"] == "directory"}  # find errors before the first move
    if folders and not recursive:
        raise IsADirectoryError(
            errno.EISDIR, "a folder; mv(…, recursive=True) moves it with all its content", sorted(folders)[0]
        )
    for old, new in moves:
        source, target = fs.resolve(old), fs.resolve(new)
        if source.namespace is not target.namespace:
            raise OSError(errno.EXDEV, "another namespace: copy the file there, and remove it here", new)
        call_with_os_errors(new, target.parent_check.check, target.path)
        if old in folders:
            call_with_os_errors(old, move_folder, source.namespace, source.path, target.path, source.namespace.rename)
        else:
            call_with_os_errors(old, source.namespace.rename, source.path, target.path)


def _plan_moves(fs: CkptFileSystem, path1: Any, path2: Any) -> list[tuple[str, str]]:
    """Return pairs of old and new paths. As for a copy by fsspec, an existing folder at the new path is a parent."""
    if isinstance(path1, list) and isinstance(path2, list):
        return list(zip(fs._strip_protocol(path1), fs._strip_protocol(path2), strict=True))
    old, new = fs._strip_protocol(fs.path_with_parent(path1)), fs._strip_protocol(path2)
    if isinstance(old, str) and not has_magic(old):
        is_into = trailing_sep(stringify_path(path2)) or (not trailing_sep(stringify_path(path1)) and fs.isdir(new))
        return [(old, f"{new}/{old.rpartition('/')[2]}".lstrip("/") if is_into else new)]
    found = fs.expand_path(old)
    below = tuple(f"{path}/" for path in found)
    found = [path for path in found if not path.startswith(below)]  # files in a folder move with the folder
    targets = [path.strip("/") for path in other_paths(found, new, exists=len(found) == 1, flatten=isinstance(old, list))]
    if len(set(targets)) < len(targets):
        raise ValueError(f"mv to {path2}: two of the files would get the same name; move them one by one")
    return list(zip(found, targets, strict=True))
