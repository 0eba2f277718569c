"""The class ModelState, which saves a torch model and its optimizers so that any other parallelism can load them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt.adapters.torch_experts import ExpertNames, Experts, model_ranks
from ckpt.adapters.torch_optimizer import (
    group_options,
    load_optimizer,
    optimizer_node,
    ordered_parameter_names,
    saved_parameter_states,
)
from ckpt.adapters.torch_replicas import ReplicatedShard, map_nested, with_replica_ranks, without_replica_ranks
from ckpt.format.manifest import Saved
from ckpt.state.leaves import empty_leaf
from ckpt.state.optimizer_names import moment_like
from ckpt.state.torch_keys import ModuleEntries, require_whole_parameters
from ckpt.state.tree import Node
from ckpt.storage.base.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

__all__ = ["Experts", "ModelState"]

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""The attributes in which torch.compile and activation checkpointing keep the wrapped module."""


class ModelState:
    """A model and its optimizers as one entry of a state, under names that do not depend on the parallelism.

        state = {"train": ModelState(model, optimizer), "step": 0}
        ckpt.save(state, url)
        ckpt.load(url, like=state)

    model: a module, or several, such as the chunks of an interleaved pipeline. FSDP1 is not supported: use fully_shard, or
        `ckpt.adapters.dcp` with torch's get_state_dict.
    optimizer: one or several. Each parameter may belong to only one of them.
    group: the ranks that have this model, if other ranks have other models. For a stage of a pipeline it is the torch process
        group or device mesh of the stage, as in mesh["dp"] or mesh["dp", "tp"]. None means this rank alone, and "auto" all
        ranks.
    experts: for a mixture (MoE) whose ranks have different experts under equal names: {regular expression: the process group or
        1-D device mesh that divides the experts}, or an `Experts` in place of the group. An expert gets its number in the whole
        model, so that any other number of ranks can load it. The expression matches names of parameters and buffers. The number
        of the expert is its first group, or else follows the match. If no number does, the tensor has all local experts along
        its first axis. None for the group means that this process has all experts.

    The plain state `{"model": model, "optimizer": optimizer}` is enough while names and order of the parameters stay the same:
    in one process, or under DDP if every run uses DDP. All other cases need ModelState: FSDP2, tensor and pipeline parallelism,
    DDP loaded without DDP, torch.compile, another order or grouping of the parameters. A load gives an optimizer that has made
    no step its state, sharded as its parameters are. A load of an optimizer that was saved before its first step leaves it
    without a state.

    The saved state is {"model": {name: tensor}, "optimizer": {"state": {name: …}, "group_of": {name: group}, "groups": {group:
    options}}}. The name of a group is that of its first parameter. A load reads the entries of this model, and ignores those of
    other stages.

    Raises:
        InvalidArgument: `experts` does not describe the experts of the model. At a save or load, if the model uses FSDP1, two
            models share a name, an optimizer has a parameter of no model, or `group` is of another type.
        LeafMismatch: At a load, if the parameters of one group were saved with different options.
    """

    def __init__(
        self, model: torch.nn.Module | Iterable[torch.nn.Module], optimizer: Any = None, *, group: Any = "auto",
        experts: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._models: list[Any] = [model] if hasattr(model, "named_parameters") else list(model)
        self._optimizers: list[Any] = [] if optimizer is None else _as_list(optimizer)
        self._group = group
        self._experts = ExpertNames(experts, group)
        self.members()  # so that the names of experts are known

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors by name, without a copy. It changes nothing: a new optimizer stays without a state."""
        buffers = {name.removeprefix("model.") for name in self.members().buffers}
        model = self._models_state()
        found: dict[str, Any] = {
            "model": {
                name: map_nested(value, partial(self._placed, name, is_stored_whole=name in buffers))
                for name, value in model.items()
            }
        }
        if self._optimizers:
            found["optimizer"] = self._placed_optimizer(self._optimizers_state())
        return found

    def members(self) -> ModuleEntries:
        """Return the names in `state_dict` of buffers, which may differ between ranks, and of parameters."""
        buffers = [name for model in self._models for name, _ in _named_buffers(model)]
        parameters = [item for model in self._models for item in _named_parameters(model)]
        self._experts.learn([*buffers, *(name for name, _ in parameters)])
        global_name = self._experts.name
        frozen, trained = (
            [f"model.{global_name(name)}" for name, parameter in parameters if parameter.requires_grad == is_trained]
            for is_trained in (False, True)
        )
        return ModuleEntries([f"model.{global_name(name)}" for name in buffers], frozen, trained)

    def state_dict_like(self, saved: Any, everything: bool) -> dict[str, Any]:
        """Return the state that a load fills: the entries of this model, and the saved optimizer state of its parameters.

        saved: the part of the saved state that is loaded, with a `ckpt.format.manifest.Saved` in place of each array.
        everything: whether that is the whole saved state. Otherwise, entries that are not in it keep their values.
        """
        state = self.state_dict()
        if self._optimizers:
            saved_optimizer = (saved or {}).get("optimizer")
            if isinstance(saved_optimizer, dict):
                state["optimizer"] = self._optimizer_targets(state["optimizer"], saved_optimizer, everything)
            elif not everything:
                del state["optimizer"]
        return state

    def renamed(self, tree: Node, saved_name: Callable[[str], str], entry: Callable[[Any, str], Node]) -> Node:
        """Return the tree of this model from a step with other names. The optimizer state follows the parameters.

        tree: the tree of the saved state.
        saved_name: returns the saved name of an entry of this state.
        entry: returns the saved tree of a value and its name in this state.
        """
        state = self.state_dict()
        parts = [["model", entry(state["model"], "model")]]
        if self._optimizers:
            saved_parameters = dict(saved_parameter_states(tree, ""))
            found = {name: saved_parameters.get(saved_name(f"model.{name}")) for name in state["optimizer"]["group_of"]}
            saved_states = {name: state for name, state in found.items() if state is not None}
            if saved_states:
                parts.append(["optimizer", optimizer_node(saved_states)])
        return {"dict": parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the filled state of `state_dict_like` into the models and optimizers; ignore entries of other models."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        state = map_nested(state, without_replica_ranks)
        for model in self._models:
            names = {name: self._experts.name(name) for name in get_model_state_dict(model)}
            mine = {name: state["model"][saved] for name, saved in names.items() if saved in state["model"]}
            self._set_model(model, mine)
        if "optimizer" in state:
            names = self._names()
            for optimizer in self._optimizers:
                load_optimizer(optimizer, names, state["optimizer"])

    # --- the model ---------------------------------------------------------------------------------------------

    def _models_state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        found: dict[str, Any] = {}
        for model in self._models:
            _refuse_fsdp1(model)
            require_whole_parameters(model)
            state = {self._experts.name(name): value for name, value in get_model_state_dict(model).items()}
            if twice := found.keys() & state.keys():
                raise InvalidArgument(f"two of the models of a ModelState have a {min(twice)}; give each its own ModelState")
            found.update(state)
        return found

    def _set_model(self, model: Any, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        set_model_state_dict(model, state)

    def _names(self) -> dict[Any, str]:
        """Return the name of each parameter; the first one if it has several."""
        found: dict[Any, str] = {}
        for model in self._models:
            for name, parameter in _named_parameters(model):
                found.setdefault(parameter, self._experts.name(name))
        return found

    # --- the optimizers ----------------------------------------------------------------------------------------
    # torch's get_optimizer_state_dict is not used for three reasons. It gives a new optimizer a state by a step with zero
    # gradients, which changes the training after a save. It refuses parameters without a state, such as those of experts that
    # got no token yet. And its list of groups can't be merged over the stages of a pipeline.

    def _optimizers_state(self) -> dict[str, Any]:
        names = self._names()
        state: dict[str, Any] = {}
        groups: dict[str, Any] = {}
        group_of: dict[str, str] = {}
        for optimizer in self._optimizers:
            mine = ordered_parameter_names(optimizer, names)
            packed = optimizer.state_dict()
            for number, values in packed["state"].items():
                if not isinstance(number, int):
                    raise InvalidArgument(
                        f"{type(optimizer).__name__} has a state for {number!r}, which is not a parameter: save it under "
                        "a name of its own instead of in ModelState"
                    )
                state[mine[number]] = dict(values)
            for group in packed["param_groups"]:
                members = [mine[number] for number in group["params"]]
                if members:
                    groups[members[0]] = group_options(group)
                    group_of.update(dict.fromkeys(members, members[0]))
        return {"state": state, "group_of": group_of, "groups": groups}

    def _optimizer_targets(self, current: dict[str, Any], saved_optimizer: dict[str, Any], everything: bool) -> dict[str, Any]:
        parameters = {name: parameter for parameter, name in self._names().items()}
        state = {}
        for name in current["group_of"]:
            have = current["state"].get(name, {})
            saved = saved_optimizer.get("state", {}).get(name, {})
            values = {
                key: self._optimizer_target(name, key, value, have.get(key), parameters[name]) for key, value in saved.items()
            }
            state[name] = values if everything else have | values
        group_of = current["group_of"] | {
            n: k for n, k in saved_optimizer.get("group_of", {}).items() if n in current["group_of"]
        }
        groups = {
            key: {
                option: self._optimizer_target(key, "", value, None, None)
                for option, value in saved_optimizer["groups"][key].items()
            }
            for key in dict.fromkeys(group_of.values())
            if key in saved_optimizer.get("groups", {})
        }
        return {"state": {n: values for n, values in state.items() if values}, "group_of": group_of, "groups": groups}

    def _optimizer_target(self, name: str, key: str, saved: Any, existing: Any, parameter: Any) -> Any:
        """Return the target of a value of the optimizer state: the existing tensor if it matches, or a new one.

        name: that of the parameter, or of the group of parameters.
        """
        import torch

        if isinstance(saved, dict):
            known = existing if isinstance(existing, dict) else {}
            return {k: self._optimizer_target(name, k, v, known.get(k), parameter) for k, v in saved.items()}
        if not isinstance(saved, Saved):
            return None  # a plain value, which the load replaces by the saved one
        tensor = without_replica_ranks(existing)
        expert_tensor = self._experts.tensor(name)
        shape = (
            saved.shape
            if expert_tensor is None or parameter is None
            else expert_tensor.local_shape(saved.shape, parameter.shape)
        )
        if isinstance(tensor, torch.Tensor) and Saved(str(tensor.dtype)[6:], tuple(tensor.shape)) == (saved.dtype, shape):
            return existing
        made = None if parameter is None else moment_like(key, saved.dtype, shape, parameter)
        return self._placed(name, empty_leaf("torch", saved.dtype, shape, {}).value if made is None else made, False, parameter)

    # --- who has what ------------------------------------------------------------------------------------------

    def _placed_optimizer(self, state: dict[str, Any]) -> dict[str, Any]:
        parameters = {name: parameter for parameter, name in self._names().items()}

        def placed(part: dict[str, Any]) -> dict[str, Any]:
            return {
                name: map_nested(values, partial(self._placed, name, parameter=parameters[name]))
                for name, values in part.items()
            }

        return {"state": placed(state["state"]), "group_of": state["group_of"], "groups": placed(state["groups"])}

    def _placed(self, name: str, value: Any, is_stored_whole: bool = False, parameter: Any = None) -> Any:
        """Return a tensor with its part of the whole array and the ranks of its replicas.

        The tensor stays as it is where its type, or the rules for plain arrays, determine them.

        name: the name of the tensor, parameter or group of parameters in the whole model.
        is_stored_whole: whether the replicas may differ, so that the first rank stores all of its replica.
        """
        import torch

        expert_tensor = self._experts.tensor(name)
        if expert_tensor is None or not isinstance(value, torch.Tensor):
            return self._with_replica_ranks(value, is_stored_whole)
        if expert_tensor.is_divided(value.shape, None if parameter is None else parameter.shape):
            if hasattr(value, "device_mesh"):
                raise InvalidArgument(f"ModelState: {name} is a DTensor, which describes its parts; leave it out of experts=")
            shape, offset = expert_tensor.global_shape(value.shape), expert_tensor.offset(value.shape)
            return ReplicatedShard(value, [value], shape, [offset], expert_tensor.copies, is_stored_whole)
        if expert_tensor.parts > 1:  # such as the step count, which all ranks have
            return self._with_replica_ranks(value, is_stored_whole)
        return self._with_replica_ranks(value, is_stored_whole, expert_tensor.copies)

    def _with_replica_ranks(self, value: Any, is_stored_whole: bool, owners: Sequence[int] | None = None) -> Any:
        """Return a tensor with the ranks of its replicas, if neither its type nor the rules for plain arrays determine them.

        owners: the ranks that have the tensor, if not those of the model.
        """
        is_on_all_ranks = isinstance(self._group, str) and self._group == "auto"
        return with_replica_ranks(value, owners or (None if is_on_all_ranks else model_ranks(self._group)), is_stored_whole)


def _as_list(optimizer: Any) -> list[Any]:
    return [optimizer] if hasattr(optimizer, "param_groups") else list(optimizer)


def _named_parameters(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parameters with their names in the model without DDP, torch.compile and activation checkpointing."""
    return _walk_tensors(module, "_parameters", "")


def _named_buffers(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the buffers with their names, as `_named_parameters` does."""
    return _walk_tensors(module, "_buffers", "")


def _walk_tensors(module: Any, kind: str, prefix: str) -> Iterator[tuple[str, Any]]:
    from torch.nn.parallel import DistributedDataParallel

    inner = next((module._modules[w] for w in _WRAPPERS if w in module._modules), None)
    if isinstance(module, DistributedDataParallel):
        inner = module.module
    if inner is not None:
        yield from _walk_tensors(inner, kind, prefix)
        return
    for name, tensor in getattr(module, kind).items():
        if tensor is not None:
            yield prefix + name, tensor
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk_tensors(child, kind, f"{prefix}{name}.")


def _refuse_fsdp1(model: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    if FullyShardedDataParallel.fsdp_modules(model):
        raise InvalidArgument(
            "ModelState does not take FullyShardedDataParallel (FSDP1): shard with fully_shard, or save the result of torch's "
            "get_state_dict with ckpt.adapters.dcp.Writer"
        )
