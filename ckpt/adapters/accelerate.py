"""`accelerator.save_state` and `accelerator.load_state` of accelerate, with a ckpt repository in place of folders.

Usage:

    from ckpt.adapters.accelerate import attach
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    attach(accelerator, "/data/run")
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from typing import Any

from ckpt.adapters.accelerate_hooks import HOOK_FILES, call_save_hooks, called_load_hooks
from ckpt.adapters.accelerate_state import PreparedObjects
from ckpt.api import load_step
from ckpt.checkpointer import Checkpointer
from ckpt.groups import as_group
from ckpt.loading.rank_agreement import LoadRequest, broadcast_from_rank_0, is_true_on_rank_0
from ckpt.repository.repository import Url
from ckpt.repository.retention import Keep
from ckpt.saving.handle import SaveHandle
from ckpt.state.leaves.base import Bytes
from ckpt.state.name_patterns import children
from ckpt.storage.base.errors import InvalidArgument, first_line
from ckpt.support.path_kinds import is_folder
from ckpt.tiers.tier_spec import Tier

log = logging.getLogger("ckpt")

_TRAILING_NUMBER = re.compile(r"(\d+)/*$")
_RANDOM_STATES = re.compile(r"random_states_\d+\.pkl")
"""A file that accelerate writes for each rank."""


def attach(
    accelerator: Any, url: Url | None = None, *, keep: int | Keep | None = None, tiers: Sequence[Tier] = (), **options: Any
) -> AttachedAccelerator:
    """Let `save_state` and `load_state` of an Accelerator use the repository at `url`, and return the object that does it.

        attach(accelerator, "/data/run", keep=3)

    accelerator: an Accelerator. Its `prepare` may be called before or after this.
    url, keep, tiers, options: as for `ckpt.Checkpointer`. Without `keep`, the `total_limit` of a ProjectConfiguration applies.

    `save_state("step_100")` saves step 100: the number at the end of the name is the number of the step. Without a number, each
    save has the next number. A save runs in the background; `save_state` returns its handle. `load_state()` loads the newest
    complete step, and `load_state("step_100")` that step. A folder that accelerate has saved is loaded by accelerate.

    A step has the models, optimizers, schedulers and data loaders that `prepare` was given, the scaler, the random generators
    of each rank, and the objects of `register_for_checkpointing`. After a load in the middle of an epoch, call
    `accelerator.skip_first_batches(loader, count)` as with accelerate. The epoch then continues with the order and the random
    numbers of the one that was saved.

    Hooks of `register_save_state_pre_hook` and `register_load_state_pre_hook` get a temporary folder, whose files are stored in
    the step. A model that a load hook removes from its list keeps what the hook has loaded.

    Raises:
        InvalidArgument: The Accelerator uses Megatron-LM, XLA or FSDP1; a Trainer of transformers trains with it, which does
            not call its `save_state`; at a save or load, it has a DeepSpeed engine that `ckpt.adapters.deepspeed` refuses, or
            a save hook has changed the weights in its list.
        CkptError: As for `ckpt.Checkpointer`.
    """
    return AttachedAccelerator(accelerator, url, keep=keep, tiers=tiers, **options)


class AttachedAccelerator:
    """The saves and loads of an Accelerator; `attach` makes it."""

    def __init__(self, accelerator: Any, url: Url | None, *, keep: int | Keep | None, **options: Any) -> None:
        self._accelerator = accelerator
        self._prepared = PreparedObjects(accelerator)
        if keep is None:
            keep = accelerator.project_configuration.total_limit
        self._saver = Checkpointer(url, every=None, keep=keep, **options)
        self._group = as_group(options.get("group", "auto"))
        # Of rank 0 alone: a rank that looks later may find the folder of the first save, which the other ranks have begun.
        self._next_step = int(broadcast_from_rank_0(self._group, self._first_number))
        self._load_state, self._end_training = accelerator.load_state, accelerator.end_training
        accelerator.save_state, accelerator.load_state = self.save_state, self.load_state
        accelerator.end_training = self.end_training

    def _first_number(self) -> str:
        return str(max(self._saver.repository.step_numbers(), default=-1) + 1)

    # --- what the Accelerator calls ----------------------------------------------------------------------------

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> SaveHandle:
        """Save a step in the background, and return its handle."""
        accelerator = self._accelerator
        step = _step_of_name(output_dir)
        if step is None:
            step = self._next_step
        if not accelerator.sync_gradients:
            log.warning(
                "step %d is saved between two updates of the optimizer, without the gradients of its batches: call save_state "
                "where accelerator.sync_gradients is True",
                step,
            )
        self._next_step = step + 1  # whatever follows: the other ranks count a save that fails on this rank
        try:
            try:
                files = call_save_hooks(accelerator, _folder_name(output_dir, step))
                state = {**self._prepared.entries(), **files}
            except BaseException as error:  # otherwise the other ranks would wait for this one
                self._saver._skip_step(step, f"{type(error).__name__}: {first_line(error)}")
                raise
            return self._saver.save(step, state)
        finally:
            accelerator.project_configuration.iteration += 1

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> int | None:
        """Load a step into the objects of the Accelerator, and return its number; None if there is none.

        A folder that accelerate has saved is loaded by accelerate, and has no number.

        Raises:
            InvalidArgument: There is no such folder, and the name does not end with the number of a step.
        """
        step = None if input_dir is None else _step_of_name(input_dir)
        if input_dir is not None and self._is_loaded_by_accelerate(input_dir, step):
            self._load_state(input_dir, *args, **kwargs)
            return None
        if input_dir is not None and step is None:
            raise InvalidArgument(
                f"load_state({input_dir!r}): there is no such folder, and the name does not end with a step number; "
                "give a folder or such a name"
            )
        if self._accelerator._load_model_state_pre_hook:
            return self._load_with_hooks(input_dir, step)
        return self._load_step(step)

    def _is_loaded_by_accelerate(self, name: str, step: int | None) -> bool:
        """Return whether a folder is one that accelerate has saved, as rank 0 sees it: another host may lack the folder."""
        return is_true_on_rank_0(self._group, lambda: _is_folder_of_accelerate(name) or (step is None and is_folder(name)))

    def _load_step(self, step: int | None) -> int | None:
        state, start = self._saver.restore(self._prepared.entries(), step=step)
        if start == 0:
            return None
        self._next_step = start
        self._prepared.continue_from(state)
        return start - 1

    def _load_with_hooks(self, input_dir: str | None, step: int | None) -> int | None:
        """Call the load hooks of the Accelerator, and then load a step, as accelerate does it."""
        _, start = self._saver.restore({"accelerator": None}, step=step)
        if start == 0:
            return None
        repository, number = self._saver.repository, start - 1
        files: dict[str, dict[str, Bytes | None]] = {}
        if HOOK_FILES in dict(children(repository[number].tree(), "")):  # a save hook was registered
            files = load_step(repository, number, LoadRequest({HOOK_FILES: None}, group=as_group()))[HOOK_FILES]
        with called_load_hooks(self._accelerator, _folder_name(input_dir, number), files):
            return self._load_step(number)

    def end_training(self) -> None:
        """Wait for the saves, then end the training as accelerate does."""
        self.close()
        self._end_training()

    def close(self) -> None:
        """Wait for the running saves, and release the repository; the Accelerator can't save any more."""
        self._saver.close()


def _folder_name(name: str | os.PathLike[str] | None, step: int) -> str:
    """Return the name of the folder that hooks get."""
    last = "" if name is None else os.path.basename(os.path.normpath(name))
    return f"checkpoint_{step}" if last in ("", ".", "..") else last


def _is_folder_of_accelerate(name: str | os.PathLike[str]) -> bool:
    """Return whether accelerate itself has saved a folder. A script may make one of the same name for other files."""
    return is_folder(name) and any(_RANDOM_STATES.fullmatch(entry) for entry in os.listdir(name))


def _step_of_name(name: str | os.PathLike[str] | None) -> int | None:
    found = None if name is None else _TRAILING_NUMBER.search(os.fspath(name))
    return None if found is None else int(found[1])
