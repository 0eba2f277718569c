"""The state of a Lightning Trainer as one entry of a state: the dict that Lightning itself would write as a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from ckpt.adapters.deepspeed_state import EngineState
from ckpt.adapters.lightning_averaging import without_annealing_functions
from ckpt.adapters.lightning_deepspeed import require_supported_options, strategy_engine_state, uses_deepspeed
from ckpt.adapters.lightning_finetuning import frozen_parts
from ckpt.adapters.lightning_packages import is_a
from ckpt.adapters.torch import ModelState
from ckpt.errors import UnsupportedLeaf
from ckpt.state.stateful import RandomState
from ckpt.state.torch_keys import ModuleEntries, module_entries
from ckpt.state.tree import PerRank, flatten
from ckpt.storage.base.errors import InvalidArgument
from ckpt.support.user_warning import warn_user

_SMALL_BYTES = 64 << 10
_SHARED = ("state_dict", "optimizer_states")
"""The entries of which all ranks have equal copies."""

_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
_HYPER_PARAMETER_TYPES = ("hparams_type", "datamodule_hparams_type")

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")
_SHARDED_STRATEGY = "ModelParallelStrategy"


class TrainerState:
    """The checkpoint dict of a Trainer, made when a save reads it, because Lightning's hooks then run for each.

    trainer: a Trainer in its fit.
    extra: returns what else is stored, under the key "ckpt".
    """

    def __init__(self, trainer: Any, extra: Callable[[], dict[str, Any]]) -> None:
        self._trainer, self._extra = trainer, extra
        self._left_out: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        """Return the model, optimizers, schedulers, loops, callbacks and random state, without a copy."""
        strategy = self._trainer.strategy
        with _without_model(strategy) if divides_model(strategy) else nullcontext():
            checkpoint = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        found = {key: value if key in _SHARED else _own_small_tensors(value) for key, value in checkpoint.items()}
        found = storable(found, self._left_out)
        found["ckpt"] = {
            **_own_small_tensors(self._extra()), "random": RandomState(), "frozen": frozen_parts(self._trainer),
        }  # fmt: skip
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: a Trainer loads its checkpoint in the order of its own start."""

    def state_dict_like(self, saved: Any, everything: bool) -> dict[str, Any]:
        """Return the state, for a load that fills it."""
        return self.state_dict()

    def members(self) -> ModuleEntries:
        """Return the names in `state_dict` of buffers, which may differ between ranks, and of parameters."""
        if divides_model(self._trainer.strategy):
            return ModuleEntries([], [])
        entries = module_entries(self._trainer.lightning_module)
        return ModuleEntries(*([f"state_dict.{name}" for name in names] for names in entries))


def sharded_model(trainer: Any) -> ModelState | EngineState:
    """Return the model and optimizers of a trainer whose ranks have only parts of them."""
    if uses_deepspeed(trainer.strategy):
        return strategy_engine_state(trainer.strategy)
    return ModelState(trainer.lightning_module, trainer.optimizers, group="auto" if trainer.world_size > 1 else None)


def divides_model(strategy: object) -> bool:
    """Return whether a strategy of Lightning keeps only a part of the model on each rank."""
    return uses_deepspeed(strategy) or is_a(strategy, _SHARDED_STRATEGY)


@contextmanager
def _without_model(strategy: Any) -> Iterator[None]:
    """Let Lightning leave the model and optimizers out of its checkpoint; it would copy or gather them."""
    strategy.lightning_module_state_dict, strategy.optimizer_state = dict, lambda optimizer: {}
    try:
        yield
    finally:
        del strategy.lightning_module_state_dict, strategy.optimizer_state


def require_supported_strategy(strategy: Any) -> None:
    """Raise InvalidArgument for a strategy whose state Checkpoints does not know."""
    if not is_a(strategy, *_STRATEGIES, _SHARDED_STRATEGY):
        advice = (
            "ModelParallelStrategy, which is FSDP2" if "FSDP" in type(strategy).__name__ else "strategy='ddp' or one device"
        )
        raise InvalidArgument(
            f"Checkpoints does not support {type(strategy).__name__}: use {advice}, or save with "
            "ckpt.adapters.torch.ModelState from a callback of your own"
        )
    if uses_deepspeed(strategy):
        require_supported_options(strategy)


def storable(checkpoint: dict[str, Any], left_out: set[str]) -> dict[str, Any]:
    """Return a checkpoint dict without hyperparameters that are code or objects; a warning names each once.

    Lightning does not need them to resume; `load_from_checkpoint` takes them as arguments.

    left_out: the names that a warning has named; further ones are added.
    """

    def keeps(name: str, value: object) -> bool:
        try:
            flatten({name: value})
        except UnsupportedLeaf:
            if name not in left_out:
                left_out.add(name)
                kind = type(value).__name__
                warn_user(f"{name} is not stored, because it is a {kind}: give it to load_from_checkpoint as an argument")
            return False
        return True

    found = {key: value for key, value in checkpoint.items() if key not in _HYPER_PARAMETER_TYPES}
    found = without_annealing_functions(found)
    for key in _HYPER_PARAMETERS:
        if isinstance(found.get(key), dict):
            found[key] = {name: value for name, value in found[key].items() if keeps(f"{key}.{name}", value)}
        elif key in found and not keeps(key, found[key]):
            del found[key]
    return found


def _own_small_tensors(value: Any) -> Any:
    """Return the same containers with small tensors marked as each rank's own: metrics of callbacks differ between ranks."""
    import torch

    if isinstance(value, torch.Tensor):
        return PerRank(value) if value.numel() * value.element_size() <= _SMALL_BYTES else value
    if type(value) is dict:
        return {key: _own_small_tensors(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_own_small_tensors(each) for each in value)
    return value
