"""Small notes from one process to others of the same user on this host, in shared memory.

A note says why a rank failed. It must arrive where the store does not answer, through which ranks pass on everything else. Each
note is a file `/dev/shm/ckpt-notes-<uid>/<hash of the key>`. Without shared memory nothing is left and nothing read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import time
from pathlib import Path

_BASE = Path("/dev/shm")
_MAX_BYTES = 64 * 1024
_EXPIRY_SECONDS = 86400.0
"""Nobody waits for a rank for so long."""


def write(key: str, data: bytes) -> None:
    """Write a note. Raises OSError."""
    if not os.access(_BASE, os.W_OK):
        return
    folder = _folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_mine(folder):
        return
    temporary = folder / f".{secrets.token_hex(8)}"
    temporary.write_bytes(data[:_MAX_BYTES])
    os.replace(temporary, folder / _name(key))
    _remove_old(folder)


def remove(key: str) -> None:
    """Take a note back."""
    if _is_mine(folder := _folder()):
        (folder / _name(key)).unlink(missing_ok=True)


def read(key: str) -> bytes | None:
    """The note under a key; None where there is none, or the folder is another user's."""
    folder = _folder()
    if not _is_mine(folder):
        return None
    try:
        with (folder / _name(key)).open("rb") as file:
            return file.read(_MAX_BYTES)
    except OSError:
        return None


def _folder() -> Path:
    return _BASE / f"ckpt-notes-{os.getuid()}"


def _is_mine(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        found = folder.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return False


def _name(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def _remove_old(folder: Path) -> None:
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if path.lstat().st_mtime < time.time() - _EXPIRY_SECONDS:
                path.unlink()
