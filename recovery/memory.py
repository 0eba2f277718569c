"""The memory tier of a run on one host: a folder in shared memory that outlives the ranks, their agent too, and not the run."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from ckpt import tier, tiers
from ckpt.storage.errors import CkptError, StoreError

_FAILED = "could not be drained"


def folder_of(run_folder: Path) -> Path | None:
    """Where it is: the same whenever ckpt-run works in this folder; None without shared memory, or where another is named."""
    if os.environ.get(tier.VARIABLE):
        return None
    try:
        name = hashlib.sha256(os.fsencode(run_folder.resolve())).hexdigest()[:16]
        folder = tier.own_memory() / f"run-{name}"
        folder.mkdir(mode=0o700, exist_ok=True)
    except (StoreError, OSError):
        return None
    return folder


def bring_home(folder: Path) -> str:
    """At the end of a run: copy what is newest to where it belongs, and give the memory free. In words what was done."""
    try:
        said = tiers.drain(str(folder))
    except CkptError as error:
        said = f"{folder} {_FAILED}: {error}"
    if _FAILED in said:
        return f"{said}; the memory is kept: start ckpt-run again, or copy it with ckpt-restore"
    shutil.rmtree(folder, ignore_errors=True)
    return said
