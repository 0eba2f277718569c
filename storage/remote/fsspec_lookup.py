"""Listings and lookups in a file system of fsspec, which fail where the file system would report too little.

A folder that can't be read is not empty, and a file in it is not missing: a sweep would delete packs that its steps need.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ckpt.storage.base.errors import Unavailable

Info = dict[str, Any]
"""What fsspec knows about a file or folder, with at least its name, type and size in bytes."""


def list_entries(fs: Any, folder: str) -> list[Info]:
    """Return what a folder contains. A link counts as what it leads to; it keeps the type "link" if that does not exist.

    Raises FileNotFoundError or NotADirectoryError if there is no such folder, Unavailable if the server did not list it, and
    other errors of the file system.
    """
    try:
        found: list[Info] = fs.ls(folder, detail=True)
    except FileNotFoundError:
        _require_listed(fs, folder)
        raise
    _require_listed(fs, folder)
    return [info if info["type"] in ("directory", "file") else _target_of(fs, info) for info in found]


def look_up(fs: Any, path: str) -> Info:
    """Return what is at a path. Raises FileNotFoundError or NotADirectoryError, and the other errors of `list_entries`."""
    try:
        found: Info = fs.info(path)
    except FileNotFoundError:
        _require_listed(fs, fs._parent(path))
        raise
    return found


def walk_folders(fs: Any, folder: str) -> dict[str, Info]:
    """Return all files below a folder, by path; raise an error if a folder cannot be read, unlike fsspec's own walk."""
    found = {}
    for info in list_entries(fs, folder):
        path = info["name"].rstrip("/")
        if info["type"] != "directory":
            found[path] = info
        elif path != folder:
            with suppress(FileNotFoundError):  # deleted since the folder was read
                found |= walk_folders(fs, path)
    return found


def _target_of(fs: Any, info: Info) -> Info:
    """Return the information about the target of a link, with the name of the link. Listings of SFTP do not follow links."""
    try:
        return {**fs.info(info["name"]), "name": info["name"]}
    except FileNotFoundError:
        return {**info, "type": "link"}


def _require_listed(fs: Any, folder: str) -> None:
    """Raise Unavailable if an FTP server has not listed a folder that exists.

    The FTP file system of fsspec takes a folder as empty after an error of its listing, such as "425 can't open data
    connection", and then a file in it as missing. It keeps only the listings that were complete.
    """
    from fsspec.implementations.ftp import FTPFileSystem

    if not isinstance(fs, FTPFileSystem):
        return
    cache = fs.dircache
    if not cache.use_listings_cache or cache.listings_expiry_time is not None or cache.max_paths:
        return  # the options of the user drop listings
    folder, below = fs._strip_protocol(folder), ""
    while folder not in cache:
        if folder == "/":
            below = folder
            break
        folder, below = fs._parent(folder), folder
    listed = cache.get(folder, [])
    if below == "/" or any(info["name"] == below and info["type"] == "directory" for _, info in listed):
        raise Unavailable(f"the server does not list {below}; check its log, and the permissions of this folder, and try again")
