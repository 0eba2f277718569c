"""Finds whether a path is on a file system of this host or of a network, whose calls may hang or fail with its server.

SQLite shares its write-ahead log through memory, which processes of other hosts do not see. It relies on locks and fsync, which
network file systems do not always implement (https://sqlite.org/wal.html, https://sqlite.org/useovernet.html). On one, a
file can lose acknowledged changes or be damaged.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable

from ckpt.storage.base.errors import StoreError

LOCAL_FILE_SYSTEMS_VARIABLE = "CKPT_LOCAL_FILE_SYSTEMS"
"""The environment variable with folders, separated by ":", that the user declares to be on a file system of this host."""

_LOCAL_TYPES = {
    0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0x858458F6, 0x2FC12FC1, 0xF2F52010, 0x794C7630, 0x3153464A, 0x52654973,
    0xCA451A4E, 0x7366746E, 0x2011BAB0, 0x4D44, 0x482B, 0x3434, 0xF15F, 0x61756673,
}  # fmt: skip
"""f_type of statfs(2): ext2 to ext4, XFS, btrfs, tmpfs, ramfs, ZFS, F2FS, overlayfs, JFS, ReiserFS, bcachefs, NTFS, exFAT,
FAT, HFS+, NILFS, eCryptfs, aufs."""

_NETWORK_TYPES = {
    0x6969: "NFS", 0xFF534D42: "CIFS", 0xFE534D42: "SMB", 0x517B: "SMB", 0x0BD00BD0: "Lustre", 0x47504653: "GPFS",
    0x01021997: "9p", 0x00C36400: "CephFS", 0x19830326: "BeeGFS", 0x5346414F: "AFS", 0x6B414653: "AFS", 0x73757245: "Coda",
    0x20030528: "OrangeFS", 0xAAD7AAEA: "PanFS", 0x7461636F: "OCFS2", 0x01161970: "GFS2", 0xBEEFDEAD: "StorNext",
    0x786F4256: "a shared folder of VirtualBox",
}  # fmt: skip

_FUSE_TYPE = 0x65735546


def require_local_file_system(path: str | os.PathLike[str], what: str, advice: str) -> None:
    """Raise StoreError if `path` is on a network file system, or on one of an unknown type.

    what: for the message, what is stored there. advice: what to do instead.
    """
    where = os.path.abspath(path)
    found = _file_system_type(_existing_parent(where))
    if found is None or found in _LOCAL_TYPES or _is_allowed_by_user(where):
        return
    if found in _NETWORK_TYPES:
        kind = f"on {_NETWORK_TYPES[found]}"
    else:
        name = "FUSE" if found == _FUSE_TYPE else f"a file system of type {found:#x}"
        kind = f"on {name}, perhaps of a network"
    raise StoreError(
        f"{where} is {kind}, where {what} can lose acknowledged changes; {advice}; if it is local, set "
        f"{LOCAL_FILE_SYSTEMS_VARIABLE} to it"
    )


def is_on_local_file_system(path: str) -> bool:
    """Return whether `path` is on a file system of this host; True if the type is unknown (not Linux)."""
    found = _file_system_type(_existing_parent(path))
    return found is None or found in _LOCAL_TYPES


def depends_on_a_server(path: str) -> bool:
    """Return whether `path` is on a network file system, or on one that may be: its errors may come from a server."""
    where = os.path.abspath(path)
    return not (is_on_local_file_system(where) or _is_allowed_by_user(where))


def _is_allowed_by_user(where: str) -> bool:
    stated = [os.path.abspath(folder) for folder in os.environ.get(LOCAL_FILE_SYSTEMS_VARIABLE, "").split(":") if folder]
    return any(where == folder or where.startswith(folder.rstrip("/") + "/") for folder in stated)


def _existing_parent(where: str) -> str:
    while not os.path.isdir(where) and where != os.path.dirname(where):
        where = os.path.dirname(where)
    return where


def _file_system_type(folder: str) -> int | None:
    """Return the f_type of statfs(2); None if it is unknown (not Linux)."""
    statfs = _load_statfs()
    if statfs is None:
        return None
    result = ctypes.create_string_buffer(512)  # struct statfs has about 120 bytes, f_type first
    if statfs(os.fsencode(folder), result):
        return None  # the next call on this path fails for the same reason, with a message
    # Taken as 32 bits unsigned, because the kernel extends the sign on some architectures.
    nbytes = ctypes.sizeof(ctypes.c_long)
    return int.from_bytes(result.raw[:nbytes], sys.byteorder) & 0xFFFFFFFF


@functools.cache
def _load_statfs() -> Callable[[bytes, object], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        return ctypes.CDLL(None, use_errno=True).statfs  # type: ignore[no-any-return]
    except (OSError, AttributeError):
        return None
