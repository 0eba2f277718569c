"""What a directory contains, read with the links that an administrator or a data versioning tool puts into it.

A listing follows symbolic links, as the opening of a file does. Otherwise a sweep would not see a step that was moved to
another disk behind a link, and would delete the packs of other steps to which it refers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from ckpt.storage.base.errors import StoreError
from ckpt.storage.base.fd_io import convert_os_errors
from ckpt.storage.base.store import Entry, is_name


def walk_files(path: str, prefix: str, root: str, follow_links: bool) -> Iterator[Entry]:
    """Yield the objects of a folder and of the folders below it; nothing for a missing folder.

    prefix: what the names begin with, such as "steps/".
    root: as in `require_target`.
    follow_links: whether links count as what they lead to; otherwise they are left out.

    Raises StoreError if a folder can't be read, or if a link that is followed leads to nothing: what is behind it is unknown.
    """
    with convert_os_errors("listing", path):
        for entry in _scan_existing(path, root, follow_links):
            if not is_name(entry.name):  # a temporary file, or one that ckpt did not write
                continue
            try:
                if entry.is_dir(follow_symlinks=follow_links):
                    yield from walk_files(entry.path, f"{prefix}{entry.name}/", root, follow_links)
                elif entry.is_file(follow_symlinks=follow_links):
                    yield Entry(prefix + entry.name, entry.stat(follow_symlinks=follow_links).st_size)
                elif follow_links:
                    require_target(entry.path)
            except FileNotFoundError:  # deleted since the folder was read
                continue
            except NotADirectoryError:  # a link to a path that has a file as a folder
                require_target(entry.path)


def scan_folders(path: str, root: str, follow_links: bool) -> Iterator[str]:
    """Yield the names of the folders in a folder; nothing for a missing one.

    root: as in `require_target`.
    follow_links: whether a link to a folder counts as one, and a link whose target can't be seen, too: it may be one.

    Raises StoreError if the folder can't be read, or if it is behind a link that leads to nothing and is followed.
    """
    with convert_os_errors("listing", path):
        for entry in _scan_existing(path, root, follow_links):
            if is_name(entry.name) and (
                entry.is_dir(follow_symlinks=False)
                or (follow_links and entry.is_symlink() and (os.path.isdir(entry.path) or not os.path.exists(entry.path)))
            ):
                yield entry.name


def _scan_existing(path: str, root: str, follow_links: bool) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a folder; nothing for a missing one. The parameters are those of `walk_files`."""
    try:
        with os.scandir(path) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError):
        require_target(path if follow_links else root, root)  # the root itself is always followed


def require_target(path: str, root: str = "") -> None:
    """Raise StoreError if `path`, or the folder nearest to it that exists, is a symbolic link that leads to nothing.

    Such a file is not missing: for example, the disk on which it lies is not mounted.

    root: the folder above which no link is looked at.
    """
    while path != root and not os.path.lexists(path) and (parent := os.path.dirname(path)) != path:
        path = parent
    if os.path.islink(path) and not os.path.exists(path):
        with suppress(FileNotFoundError):  # deleted since
            raise StoreError(
                f"{path} is a symbolic link to {os.readlink(path)}, which does not exist: mount its disk, or delete the link "
                "if nobody needs what was behind it"
            )
