"""Where `ckpt-restore` writes: a temporary path, which gets the name of the destination at the end, or is removed.

If the command is killed, the destination stays as it was, and the temporary file or folder remains beside it, under a hidden
name. There is one exception: a folder is replaced by two renames. After a kill between them, the destination is missing, and
the old and the new folder are complete, both under hidden names.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt.storage.base.errors import CkptError
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.fd_io import describe_os_error
from ckpt.storage.base.store import TEMPORARY_SUFFIX
from ckpt.tools.common import require_parent_folder
from ckpt.tools.export_hf import require_replaceable

_SHARED_NAME_BYTES = 150
"""How much of the name of DEST is in that of its temporary file: file systems allow 255 bytes."""


def check_destination(dest: Path, format_name: str, overwrite: bool) -> None:
    """Raise CkptError if `dest` can't be written, or exists and must not be replaced.

    format_name: a format of `ckpt-restore`, which decides what may be replaced. overwrite: whether a file may be replaced.
    """
    if not dest.name:
        raise CkptError(f"{dest} can't be replaced, as it has no name here; name a file or a folder in it")
    require_parent_folder(dest)
    if not os.path.lexists(dest):
        return
    if not overwrite:
        raise CkptError(f"{dest} exists; name another file, or replace it with --overwrite")
    if format_name == "hf":
        require_replaceable(dest)
    elif format_name == "zarr":
        if not (dest.is_dir() and any((dest / marker).exists() for marker in ("zarr.json", ".zgroup", ".zarray"))):
            raise CkptError(f"{dest} exists and is not a zarr group, so it is not replaced; remove it, or name another")
    elif dest.is_dir():
        raise CkptError(f"{dest} is a folder, so it is not replaced by a file; name a file in it")


@contextmanager
def atomic_destination(dest: Path, format_name: str, overwrite: bool) -> Iterator[Path]:
    """A context with a temporary path in the folder of `dest`, which is renamed to it at the end, or removed after an error.

    The arguments are those of `check_destination`. Raises CkptError if `dest` can't be written.
    """
    begin = os.fsencode(dest.name)[:_SHARED_NAME_BYTES].decode(errors="ignore")
    temporary = dest.with_name(f".{begin}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    replaced = temporary.with_name(temporary.name + "-old")
    done = False
    try:
        yield temporary
        check_destination(dest, format_name, overwrite)  # another program may have created it meanwhile
        if dest.is_dir():  # a rename can't replace a folder that is not empty
            os.rename(dest, replaced)
        failpoint("restore.replace")
        os.rename(temporary, dest)
        done = True
        _fsync(dest.parent)
    except OSError as error:
        raise CkptError(f"{dest} could not be written: {describe_os_error(error)}") from error
    finally:
        _remove(temporary)
        if done:
            _remove(replaced)
        elif replaced.exists() and not dest.exists():  # the rename of the new one failed: put the old one back
            os.rename(replaced, dest)


def make_durable(path: Path) -> int:
    """Make a file, or all files of a folder, durable; return their bytes. Raises OSError."""
    nbytes = sum(map(make_durable, path.iterdir())) if path.is_dir() else path.stat().st_size
    _fsync(path)
    return nbytes


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for _ in range(100):  # after an interrupt, threads of zarr may still write into the folder
            shutil.rmtree(path, ignore_errors=True)
            if not path.exists():
                break
            time.sleep(0.02)
    else:
        with suppress(OSError):  # on a read-only file system this fails, too, and must not replace the error that led here
            path.unlink()
