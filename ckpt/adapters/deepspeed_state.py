"""The class EngineState: a DeepSpeed engine as one entry of a state, under the names of the whole model."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from ckpt.adapters.deepspeed_names import COUNTERS, SCALER_FIELDS
from ckpt.adapters.deepspeed_partitions import Partition, Range, parameter_value, partitions_of, write_model_weights
from ckpt.adapters.torch import ModelState
from ckpt.adapters.torch_optimizer import group_options
from ckpt.errors import LeafMismatch
from ckpt.format.manifest import Saved
from ckpt.state.leaves import as_leaf, empty_leaf
from ckpt.state.leaves.sharded import Shard
from ckpt.state.named_state import require_saved_names
from ckpt.state.stateful import RandomState
from ckpt.state.torch_keys import ModuleEntries
from ckpt.storage.base.errors import InvalidArgument

_PARTS = ("model", "optimizer", "lr_scheduler", "engine", "random")
_STEP = "step"


class EngineState:
    """A DeepSpeed engine with its optimizer, as an entry of a state that any number of ranks and any ZeRO stage can load.

        state = EngineState(engine)
        ckpt.save(state, url)
        ckpt.load(url, like=state)

    engine: what `deepspeed.initialize` returns, of ZeRO stage 0, 1, 2 or 3, with parameters in memory of the GPU or CPU.
    parts: what is saved or loaded: names out of "model", "optimizer", "lr_scheduler", "engine" (the counters) and "random".
    strict: whether a load refuses a step with other parameters than the engine. Otherwise only the common ones are loaded.
    exclude_frozen: whether to leave out parameters that are not trained.
    tag: a name of the step, which is saved with the counters.
    client_state: values of the user, saved as rank 0 has them.

    The saved state is that of `ckpt.adapters.torch.ModelState`: {"model": {name: tensor}, "optimizer": {"state": {name: …},
    "group_of": {name: group}, "groups": {group: options}}}, and an entry for each other part. A parameter that is trained is
    saved with the precision of its master weights. Each rank saves and loads only its partition.

    Raises:
        InvalidArgument: `parts` has another name; or the engine has pipeline, tensor or expert parallelism, partitions on
            NVMe, or another feature whose state ckpt does not save.
        LeafMismatch: At a load, if the step does not fit the engine. Nothing has changed then, unless the message contains
            "refused the state": parameters that the engine updates as one were saved with different values, such as steps.
    """

    def __init__(
        self, engine: Any, *, parts: Collection[str] = _PARTS, strict: bool = True, exclude_frozen: bool = False,
        tag: str | None = None, client_state: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        _require_supported(engine)
        if unknown := set(parts) - set(_PARTS):
            raise InvalidArgument(f"EngineState has no part {min(unknown)!r}: use {', '.join(_PARTS)}")
        self._engine, self._parts, self._strict = engine, parts, strict
        self._without_frozen, self._tag, self._client_state = exclude_frozen, tag, client_state
        # Without ZeRO, and without master weights, the optimizer is torch's own.
        optimizer = engine.optimizer
        is_plain = optimizer is None or optimizer is engine.basic_optimizer
        self._plain = ModelState(engine.module, optimizer) if is_plain else None
        self._partitions: list[Partition] = []
        self._find_partitions()  # refuses an optimizer of another kind
        self._new: dict[int, dict[str, Any]] = {}  # by partition: the optimizer state that a load fills

    def _find_partitions(self) -> None:
        """Find the partitions, whose memory can change between two saves."""
        if self._plain is None:
            self._partitions = partitions_of(self._engine.optimizer)

    # --- reading -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state by name, without a copy."""
        self._find_partitions()
        found: dict[str, Any] = {}
        if self._plain is not None:
            found = {part: value for part, value in self._plain.state_dict().items() if part in self._parts}
        else:
            if "model" in self._parts:
                found["model"] = self._model()
            if "optimizer" in self._parts:
                found["optimizer"] = self._optimizer()
        if "lr_scheduler" in self._parts and self._engine.lr_scheduler is not None:
            found["lr_scheduler"] = self._engine.lr_scheduler
        if "engine" in self._parts:
            found["engine"] = self._counters()
        if "random" in self._parts:
            found["random"] = RandomState()
        if self._client_state is not None:
            found["client_state"] = _of_this_rank(self._client_state) if self._engine.global_rank == 0 else {}
        return found

    def members(self) -> ModuleEntries:
        """Return the names in `state_dict` of buffers, which may differ between ranks, and of frozen parameters."""
        frozen = [f"model.{name}" for name, p in _parameters(self._engine.module) if not p.requires_grad]
        return ModuleEntries([f"model.{name}" for name, _ in _buffers(self._engine.module)], frozen)

    def _model(self) -> dict[str, Any]:
        ranges = {p: (partition, elements) for partition in self._partitions for p, elements in partition.ranges.items()}
        found: dict[str, Any] = {}
        for name, parameter in _parameters(self._engine.module):
            if parameter in ranges:
                partition, elements = ranges[parameter]
                found[name] = elements.shard(partition.weights)
            elif not (self._without_frozen and not parameter.requires_grad):
                found[name] = parameter_value(parameter)
        found.update(_buffers(self._engine.module))
        return found

    def _optimizer(self) -> dict[str, Any]:
        names = self._names()
        state: dict[str, Any] = {}
        groups: dict[str, Any] = {}
        group_of: dict[str, str] = {}
        labels: dict[int, str] = {}
        for partition in self._partitions:
            members = [names[parameter] for parameter in partition.ranges]
            label = labels.setdefault(id(partition.options), members[0])
            groups[label] = group_options(partition.options)
            group_of.update(dict.fromkeys(members, label))
            for key, value in self._flat_state(partition).items():
                for parameter, elements in partition.ranges.items():
                    state.setdefault(names[parameter], {})[key] = _of_parameter(key, value, partition, elements)
        return {"state": state, "group_of": group_of, "groups": groups}

    def _flat_state(self, partition: Partition) -> dict[str, Any]:
        """Return the state of the optimizer for the weights of a partition; without an entry where it has none yet."""
        found: dict[str, Any] = self._engine.optimizer.optimizer.state.get(partition.weights, {})
        return found

    def _names(self) -> dict[Any, str]:
        """Return the name of each parameter; the first one if it has several."""
        found: dict[Any, str] = {}
        for name, parameter in _parameters(self._engine.module):
            found.setdefault(parameter, name)
        return found

    def _counters(self) -> dict[str, Any]:
        engine = self._engine
        found: dict[str, Any] = {name: getattr(engine, name) for name in COUNTERS}
        found["tag"] = self._tag
        found["without_frozen"] = self._without_frozen
        scaler = getattr(engine.optimizer, "loss_scaler", None)
        found["loss_scaler"] = {name: getattr(scaler, name) for name in SCALER_FIELDS if hasattr(scaler, name)}
        return found

    # --- loading -----------------------------------------------------------------------------------------------

    def state_dict_like(self, saved: Any, everything: bool) -> dict[str, Any]:
        """Return the state that a load fills: the arrays of the engine, and the state of the optimizer that it has not yet."""
        if not everything:
            raise ValueError("EngineState takes no only=: give it parts=")
        self._find_partitions()
        saved = saved if isinstance(saved, dict) else {}
        if self._plain is not None:
            state = {part: v for part, v in self._plain.state_dict_like(saved, True).items() if part in self._parts}
        else:
            state = {"model": self._model()} if "model" in self._parts else {}
            if "optimizer" in self._parts:
                state["optimizer"] = self._optimizer_targets(saved.get("optimizer") or {})
        if "model" in state:
            self._require_same_names(state["model"], saved.get("model") or {}, saved.get("engine") or {})
        if "lr_scheduler" in self._parts and "lr_scheduler" in saved and self._engine.lr_scheduler is not None:
            state["lr_scheduler"] = self._engine.lr_scheduler
        if "engine" in self._parts and "engine" in saved:
            state["engine"] = _without_values(saved["engine"])
        if "random" in self._parts and "random" in saved:
            state["random"] = RandomState()
        return state

    def _require_same_names(self, model: dict[str, Any], saved: dict[str, Any], counters: dict[str, Any]) -> None:
        """Raise ValueError if the step has other names than the model; where that is allowed, remove those that it lacks."""
        frozen = {name for name, p in _parameters(self._engine.module) if not p.requires_grad}
        optional = frozen if counters.get("without_frozen") or self._without_frozen else set()
        if self._strict:
            own, others = ({name: None for name in names if name not in optional} for names in (model, saved))
            require_saved_names({"model": own}, {"model": others}, "model of the engine")
        for name in [name for name in model if name not in saved]:
            del model[name]

    def _optimizer_targets(self, saved: dict[str, Any]) -> dict[str, Any]:
        names = self._names()
        saved_states, saved_group_of = saved.get("state") or {}, saved.get("group_of") or {}
        state: dict[str, Any] = {}
        group_of: dict[str, Any] = {}
        self._new = {}
        for number, partition in enumerate(self._partitions):
            flat = self._new[number] = {}
            for parameter, elements in partition.ranges.items():
                name = names[parameter]
                if name in saved_group_of:
                    group_of[name] = saved_group_of[name]
                for key, value in (saved_states.get(name) or {}).items():
                    state.setdefault(name, {})[key] = self._target(partition, flat, elements, name, key, value)
        groups = saved.get("groups") or {}
        used = {label: _without_values(groups[label]) for label in dict.fromkeys(group_of.values()) if label in groups}
        return {"state": state, "group_of": group_of, "groups": used}

    def _target(self, partition: Partition, flat: dict[str, Any], elements: Range, name: str, key: str, value: object) -> Any:
        """Return the target of one saved value; those of one partition are parts of one new tensor, which `flat` gets."""
        import torch

        from ckpt.state.leaves.torch import dtype_of_name

        if not isinstance(value, Saved):
            return None
        if key == _STEP or value.shape != elements.shape:
            if value.shape not in ((), (1,)):
                raise ValueError(
                    f"{key} of {name} has shape {list(value.shape)}, and the parameter {list(elements.shape)}: construct the "
                    "model with the saved shapes"
                )
            return empty_leaf("torch", value.dtype, value.shape, {}).value
        if key not in flat:
            existing = self._flat_state(partition).get(key)
            dtype = dtype_of_name(value.dtype)
            if isinstance(existing, torch.Tensor) and (existing.shape, existing.dtype) == (partition.weights.shape, dtype):
                flat[key] = existing
            else:
                flat[key] = torch.zeros_like(partition.weights, dtype=dtype, requires_grad=False)
        return elements.shard(flat[key])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the filled state of `state_dict_like`. All ranks call this together."""
        if self._plain is not None:
            if "model" in state or "optimizer" in state:
                self._plain.load_state_dict({"model": {}, **state})
        else:
            if "optimizer" in state:
                self._load_optimizer(state["optimizer"])
            if "model" in state:
                self._write_model_weights()
        self._load_counters(state.get("engine") or {})

    def _write_model_weights(self) -> None:
        optimizer = self._engine.optimizer
        if hasattr(optimizer, "checkpoint_event_prologue"):
            optimizer.checkpoint_event_prologue()
        write_model_weights(optimizer)
        if hasattr(optimizer, "checkpoint_event_epilogue"):
            optimizer.checkpoint_event_epilogue()

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        names = self._names()
        inner = self._engine.optimizer.optimizer
        for number, partition in enumerate(self._partitions):
            members = [names[parameter] for parameter in partition.ranges]
            made = dict(self._new[number])
            for name in members:
                for key, value in state["state"].get(name, {}).items():
                    if key not in self._new[number]:
                        made[key] = _common_value(made.get(key, value), value, f"{key} of {name}")
            inner.state.pop(partition.weights, None)
            if made:
                inner.state[partition.weights] = made
            for name in members:
                options = state["groups"].get(state["group_of"].get(name))
                if options:
                    partition.options.update(options)
        if any(self._new.values()) and hasattr(self._engine.optimizer, "_hp_optimizer_states_linked"):
            self._engine.optimizer._hp_optimizer_states_linked = False  # for safe_get_full_optimizer_state
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()
        self._new = {}

    def _load_counters(self, saved: dict[str, Any]) -> None:
        for name in COUNTERS:
            if name in saved:
                setattr(self._engine, name, saved[name])
        scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        for name, value in (saved.get("loss_scaler") or {}).items():
            if hasattr(scaler, name):
                setattr(scaler, name, value)


def _require_supported(engine: Any) -> None:
    """Raise InvalidArgument for an engine whose state this adapter can't name."""
    if hasattr(engine, "num_stages"):
        raise InvalidArgument(
            "ckpt does not save a PipelineEngine of DeepSpeed: save each stage with ckpt.adapters.torch.ModelState"
        )
    if engine.mp_world_size > 1:
        raise InvalidArgument(
            "ckpt does not save tensor parallelism of DeepSpeed, whose parts have equal names on all ranks: turn it off"
        )
    if engine.has_moe_layers:
        raise InvalidArgument("ckpt does not save experts of DeepSpeed's MoE: see experts= of ckpt.adapters.torch.ModelState")
    for feature in ("random_ltd_enabled", "curriculum_learning_enabled"):
        if getattr(engine, feature, bool)():
            raise InvalidArgument(
                f"ckpt does not save the state of DeepSpeed's {feature.removesuffix('_enabled')}: turn it off"
            )
    if getattr(engine._config.zero_config, "mics_shard_size", 0) > 0:  # of older versions
        raise InvalidArgument("ckpt does not save MiCS partitions of DeepSpeed: remove mics_shard_size, or use ZeRO stage 3")
    if any(type(module).get_extra_state is not _torch_extra_state() for module in engine.module.modules()):
        raise InvalidArgument(
            "ckpt does not save a module with get_extra_state() in a DeepSpeed engine: make that state a buffer"
        )


def only_step_changes_weights(engine: Any) -> bool:
    """Return whether only `step` of the inner optimizer changes master weights and moments, and no other code of DeepSpeed.

    With Muon, DeepSpeed changes a moment in the backward. ZenFlow and SuperOffload step in other processes.
    """
    optimizer = engine.optimizer
    if optimizer is None or optimizer is engine.basic_optimizer:
        return optimizer is not None
    known = type(optimizer).__name__ in ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer")
    return known and not getattr(optimizer, "zenflow", False) and "muon" not in type(optimizer.optimizer).__name__.lower()


def _torch_extra_state() -> object:
    import torch

    return torch.nn.Module.get_extra_state


def _parameters(module: Any) -> Iterator[tuple[str, Any]]:
    yield from module.named_parameters(remove_duplicate=False)


def _buffers(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the buffers that `state_dict()` of the module has."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, value in part._buffers.items():
            if value is not None and name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, value


def _of_parameter(key: str, value: Any, partition: Partition, elements: Range) -> Any:
    """Return the part of a value of the optimizer's state that belongs to one parameter."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    if key != _STEP and value.shape == partition.weights.shape:
        return elements.shard(value)
    if value.numel() != 1:
        raise InvalidArgument(
            f"{key} of the optimizer has shape {list(value.shape)}, which is not that of its weights: ckpt can't divide it by "
            "parameter; use an optimizer that works element by element, such as Adam"
        )
    return value.clone()


def _common_value(first: Any, value: Any, what: str) -> Any:
    """Return the one value of all parameters of a partition."""
    import torch

    same = torch.equal(first, value) if isinstance(first, torch.Tensor) and isinstance(value, torch.Tensor) else first == value
    if not same:
        raise LeafMismatch(
            f"{what} is {value}, and {first} for other parameters of its group, which DeepSpeed updates as one: divide the "
            "parameters into groups as they were when saved"
        )
    return first


def _without_values(saved: object) -> Any:
    """Return the containers of a saved state with None for each plain value, and a new tensor for each array."""
    if isinstance(saved, dict):
        return {key: _without_values(value) for key, value in saved.items()}
    if isinstance(saved, Saved):
        return empty_leaf("torch", saved.dtype, saved.shape, {}).value
    return None


def _of_this_rank(value: Any) -> Any:
    """Return the same containers, with each array as a shard that only this rank has."""
    if isinstance(value, dict):
        return {key: _of_this_rank(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_of_this_rank(each) for each in value)
    leaf = None if isinstance(value, np.generic) else as_leaf(value)
    return value if leaf is None or leaf.shards() is not None else Shard(value, leaf.shape, (0,) * len(leaf.shape))
