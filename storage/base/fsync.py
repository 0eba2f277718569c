"""Functions that make files, names and folders durable, from the root of a store up to its mount point.

A failed fsync is never retried, because the kernel may have dropped the dirty pages (see "fsyncgate"). The write of the object
fails instead.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress

from ckpt.storage.base.errors import NotFound
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.fd_io import convert_os_errors


def sync_file(fd: int, path: str) -> None:
    """Make the content of a file durable."""
    with convert_os_errors("making durable", path):
        failpoint("local.fsync")
        os.fsync(fd)


def sync_folder(path: str) -> None:
    """Make the names in a folder durable."""
    with convert_os_errors("making durable", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync_file(fd, path)
    finally:
        os.close(fd)


def sync_nearest_folder(path: str) -> None:
    """Make the names in a folder durable. If another process has removed the folder, make its removal durable."""
    while True:
        try:
            return sync_folder(path)
        except NotFound:
            if path == os.path.dirname(path):
                raise
            path = os.path.dirname(path)


_durable_roots: set[str] = set()
"""Roots of stores and folders above them that this process has made durable in their parents. Used without a lock, as each call
of a set is atomic, and a folder that two threads sync at once is durable."""

_NO_FSYNC_ERRNOS = (errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EROFS)
"""Errors of a folder that this user can't open, and of a file system without fsync for folders."""


def _fsync_if_possible(folder: str) -> None:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in _NO_FSYNC_ERRNOS:
            raise


def make_durable_root(root: str) -> None:
    """Create the root of a store and the folders above it, and make each durable in its parent, up to the mount point."""
    folder, chain = root, list[str]()
    while not (folder in _durable_roots and os.path.isdir(folder)) and folder != os.path.dirname(folder):
        chain.append(folder)
        folder = os.path.dirname(folder)
    for folder in reversed(chain):
        parent = os.path.dirname(folder)
        if not os.path.isdir(folder):
            with convert_os_errors("making the directory", folder), suppress(FileExistsError):
                make_directory(folder)
            sync_folder(parent)
        elif _is_same_file_system(folder, parent):
            with convert_os_errors("making durable", parent):
                _fsync_if_possible(parent)
        _durable_roots.add(folder)


def _is_same_file_system(folder: str, parent: str) -> bool:
    """Return whether a folder is on the file system of its parent, and not a mount point."""
    with convert_os_errors("looking up", folder):
        return os.stat(folder).st_dev == os.stat(parent).st_dev


def make_directory(folder: str) -> None:
    """Create a folder as os.mkdir does; raise PermissionError if the file system has no directories."""
    for pause_seconds in (0.001, 0.01, 0.1, None):
        try:
            os.mkdir(folder)
            return
        except FileNotFoundError as error:
            if not os.path.isdir(os.path.dirname(folder)):
                raise
            if pause_seconds is None:
                raise PermissionError(errno.EPERM, "this file system has no directories", folder) from error
            time.sleep(pause_seconds)  # another process may be removing the parent, or may just have made it again
