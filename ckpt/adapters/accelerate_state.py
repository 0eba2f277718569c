"""What an Accelerator has prepared, as entries of a state: models, optimizers, schedulers, loaders and random generators."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt.adapters.accelerate_data import LoaderPosition
from ckpt.adapters.deepspeed_state import EngineState
from ckpt.adapters.epoch_random import RandomSnapshot
from ckpt.adapters.torch import ModelState
from ckpt.storage.base.errors import InvalidArgument


class PreparedObjects:
    """The objects that an Accelerator has prepared. It replaces two methods of the Accelerator, to see fetches of batches."""

    def __init__(self, accelerator: Any) -> None:
        """Raises InvalidArgument if ckpt does not save the engine of the Accelerator."""
        _require_supported(accelerator)
        self._accelerator = accelerator
        self._positions: dict[int, LoaderPosition] = {}
        self._random = RandomSnapshot()
        self._prepare_data_loader, self._skip_first_batches = accelerator.prepare_data_loader, accelerator.skip_first_batches
        accelerator.prepare_data_loader, accelerator.skip_first_batches = self.prepare_data_loader, self.skip_first_batches
        self._watch_loaders()

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare a loader as accelerate does, and watch it. Raises InvalidArgument if a Trainer of transformers calls it."""
        _require_own_loop()
        loader = self._prepare_data_loader(*args, **kwargs)
        self._watch_loaders()
        return loader

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader without the first batches, which continues a saved epoch as it was."""
        position = self._positions.get(id(dataloader))
        if position is None:
            return self._skip_first_batches(dataloader, num_batches)
        made = self._skip_first_batches(dataloader, position.skip_in_sampler(num_batches))
        position.watch_rest(made, num_batches)
        return made

    def entries(self) -> dict[str, Any]:
        """Return the state to save, or to fill by a load."""
        accelerator = self._accelerator
        self._random.take()
        self._watch_loaders()
        optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in accelerator._optimizers]
        state: dict[str, Any] = {
            "accelerator": {"step": accelerator.step, "iteration": accelerator.project_configuration.iteration + 1},
            "train": self._train_states(optimizers),
            "schedulers": list(accelerator._schedulers),
            "data": [self._positions[id(loader)] for loader in accelerator._dataloaders],
            "random": self._random,
            "custom": list(accelerator._custom_objects),
        }
        if accelerator.scaler is not None:
            state["scaler"] = accelerator.scaler
        return state

    def _train_states(self, optimizers: Sequence[Any]) -> Sequence[ModelState | EngineState]:
        models = self._accelerator._models
        if _kind(self._accelerator) == "DEEPSPEED":  # each engine has its optimizer
            return [EngineState(model, parts=("model", "optimizer", "lr_scheduler", "engine")) for model in models]
        return _model_states(models, optimizers)

    def continue_from(self, state: dict[str, Any]) -> None:
        """Set the counters and random generators of a loaded state; its other entries are filled in place."""
        self._accelerator.step = state["accelerator"]["step"]
        self._accelerator.project_configuration.iteration = state["accelerator"]["iteration"]
        for position in self._positions.values():
            position.note_loaded(self._random)
        self._random.apply()

    def _watch_loaders(self) -> None:
        """Watch new loaders, and forget those that the Accelerator no longer has, as after `free_memory`."""
        loaders = {id(loader): loader for loader in self._accelerator._dataloaders}
        self._positions = {key: self._positions.get(key) or LoaderPosition(loader) for key, loader in loaders.items()}


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


def _kind(accelerator: Any) -> str:
    return str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))


def _require_supported(accelerator: Any) -> None:
    kind = _kind(accelerator)
    if kind in ("MEGATRON_LM", "XLA"):
        raise InvalidArgument(f"ckpt does not save the engine of {kind}: use its own save_state, or train with DDP or FSDP2")
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if kind == "FSDP" and getattr(plugin, "fsdp_version", 1) != 2:
        raise InvalidArgument("ckpt does not save FSDP1 of accelerate: set fsdp_version to 2")


def _require_own_loop() -> None:
    """Raise InvalidArgument if a Trainer of transformers is training: it does not save its checkpoints by `save_state`."""
    frame = sys._getframe() if "transformers.trainer" in sys.modules else None
    while frame is not None:
        if frame.f_globals.get("__name__") == "transformers.trainer":
            raise InvalidArgument(
                "a Trainer of transformers does not call save_state of its Accelerator, so attach(trainer.accelerator, url) "
                "would save nothing: use ckpt.adapters.transformers.CkptTrainer"
            )
        frame = frame.f_back


def require_no_hooks(hooks: Mapping[int, object], name: str) -> None:
    """Raise InvalidArgument if the user has registered hooks that are called with a folder. name: what calls them."""
    if hooks:
        raise InvalidArgument(
            f"a hook of {name} expects a folder of accelerate, which ckpt does not make: remove it, and register objects with "
            "state_dict() by register_for_checkpointing"
        )
