"""The memory tier of a run: a folder in the memory of each host that outlives the ranks, their agent too, and not the run."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from ckpt.storage.base.errors import CkptError, StoreError
from ckpt.tiers import manager, tier_spec

BROUGHT_TEXT = "was brought"
"""In what is said of a step that was only in memory."""


def memory_folder(run_folder: Path, host: str = "") -> Path | None:
    """Where it is: the same whenever ckpt-run works in this folder, for this one of several hosts; None without shared memory,
    or where another is named. Made by who first writes there, so that nothing is left of a run that keeps no steps in it."""
    if os.environ.get(tier_spec.MEMORY_VARIABLE):
        return None
    try:
        name = hashlib.sha256(os.fsencode(run_folder.resolve()) + (f"\0{host}" if host else "").encode()).hexdigest()[:16]
        return tier_spec.own_memory_folder() / f"run-{name}"
    except (StoreError, OSError):
        return None


def used_bytes(folder: Path) -> int:
    """Of the memory of this host, by all that is in the folder: also what is kept for its pages alone."""
    used = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # it is deleted, or renamed, just now
                used += os.lstat(os.path.join(where, name)).st_blocks * 512
    return used


def drain_folder(folder: Path) -> str:
    """At the end of a run: copy what is newest to where it belongs, and give the memory free. In words what was done."""
    done, said = drain_urls([str(folder)])
    if done:
        shutil.rmtree(folder, ignore_errors=True)
    return said


def drain_urls(urls: Sequence[str]) -> tuple[bool, str]:
    """Copy what is newest in memories, the newest of them first, to where it belongs. Whether they are needed no more, and in
    words what was done."""
    try:
        said = manager.drain(*urls)
    except CkptError as error:
        said = f"{urls[0]} {manager.NOT_DRAINED}: {error}"
    if manager.NOT_DRAINED in said:
        return False, f"{said}; the memory is kept: start ckpt-run again, or copy it with ckpt-restore"
    return True, said
