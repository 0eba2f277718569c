"""The two tracker files of Megatron-Bridge: the number of the newest checkpoint, written once it is complete.

The Bridge writes them in place, before the configuration of the checkpoint. A process killed in between could not resume.
"""

from __future__ import annotations

import builtins
import logging
import os
import re
import shutil
from collections.abc import Callable
from typing import IO, Any

import torch

from ckpt.storage.base.errors import is_transient
from ckpt.storage.base.fsync import sync_folder
from ckpt.support.path_kinds import is_file

log = logging.getLogger("ckpt")

TRACKERS = ("latest_train_state.pt", "latest_checkpointed_iteration.txt")
_TRAIN_STATE, _CONFIGURATION = "train_state.pt", "run_config.yaml"
_FOLDER = re.compile(r"iter_(\d+)")


class DelayedTrackers:
    """Delays what the Bridge does to its trackers and old checkpoints until `finish`.

    The Bridge calls it instead of the module `shutil`, the function `open`, and its function that deletes old checkpoints.
    """

    def __init__(self) -> None:
        self._written: dict[str, str] = {}
        """By the name of a tracker: the temporary file with its new content."""
        self._cleanups: list[Callable[[int], object]] = []
        """Each deletes old checkpoints, and takes the number of saves that still run."""

    def __getattr__(self, name: str) -> Any:
        return getattr(shutil, name)  # the Bridge uses this object as the module shutil

    def copy(self, source: str, target: str) -> str:
        """Copy a file, as shutil does."""
        if os.path.basename(target) not in TRACKERS:
            return shutil.copy(source, target)
        self._written[target] = str(shutil.copy(source, f"{target}.tmp"))
        return target

    def open(self, name: str | os.PathLike[str], mode: str = "r", *args: Any, **options: Any) -> IO[Any]:
        """Open a file, as the built-in function does."""
        if mode == "w" and os.path.basename(os.fspath(name)) in TRACKERS:
            self._written[os.fspath(name)] = name = f"{os.fspath(name)}.tmp"
        return builtins.open(name, mode, *args, **options)

    def cleanup(self, original: Callable[..., object]) -> Callable[..., None]:
        """Return a function that calls `original`, which keeps some of the newest checkpoints, at `finish`."""

        def delayed(folder: str, leave_ckpt_num: int = 1, **options: Any) -> None:
            self._cleanups.append(lambda unfinished: original(folder, leave_ckpt_num=leave_ckpt_num + unfinished, **options))

        return delayed

    def discard(self) -> None:
        """Drop the delayed calls after a failed save."""
        self._written, self._cleanups = {}, []

    def finish(self, unfinished: int) -> None:
        """Give the trackers their names, and then delete old checkpoints. unfinished: the number of saves that still run."""
        written, self._written = self._written, {}
        for name, temporary in written.items():
            _replace(temporary, name)
        cleanups, self._cleanups = self._cleanups, []
        for cleanup in cleanups:  # the folders of unfinished saves count as the newest checkpoints
            cleanup(unfinished)


def repair_tracker(folder: str, is_saved: Callable[[str], bool]) -> None:
    """Make the tracker name the newest complete checkpoint if it is torn, or names one whose files are incomplete.

    The Bridge resumes from the first tracker if that exists. The second one is the tracker of Megatron-LM, and stays as it is.

    is_saved: whether the tensors of the checkpoint in a folder exist.
    """
    tracker = os.path.join(folder, TRACKERS[0])
    if not is_file(tracker):
        return
    folders = {int(found[1]): os.path.join(folder, name) for name in os.listdir(folder) if (found := _FOLDER.fullmatch(name))}
    named = _step_of(tracker)
    if named is not None and _is_complete(folders.get(named), named):
        return
    for step in sorted(folders, reverse=True):
        if _is_complete(folders[step], step) and is_saved(folders[step]):
            log.warning("%s is torn or names an incomplete checkpoint: training continues from iteration %d", tracker, step)
            temporary = shutil.copy(os.path.join(folders[step], _TRAIN_STATE), f"{tracker}.tmp")
            _replace(temporary, tracker)
            return
    log.warning(
        "%s is torn or names an incomplete checkpoint, and no checkpoint of %s is complete; restore one from a copy, or start "
        "a new run", tracker, folder,
    )  # fmt: skip


def _is_complete(folder: str | None, step: int) -> bool:
    """Return whether a folder has the small files of a checkpoint of the Bridge."""
    if folder is None or _step_of(os.path.join(folder, _TRAIN_STATE)) != step:
        return False
    try:
        return os.path.getsize(os.path.join(folder, _CONFIGURATION)) > 0
    except (FileNotFoundError, NotADirectoryError):
        return False


def _step_of(train_state: str) -> int | None:
    """Return the iteration in a train_state file; None if it is missing or torn.

    Raises OSError if it can't be read now: the newest checkpoint must not count as incomplete for that.
    """
    try:
        return int(torch.load(train_state, map_location="cpu", weights_only=True)["step"])
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except Exception as error:  # torch.load raises errors of many kinds for a torn file
        if isinstance(error, OSError) or is_transient(error):
            raise
        return None


def _replace(temporary: str, name: str) -> None:
    """Give a temporary file its name, durably: the checkpoint that the earlier file names may be deleted next."""
    with builtins.open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, name)
    sync_folder(os.path.dirname(os.path.abspath(name)))
