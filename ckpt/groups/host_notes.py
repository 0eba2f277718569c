"""Small notes from one process to others of the same user on this host, in shared memory.

A note contains the reason why a rank failed. It must arrive even if the store does not answer, through which ranks exchange
everything else. Each note is a file `/dev/shm/ckpt-notes-<uid>/<hash of the key>`. Without shared memory there are no notes.
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
"""Older notes are deleted; no rank waits this long."""


def write(key: str, data: bytes) -> None:
    """Write a note, cut to 64 KiB; raise OSError if that fails."""
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
    """Delete the note under a key."""
    if _is_mine(folder := _folder()):
        (folder / _name(key)).unlink(missing_ok=True)


def read(key: str) -> bytes | None:
    """Return the note under a key; None if there is none, or the folder belongs to another user."""
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
