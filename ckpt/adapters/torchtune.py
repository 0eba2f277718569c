"""Checkpointers for the recipes of torchtune that save to and resume from a ckpt repository.

In the configuration of a recipe:

    checkpointer:
      _component_: ckpt.adapters.torchtune.FullModelHFCheckpointer
    resume_from_checkpoint: True
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtune import training

from ckpt.adapters.torchtune_folder import DEFAULT_NAME, continues_from_recipe_state
from ckpt.adapters.torchtune_run import RecipeRun, Settings
from ckpt.groups import as_group
from ckpt.repository.repository import DIRECTORY_VARIABLE, REPOSITORY_FOLDER, Url, resolve_url
from ckpt.storage.base.errors import InvalidArgument
from ckpt.training.save_interval import Every

__all__ = ["FullModelHFCheckpointer", "FullModelMetaCheckpointer", "FullModelTorchTuneCheckpointer"]


class _RepositoryCheckpointer:
    """The part that is the same for all formats of the model files. A class of torchtune follows in the order of bases."""

    def __init__(
        self, *args: Any, output_dir: str, ckpt: Url | None = None, every: Every = "auto", keep: int | None = 3,
        should_load_recipe_state: bool = False, resume_from_checkpoint: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        url = resolve_url(ckpt or os.environ.get(DIRECTORY_VARIABLE) or Path(output_dir) / REPOSITORY_FOLDER)
        recipe = _calling_recipe()
        resumes = should_load_recipe_state or resume_from_checkpoint or getattr(recipe, "_resume_from_checkpoint", False)
        self._recipe_run: RecipeRun | None = None
        if recipe is not None:
            state_file = Path(output_dir) / (options.get("recipe_checkpoint") or DEFAULT_NAME)
            continues_torchtune = resumes and continues_from_recipe_state(as_group(), url, state_file)
            if not continues_torchtune:
                _begin_as_new(recipe)
            self._recipe_run = RecipeRun(recipe, Settings(url, every, keep, resumes and not continues_torchtune))
            resumes = continues_torchtune
        options |= {"output_dir": output_dir, "should_load_recipe_state": resumes}
        super().__init__(*args, **options)

    def save_checkpoint(
        self, state_dict: dict[str, Any], epoch: int, intermediate_checkpoint: bool = False, **options: Any
    ) -> None:
        """Write the files of the model after the last epoch; the state of earlier epochs is in the repository."""
        if self._recipe_run is None:
            raise InvalidArgument(
                f"{type(self).__name__} saves for a recipe that makes it in load_checkpoint or setup, and has train and "
                "save_checkpoint: use torchtune's own checkpointer elsewhere"
            )
        save: Callable[..., object] = super().save_checkpoint  # type: ignore[misc]  # the class of torchtune has it
        save(state_dict, epoch=epoch, intermediate_checkpoint=False, **options)


class FullModelHFCheckpointer(_RepositoryCheckpointer, training.FullModelHFCheckpointer):  # type: ignore[misc]
    """torchtune's FullModelHFCheckpointer, with the state of the training in a ckpt repository.

        checkpointer:
          _component_: ckpt.adapters.torchtune.FullModelHFCheckpointer

    ckpt: the URL of the repository. The default is CKPT_DIR, or else the folder `ckpt` in `output_dir`.
    every: as for `ckpt.Checkpointer`: how often to save, in optimizer steps, or "auto". The end of an epoch is saved, too.
    keep: how many of the newest steps to keep; null keeps all.

    All other options are those of torchtune, with the same meaning. The files of the model are read from `checkpoint_dir`, and
    written after the last epoch, as torchtune does. With `resume_from_checkpoint: True`, a recipe continues from the newest
    complete step, also in the middle of an epoch. If there is no step yet, it continues from what torchtune has saved in
    `output_dir`, or else begins as with False.

    A step has the trained parameters, buffers, optimizer, schedule, random generators of each rank, and the position in the
    data. Frozen parameters, such as the base model of LoRA, are those of `checkpoint_dir`. Nothing is pickled.

    Raises:
        InvalidArgument: The recipe has another structure than the fine-tuning recipes of torchtune, such as that of PPO. Or
            rank 0 continues from what torchtune has saved, and the host of another rank lacks that file.
        LeafMismatch: At a load, if the batch size, the accumulation of gradients, the number of ranks or the data differ.
    """


class FullModelMetaCheckpointer(_RepositoryCheckpointer, training.FullModelMetaCheckpointer):  # type: ignore[misc]
    """torchtune's FullModelMetaCheckpointer with a ckpt repository; see FullModelHFCheckpointer."""


class FullModelTorchTuneCheckpointer(_RepositoryCheckpointer, training.FullModelTorchTuneCheckpointer):  # type: ignore[misc]
    """torchtune's FullModelTorchTuneCheckpointer with a ckpt repository; see FullModelHFCheckpointer."""


def _calling_recipe() -> Any:
    """Return the recipe that makes a checkpointer, because torchtune does not pass it; None if there is none."""
    frame = sys._getframe(2)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if all(callable(getattr(caller, name, None)) for name in ("setup", "train")) and hasattr(caller, "epochs_run"):
            return caller
        frame = frame.f_back  # type: ignore[assignment]  # the outermost frame has no f_back
    return None


def _begin_as_new(recipe: Any) -> None:
    """Let a recipe set up its parts from the model files alone: what a step has is loaded into them afterwards."""
    for part in (recipe, getattr(recipe, "_checkpoint_client", None)):
        if part is not None:
            part._resume_from_checkpoint = False
