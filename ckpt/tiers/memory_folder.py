"""The folder of this user in shared memory, and the environment variables with which `ckpt-run` names the memory of a job.

It is a module of its own because `ckpt-run` needs it at its start, and the rest of this package only once it copies steps.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ckpt.storage.base.errors import StoreError

MEMORY_VARIABLE = "CKPT_MEMORY"
"""The environment variable with the URL of the memory that `ckpt-run` keeps for the job. It outlives the ranks."""

PREVIOUS_MEMORY_VARIABLE = "CKPT_MEMORY_BEFORE"
"""The environment variable with the URLs, separated by spaces, of memory that earlier attempts used. It is only read."""

MEMORY_WAIT_VARIABLE = "CKPT_MEMORY_WAIT"
"""The environment variable "SECONDS URL": how long to wait if the hosts of this memory, which may have the newest steps, do not
answer."""


def own_memory_folder(base: Path = Path("/dev/shm")) -> Path:
    """Return a folder in shared memory that belongs to this user alone, and create it if it does not exist.

    Raises StoreError if it is not a folder of this user, or can't be created.
    """
    folder = base / f"ckpt-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise StoreError(
            f'Tier("memory"): {folder} cannot be used: {error.strerror}; mount a tmpfs on {base}, set {MEMORY_VARIABLE} to '
            "a folder that is in memory, or leave the tier out"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise StoreError(
            f'Tier("memory"): {folder} is not a folder of this user; remove it, or set {MEMORY_VARIABLE} to a folder of yours'
        )
    return folder
