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

from ckpt.adapters.accelerate_data import LoaderPosition
from ckpt.adapters.epoch_random import RandomSnapshot
from ckpt.adapters.torch import ModelState
from ckpt.checkpointer import Checkpointer
from ckpt.repository.repository import Url
from ckpt.repository.retention import Keep
from ckpt.saving.handle import SaveHandle
from ckpt.storage.base.errors import InvalidArgument
from ckpt.tiers.tier_spec import Tier

log = logging.getLogger("ckpt")

_TRAILING_NUMBER = re.compile(r"(\d+)/*$")


def attach(
    accelerator: Any, url: Url | None = None, *, keep: int | Keep | None = None, tiers: Sequence[Tier] = (), **options: Any
) -> AttachedAccelerator:
    """Let `save_state` and `load_state` of an Accelerator use the repository at `url`, and return the object that does it.

        attach(accelerator, "/data/run", keep=3)

    accelerator: an Accelerator. Its `prepare` may be called before or after this.
    url, keep, tiers, options: as for `ckpt.Checkpointer`. Without `keep`, the `total_limit` of a ProjectConfiguration holds.

    `save_state("step_100")` saves step 100: the number at the end of the name is the number of the step. Without a number, each
    save has the next number. A save runs in the background; `save_state` returns its handle. `load_state()` loads the newest
    complete step, and `load_state("step_100")` that step. A folder that accelerate has saved is loaded by accelerate.

    A step has the models, optimizers, schedulers and data loaders that `prepare` was given, the scaler, the random generators
    of each rank, and the objects of `register_for_checkpointing`. After a load in the middle of an epoch, call
    `accelerator.skip_first_batches(loader, count)` as with accelerate. The epoch then continues with the order and the random
    numbers of the one that was saved.

    Raises:
        InvalidArgument: The Accelerator uses DeepSpeed, Megatron-LM or FSDP1; at a save or load, it has hooks of
            `register_save_state_pre_hook` or `register_load_state_pre_hook`, which expect a folder.
        CkptError: As for `ckpt.Checkpointer`.
    """
    return AttachedAccelerator(accelerator, url, keep=keep, tiers=tiers, **options)


class AttachedAccelerator:
    """The saves and loads of an Accelerator; `attach` makes it."""

    def __init__(self, accelerator: Any, url: Url | None, *, keep: int | Keep | None, **options: Any) -> None:
        _require_supported(accelerator)
        self._accelerator = accelerator
        if keep is None:
            keep = accelerator.project_configuration.total_limit
        self._saver = Checkpointer(url, every=None, keep=keep, **options)
        self._positions: dict[int, LoaderPosition] = {}
        self._random = RandomSnapshot()
        self._next_step = max(self._saver.repository.step_numbers(), default=-1) + 1
        self._load_state, self._prepare_data_loader = accelerator.load_state, accelerator.prepare_data_loader
        self._skip_first_batches, self._end_training = accelerator.skip_first_batches, accelerator.end_training
        accelerator.save_state, accelerator.load_state = self.save_state, self.load_state
        accelerator.skip_first_batches, accelerator.end_training = self.skip_first_batches, self.end_training
        accelerator.prepare_data_loader = self.prepare_data_loader
        self._watch_loaders()

    # --- what the Accelerator calls ----------------------------------------------------------------------------

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> SaveHandle:
        """Save a step in the background, and return its handle."""
        accelerator = self._accelerator
        _require_no_hooks(accelerator._save_model_state_pre_hook, "register_save_state_pre_hook")
        step = _step_of_name(output_dir)
        if step is None:
            step = self._next_step
        if not accelerator.sync_gradients:
            log.warning(
                "step %d is saved between two updates of the optimizer, and the gradients of its batches are not: call "
                "save_state where accelerator.sync_gradients is True",
                step,
            )
        handle = self._saver.save(step, self._state())
        self._next_step = step + 1
        accelerator.project_configuration.iteration += 1
        return handle

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> int | None:
        """Load a step into the objects of the Accelerator, and return its number; None where nothing is saved."""
        _require_no_hooks(self._accelerator._load_model_state_pre_hook, "register_load_state_pre_hook")
        if input_dir is not None and os.path.isdir(input_dir):
            self._load_state(input_dir, *args, **kwargs)
            return None
        step = None if input_dir is None else _step_of_name(input_dir)
        if input_dir is not None and step is None:
            raise InvalidArgument(f"load_state({input_dir!r}): there is no such folder, and the name ends with no step number")
        state, start = self._saver.restore(self._state(), step=step)
        if start == 0:
            return None
        self._next_step = start
        self._accelerator.step = state["accelerator"]["step"]
        self._accelerator.project_configuration.iteration = state["accelerator"]["iteration"]
        for position in self._positions.values():
            position.note_loaded(self._random)
        self._random.apply()
        return start - 1

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        loader = self._prepare_data_loader(*args, **kwargs)
        self._watch_loaders()
        return loader

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader without the first batches, which continues a saved epoch as it was."""
        made = self._skip_first_batches(dataloader, num_batches)
        if (position := self._positions.get(id(dataloader))) is not None:
            position.watch_rest(made, num_batches)
        return made

    def end_training(self) -> None:
        """Wait for the saves, then end the training as accelerate does."""
        self.close()
        self._end_training()

    def close(self) -> None:
        """Wait for the running saves, and release the repository; the Accelerator can't save any more."""
        self._saver.close()

    # --- the state ---------------------------------------------------------------------------------------------

    def _watch_loaders(self) -> None:
        for loader in self._accelerator._dataloaders:
            if id(loader) not in self._positions:
                self._positions[id(loader)] = LoaderPosition(loader)

    def _state(self) -> dict[str, Any]:
        accelerator = self._accelerator
        self._random.take()
        self._watch_loaders()
        optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in accelerator._optimizers]
        state: dict[str, Any] = {
            "accelerator": {"step": accelerator.step, "iteration": accelerator.project_configuration.iteration + 1},
            "train": _model_states(accelerator._models, optimizers),
            "schedulers": list(accelerator._schedulers),
            "data": [self._positions[id(loader)] for loader in accelerator._dataloaders],
            "random": self._random,
            "custom": list(accelerator._custom_objects),
        }
        if accelerator.scaler is not None:
            state["scaler"] = accelerator.scaler
        return state


def _model_states(models: Sequence[Any], optimizers: Sequence[Any]) -> list[ModelState]:
    """Return each model with the optimizers of its parameters; all models together where an optimizer has several models."""
    owner = {id(p): number for number, model in enumerate(models) for p in model.parameters()}
    of_model: dict[int, list[Any]] = {number: [] for number in range(len(models))}
    for optimizer in optimizers:
        numbers = {owner.get(id(p), -1) for group in optimizer.param_groups for p in group["params"]}
        if len(numbers) != 1 or -1 in numbers:
            return [ModelState(list(models), list(optimizers))]
        of_model[numbers.pop()].append(optimizer)
    return [ModelState(model, of_model[number]) for number, model in enumerate(models)]


def _step_of_name(name: str | os.PathLike[str] | None) -> int | None:
    found = None if name is None else _TRAILING_NUMBER.search(os.fspath(name))
    return None if found is None else int(found[1])


def _require_supported(accelerator: Any) -> None:
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        raise InvalidArgument(f"ckpt does not save the engine of {kind}: use its own save_state, or train with DDP or FSDP2")
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if kind == "FSDP" and getattr(plugin, "fsdp_version", 1) != 2:
        raise InvalidArgument("ckpt does not save FSDP1 of accelerate: set fsdp_version to 2")


def _require_no_hooks(hooks: dict[Any, Any], name: str) -> None:
    if hooks:
        raise InvalidArgument(
            f"a hook of {name} expects a folder of accelerate, which ckpt does not make: remove it, and register objects with "
            "state_dict() by register_for_checkpointing"
        )
