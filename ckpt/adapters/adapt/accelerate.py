"""`save_state` and `load_state` of accelerate under `ckpt-run --adapt`: the folders that a script names hold ckpt repositories.

Only the script knows which folder belongs to which position of its loop, and deletes old ones. So each folder has a repository
of its own, with one step. A new folder gets its name once the step is complete: a script that looks for the newest folder
after a kill finds none that is incomplete. Before that it is `.NAME.TOKEN.ckpt-incomplete`. The token is new for each save, so
that a process which gives up and deletes its folder, even late, does not delete the one that its successor is filling.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.utils import broadcast_object_list

from ckpt import api
from ckpt.adapters.accelerate_state import PreparedObjects, require_no_hooks
from ckpt.adapters.adapt.startup import hooks
from ckpt.checkpointer import Checkpointer
from ckpt.errors import UnsupportedLeaf
from ckpt.groups.process_identity import is_dead, this_process
from ckpt.repository.lease_records import lease_holder, newest_generation
from ckpt.repository.repository import REPOSITORY_FOLDER, open_repository
from ckpt.storage.base.errors import CkptError, InvalidArgument
from ckpt.storage.base.fsync import sync_folder
from ckpt.support.path_kinds import is_folder

_NAME = "accelerate.Accelerator"

_INCOMPLETE = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.ckpt-incomplete", re.DOTALL)

_LONG_WAIT_SECONDS = 30

_TRAINERS = ("transformers.", "trl.")
"""Packages whose trainers have an Accelerator, and save without its save_state."""


def prepare(original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `original`, the method `Accelerator.prepare`, after `save_state` and `load_state` are replaced."""
    if not hasattr(accelerator, "_ckpt_folders") and not _is_called_by_a_trainer():
        try:
            accelerator._ckpt_folders = SavedFolders(accelerator)
            hooks.print_once(
                f"{_NAME}: save_state and load_state use ckpt. A loop that does not call them saves nothing: only the script "
                f"knows its position (--adapt; {hooks.SWITCH}=off turns it off)"
            )
        except InvalidArgument as error:
            accelerator._ckpt_folders = None
            hooks.print_refused(_NAME, error)
    return original(accelerator, *args, **kwargs)


def _is_called_by_a_trainer() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_TRAINERS):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class SavedFolders:
    """Saves the state of an Accelerator into the folders that the script gives to `save_state`."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._prepared = PreparedObjects(accelerator)
        self._save_state, self._load_state = accelerator.save_state, accelerator.load_state
        accelerator.save_state, accelerator.load_state = self.save_state, self.load_state

    def save_state(self, output_dir: str | os.PathLike[str] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Save into a folder and return it when the step is complete, as accelerate does."""
        accelerator = self._accelerator
        try:
            require_no_hooks(accelerator._save_model_state_pre_hook, "register_save_state_pre_hook")
            folder = self._folder_to_save(output_dir)
            if folder is not None:
                self._save(folder)
                self._delete_old_folders(folder)
                accelerator.project_configuration.iteration += 1
                return folder
        except (InvalidArgument, UnsupportedLeaf) as error:
            hooks.print_refused(_NAME, error)
        return self._save_state(output_dir, *args, **kwargs)

    def load_state(self, input_dir: str | os.PathLike[str] | None = None, *args: Any, **kwargs: Any) -> None:
        """Load a folder; one that accelerate itself has saved is loaded by accelerate."""
        folder = os.path.expanduser(input_dir) if input_dir is not None else _newest(self._automatic_folders())
        if folder is None or not is_folder(os.path.join(folder, REPOSITORY_FOLDER)):
            # Of automatic names, accelerate would also consider incomplete folders.
            self._load_state(input_dir if folder is None else folder, *args, **kwargs)
            return
        require_no_hooks(self._accelerator._load_model_state_pre_hook, "register_load_state_pre_hook")
        self._prepared.continue_from(api.load(os.path.join(folder, REPOSITORY_FOLDER), self._prepared.entries()))
        hooks.print_once(f"{_NAME} continues from {folder}")

    def _save(self, folder: str) -> None:
        accelerator = self._accelerator
        parent, name = os.path.split(os.path.abspath(folder))
        with _long_wait_explained():
            accelerator.wait_for_everyone()
        # Rank 0 decides for all ranks: the script may make the folder itself while other ranks are here already.
        is_new, token = broadcast_object_list([not is_folder(folder), secrets.token_hex(8)])
        incomplete = os.path.join(parent, f".{name}.{token}.ckpt-incomplete")
        if accelerator.is_main_process:
            _delete_abandoned(parent, name)
        url = os.path.join(incomplete if is_new else folder, REPOSITORY_FOLDER)
        try:
            with Checkpointer(url, every=None, keep=1, scrub=None) as saver:
                newest = saver.repository.latest()
                saver.save(0 if newest is None else newest.step + 1, self._prepared.entries()).result()
        except BaseException:
            if accelerator.is_main_process:
                shutil.rmtree(incomplete, ignore_errors=True)
            raise
        accelerator.wait_for_everyone()
        if is_new and accelerator.is_main_process:
            os.rename(incomplete, folder)
            sync_folder(parent)
        accelerator.wait_for_everyone()

    # --- the names of folders ----------------------------------------------------------------------------------

    def _folder_to_save(self, output_dir: str | os.PathLike[str] | None) -> str | None:
        """Return the folder; None where accelerate has no name."""
        accelerator = self._accelerator
        config = accelerator.project_configuration
        if not config.automatic_checkpoint_naming:
            return None if output_dir is None else os.path.expanduser(output_dir)
        folder = os.path.join(accelerator.project_dir, "checkpoints", f"checkpoint_{accelerator.save_iteration}")
        if folder in self._automatic_folders():
            raise InvalidArgument(f"{folder} exists: set the iteration of ProjectConfiguration, or call load_state first")
        return folder

    def _delete_old_folders(self, saved: str) -> None:
        """Delete the oldest folders above `total_limit`. Unlike accelerate, do so after the new one is complete."""
        accelerator = self._accelerator
        limit = accelerator.project_configuration.total_limit
        if limit is not None and accelerator.is_main_process:
            others = [folder for folder in self._automatic_folders() if folder != saved]
            for old in others[: max(0, len(others) + 1 - limit)]:
                shutil.rmtree(old)

    def _automatic_folders(self) -> list[str]:
        """Return the folders of automatic names, the oldest first."""
        config = self._accelerator.project_configuration
        if not config.automatic_checkpoint_naming:
            return []
        folder = os.path.join(self._accelerator.project_dir, "checkpoints")
        names = os.listdir(folder) if is_folder(folder) else []
        numbered = [(int(found[1]), name) for name in names if (found := re.fullmatch(r"checkpoint_(\d+)", name))]
        return [os.path.join(folder, name) for _, name in sorted(numbered)]


def _newest(folders: list[str]) -> str | None:
    return folders[-1] if folders else None


def _delete_abandoned(parent: str, name: str) -> None:
    """Delete the incomplete folders of the folder `name`, and those of other names whose process is known to be dead.

    The lease in a folder identifies the process that would have given it its name. Whether a process on another host is dead
    can't be determined.
    """
    found = os.listdir(parent) if is_folder(parent) else []
    for folder, match in ((os.path.join(parent, each), _INCOMPLETE.fullmatch(each)) for each in found):
        if match is not None and (match["name"] == name or _is_holder_dead(folder)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_holder_dead(folder: str) -> bool:
    """Return whether the process that saves into an incomplete folder is known to be dead."""
    repository = open_repository(os.path.join(folder, REPOSITORY_FOLDER))
    try:
        holder = lease_holder(repository, newest_generation(repository))
    except CkptError:
        return False
    return holder is not None and is_dead(holder, this_process())


@contextmanager
def _long_wait_explained() -> Iterator[None]:
    """Print why rank 0 may be waiting for the others: it never ends if the script calls `save_state` in it alone."""
    message = (
        "save_state waits for the other ranks, since all ranks save together. If only the main process of the script calls it, "
        f"use --adapt=off or {hooks.SWITCH}=off"
    )
    timer = threading.Timer(_LONG_WAIT_SECONDS, hooks.print_once, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
