"""The folder of the memory tier on this host: its path, its size, and its drain at the end of a run.

The folder outlives the ranks and the agent, but not the run.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ckpt.storage.base.errors import CkptError, StoreError, is_transient
from ckpt.tiers.drain_report import DrainReport
from ckpt.tiers.memory_folder import MEMORY_VARIABLE, own_memory_folder

log = logging.getLogger("ckpt.run")


def memory_folder(run_folder: Path, host: str = "") -> Path | None:
    """Return the memory folder of a run; None without shared memory, or if the environment names another memory.

    It is the same for each `ckpt-run` with this run folder and host. The first writer creates it, so a run without steps in
    memory leaves nothing.

    Where shared memory exists but cannot be used, the result is None, with a warning that says why.

    run_folder: the folder of the run.
    host: the name of this host in a run of several hosts.

    Raises:
        StoreError: The process lacks memory or descriptors for a moment. Without the folder, a run would not see the newest
            steps in it.
    """
    if os.environ.get(MEMORY_VARIABLE):
        return None
    try:
        name = hashlib.sha256(os.fsencode(run_folder.resolve()) + (f"\0{host}" if host else "").encode()).hexdigest()[:16]
        return own_memory_folder() / f"run-{name}"
    except (StoreError, OSError) as error:
        if is_transient(error):
            raise StoreError(f"the memory of this host can't be used now: {error}; start ckpt-run again") from error
        if not isinstance(error.__cause__, FileNotFoundError):  # else this system has no shared memory
            log.warning("ckpt-run keeps no steps in the memory of this host: %s", error)
        return None


def used_bytes(folder: Path) -> int:
    """Return the bytes of memory that all files in the folder take, also files that are kept only to reuse their pages."""
    used = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # the file was deleted or renamed in between
                used += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return used


def drain_folder(folder: Path) -> DrainReport:
    """Copy the newest step to the repository at the end of a run, free the memory unless that failed, and return the result."""
    try:
        os.lstat(folder)
    except FileNotFoundError:  # no rank has saved to memory
        return DrainReport()
    report = drain_urls([str(folder)])
    if not report.has_failed:
        shutil.rmtree(folder, ignore_errors=True)
    return report


def drain_urls(urls: Sequence[str], rolled_back: bool = False) -> DrainReport:
    """Copy the newest step in these memories to the repository, and return the result.

    urls: the memories, the newest first.
    rolled_back: whether `ckpt-run` has made the job restore an older step than the newest.
    """
    from ckpt.tiers import memory_drain  # with numpy, which an agent that copies no step does not need

    try:
        report = memory_drain.drain_memories(*urls, rolled_back=rolled_back)
    except CkptError as error:
        report = DrainReport(f"{urls[0]} {memory_drain.NOT_DRAINED}: {error}", has_failed=True)
    if report.has_failed:
        kept = f"{report.text}; the memory is kept: start ckpt-run again, or copy it with ckpt-restore"
        return replace(report, text=kept)
    return report
