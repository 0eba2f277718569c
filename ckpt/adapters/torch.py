"""A torch model and its optimizers under the names of the bare model, so that any parallelism loads what another saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt.errors import LeafMismatch
from ckpt.format.manifest import Saved
from ckpt.state.boxes import Replica
from ckpt.state.leaves import empty_leaf
from ckpt.state.leaves.sharded import Shard
from ckpt.state.name_patterns import children
from ckpt.state.optimizer_names import moment_like
from ckpt.state.torch_keys import ModuleEntries
from ckpt.state.tree import Node, join_path
from ckpt.storage.base.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Where torch.compile and activation checkpointing put the module that they wrap."""

_NON_OPTION_KEYS = ("params", "param_names")


class ModelState:
    """A model and its optimizers as one entry of a state, saved and loaded whatever the parallelism.

        state = {"train": ModelState(model, optimizer), "step": 0}
        ckpt.save(state, url)
        ckpt.load(url, like=state)

    Plain `{"model": model, "optimizer": optimizer}` is enough while the names and the order of the parameters stay: in one
    process, or under DDP that is always DDP. ModelState is for all else: FSDP2, tensor and pipeline parallelism, DDP loaded
    without DDP, torch.compile, another order or grouping of the parameters. An optimizer that has made no step yet gets its
    state on load, sharded as its parameters are; one that was saved so has none afterwards.

    model: a module, or several, such as the chunks of an interleaved pipeline. FSDP1 is not supported: use fully_shard, or
        `ckpt.adapters.dcp` with torch's get_state_dict.
    optimizer: one or several, together over each parameter once.
    group: the ranks that hold this very model, where others hold other ones: for a stage of a pipeline the torch process
        group or device mesh over which the stage is spread, as in mesh["dp"] or mesh["dp", "tp"]; None where this rank alone
        has it. "auto": all ranks.

    The state is {"model": {name: tensor}, "optimizer": {"state": {name: …}, "group_of": {name: group}, "groups": {group:
    options}}}; a group is called by its first parameter. A load takes what this model has and leaves other stages' alone.
    """

    def __init__(
        self, model: torch.nn.Module | Iterable[torch.nn.Module], optimizer: Any = None, *, group: Any = "auto"
    ) -> None:
        self._models: list[Any] = [model] if hasattr(model, "named_parameters") else list(model)
        self._optimizers: list[Any] = [] if optimizer is None else _as_list(optimizer)
        self._group = group

    def state_dict(self) -> dict[str, Any]:
        """The tensors themselves, not copies, by name. Changes nothing: a fresh optimizer has no state."""
        buffers = {name.removeprefix("model.") for name in self.members().buffers}
        model = self._models_state()
        found: dict[str, Any] = {
            "model": {
                name: self._with_replica_ranks(value, True) if name in buffers else _map_nested(value, self._with_replica_ranks)
                for name, value in model.items()
            }
        }
        if self._optimizers:
            found["optimizer"] = _map_nested(self._optimizers_state(), self._with_replica_ranks)
        return found

    def members(self) -> ModuleEntries:
        """The names in `state_dict` of buffers, which may differ between ranks, and of parameters that are not trained."""
        buffers = [f"model.{name}" for model in self._models for name, _ in _named_buffers(model)]
        named = (item for model in self._models for item in _named_parameters(model))
        return ModuleEntries(buffers, [f"model.{name}" for name, parameter in named if not parameter.requires_grad])

    def state_dict_like(self, saved: Any, everything: bool) -> dict[str, Any]:
        """What a load is to fill: this model's entries, and of the optimizer what was saved of its parameters.

        saved: the saved state with a `ckpt.format.manifest.Saved` for each array, only what is to be loaded. everything:
        whether that is all; else what is not in it keeps its value.
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
        """What was saved of this model under other names: the optimizer's state follows its parameters.

        tree: of the saved state. saved_name: of an entry of this state. entry(value, name): what was saved for that one.
        """
        state = self.state_dict()
        parts = [["model", entry(state["model"], "model")]]
        if self._optimizers:
            saved_parameters = dict(_saved_parameters(tree, ""))
            found = {name: saved_parameters.get(saved_name(f"model.{name}")) for name in state["optimizer"]["group_of"]}
            known = {name: home for name, home in found.items() if home is not None}
            if known:
                parts.append(["optimizer", _optimizer_node(known)])
        return {"dict": parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict_like` gave, filled. Entries of other models are passed over."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

        state = _map_nested(state, _unwrap)
        for model in self._models:
            mine = {name: state["model"][name] for name in get_model_state_dict(model) if name in state["model"]}
            set_model_state_dict(model, mine)
        if "optimizer" in state:
            names = self._names()
            for optimizer in self._optimizers:
                _load_optimizer(optimizer, names, state["optimizer"])

    # --- the model ---------------------------------------------------------------------------------------------

    def _models_state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        found: dict[str, Any] = {}
        for model in self._models:
            _refuse_fsdp1(model)
            state = get_model_state_dict(model)
            if twice := found.keys() & state.keys():
                raise InvalidArgument(f"two of the models of a ModelState have a {min(twice)}; give each a state of its own")
            found.update(state)
        return found

    def _names(self) -> dict[Any, str]:
        """The name of each parameter, the first one where it has several."""
        found: dict[Any, str] = {}
        for model in self._models:
            for name, parameter in _named_parameters(model):
                found.setdefault(parameter, name)
        return found

    # --- the optimizers ----------------------------------------------------------------------------------------
    # Not torch's get_optimizer_state_dict: that gives a fresh optimizer a state by a step with zero gradients, which
    # changes the training that goes on after a save; it refuses parameters without a state, such as those of experts that
    # no token has met; and its list of groups can't be united over the stages of a pipeline.

    def _optimizers_state(self) -> dict[str, Any]:
        names = self._names()
        state: dict[str, Any] = {}
        groups: dict[str, Any] = {}
        group_of: dict[str, str] = {}
        for optimizer in self._optimizers:
            mine = _parameter_names(optimizer, names)
            packed = optimizer.state_dict()
            for number, values in packed["state"].items():
                if not isinstance(number, int):
                    raise InvalidArgument(f"{type(optimizer).__name__} keeps a state for {number!r}, which is no parameter")
                state[mine[number]] = dict(values)
            for group in packed["param_groups"]:
                members = [mine[number] for number in group["params"]]
                if members:
                    groups[members[0]] = _group_options(group)
                    group_of.update(dict.fromkeys(members, members[0]))
        return {"state": state, "group_of": group_of, "groups": groups}

    def _optimizer_targets(self, current: dict[str, Any], saved_optimizer: dict[str, Any], everything: bool) -> dict[str, Any]:
        parameters = {name: parameter for parameter, name in self._names().items()}
        state = {}
        for name in current["group_of"]:
            have = current["state"].get(name, {})
            saved = saved_optimizer.get("state", {}).get(name, {})
            values = {key: self._optimizer_target(key, value, have.get(key), parameters[name]) for key, value in saved.items()}
            state[name] = values if everything else have | values
        group_of = current["group_of"] | {
            n: k for n, k in saved_optimizer.get("group_of", {}).items() if n in current["group_of"]
        }
        groups = {
            key: {
                option: self._optimizer_target("", value, None, None)
                for option, value in saved_optimizer["groups"][key].items()
            }
            for key in dict.fromkeys(group_of.values())
            if key in saved_optimizer.get("groups", {})
        }
        return {"state": {n: values for n, values in state.items() if values}, "group_of": group_of, "groups": groups}

    def _optimizer_target(self, key: str, saved: Any, existing: Any, parameter: Any) -> Any:
        """Where a value of the optimizer's state is to go: the tensor there, or a new one."""
        import torch

        if isinstance(saved, dict):
            known = existing if isinstance(existing, dict) else {}
            return {k: self._optimizer_target(k, v, known.get(k), parameter) for k, v in saved.items()}
        if not isinstance(saved, Saved):
            return None  # a plain value, taken as it was saved
        tensor = _unwrap(existing)
        if isinstance(tensor, torch.Tensor) and Saved(str(tensor.dtype)[6:], tuple(tensor.shape)) == saved:
            return existing
        made = None if parameter is None else moment_like(key, saved.dtype, saved.shape, parameter)
        return self._with_replica_ranks(empty_leaf("torch", saved.dtype, saved.shape, {}).value if made is None else made)

    def _with_replica_ranks(self, value: Any, is_stored_whole: bool = False) -> Any:
        """A tensor, with those who hold copies of it where neither it nor the rules for plain arrays tell.

        whole: the copies may differ, so that the first rank stores all of its own.
        """
        import torch

        if not isinstance(value, torch.Tensor):
            return value
        auto = isinstance(self._group, str) and self._group == "auto"
        if not hasattr(value, "device_mesh"):
            if auto:
                return value
            return _ReplicatedShard(value, [value], value.shape, [(0,) * value.dim()], _ranks_of(self._group), is_stored_whole)
        from ckpt.state.leaves import dtensor

        ranks = dtensor.replica_ranks(value, range(torch.distributed.get_world_size()) if auto else _ranks_of(self._group))
        parts = [] if ranks is None else dtensor.as_leaf(value).shards() or []
        if ranks is None or not parts:
            return value
        return _ReplicatedShard(
            value, [p.leaf.value for p in parts], value.shape, [p.box.offset for p in parts], ranks, is_stored_whole
        )


class _ReplicatedShard(Shard):
    """A tensor or DTensor of which these ranks, this one among them, hold copies of the part that this one has."""

    def __init__(
        self, tensor: Any, local: list[Any], shape: Sequence[int], offset: list[tuple[int, ...]], ranks: tuple[int, ...],
        is_stored_whole: bool,
    ) -> None:  # fmt: skip
        super().__init__(local, shape, offset, replica=Replica(ranks.index(_rank()), len(ranks), ranks, is_stored_whole))
        self.tensor = tensor


def _unwrap(value: Any) -> Any:
    return value.tensor if isinstance(value, _ReplicatedShard) else value


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _ranks_of(group: Any) -> tuple[int, ...]:
    """The ranks of a process group or device mesh, or this one alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    if group is None:
        return (_rank(),)
    if isinstance(group, DeviceMesh):
        return tuple(sorted(group.mesh.reshape(-1).tolist()))
    if isinstance(group, dist.ProcessGroup):
        return tuple(sorted(dist.get_process_group_ranks(group)))
    raise InvalidArgument(f"ModelState: group={group!r}: give 'auto', None, a torch process group or a device mesh")


def _as_list(optimizer: Any) -> list[Any]:
    return [optimizer] if hasattr(optimizer, "param_groups") else list(optimizer)


def _map_nested(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of nested dicts, lists and tuples with each entry changed."""
    if isinstance(value, dict):
        return {k: _map_nested(v, change) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map_nested(v, change) for v in value)
    return change(value)


def _named_parameters(module: Any) -> Iterator[tuple[str, Any]]:
    """Parameters by the names that they have without DDP, torch.compile and activation checkpointing around them."""
    return _walk_tensors(module, "_parameters", "")


def _named_buffers(module: Any) -> Iterator[tuple[str, Any]]:
    """Buffers by such names."""
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
            "ModelState does not take FullyShardedDataParallel (FSDP1): shard with fully_shard, or save what torch's "
            "get_state_dict gives through ckpt.adapters.dcp.Writer"
        )


def _group_options(group: dict[str, Any]) -> dict[str, Any]:
    return {option: value for option, value in group.items() if option not in _NON_OPTION_KEYS}


def _parameter_names(optimizer: Any, names: dict[Any, str]) -> list[str]:
    """The names of an optimizer's parameters, in the order in which its state_dict numbers them."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if unknown := sum(p not in names for p in parameters):
        raise InvalidArgument(
            f"{unknown} of {len(parameters)} parameters of {type(optimizer).__name__} are none of the model's; make the "
            "optimizer after the model was wrapped or sharded, or give ModelState all its models"
        )
    return [names[p] for p in parameters]


class _SavedParameter(NamedTuple):
    """Where the optimizer's state of a parameter was saved."""

    optimizer: dict[str, dict[str, Node]]
    """The parts of that optimizer (state, group_of, groups) by their keys."""
    name: str
    """Of the parameter, there."""


def _saved_parameters(node: Node, path: str) -> Iterator[tuple[str, _SavedParameter]]:
    """The tensors of every ModelState in a tree that has an optimizer, by their names in the tree."""
    parts = dict(children(node, ""))
    optimizer = {part: dict(children(n, "")) for part, n in children(parts.get("optimizer"), "")}
    if "model" in parts and optimizer.keys() >= {"state", "group_of", "groups"}:
        for name, _ in children(parts["model"], ""):
            yield join_path(join_path(path, "model"), name), _SavedParameter(optimizer, name)
        return
    for name, child in children(node, path):
        yield from _saved_parameters(child, name)


def _optimizer_node(saved_parameters: dict[str, _SavedParameter]) -> Node:
    """The state of an optimizer over these parameters. A group is called by the first of them that is in it."""
    state, group_of = [], []
    groups: dict[tuple[int, str], list[Node]] = {}
    for name, (optimizer, saved) in saved_parameters.items():
        if saved in optimizer["state"]:
            state.append([name, optimizer["state"][saved]])
        if (label := optimizer["group_of"].get(saved)) in optimizer["groups"]:
            groups.setdefault((id(optimizer), label), [name, optimizer["groups"][label]])
            group_of.append([name, groups[id(optimizer), label][0]])
    return {"dict": [["state", {"dict": state}], ["group_of", {"dict": group_of}], ["groups", {"dict": [*groups.values()]}]]}


def _load_optimizer(optimizer: Any, names: dict[Any, str], saved: dict[str, Any]) -> None:
    mine = _parameter_names(optimizer, names)
    packed = optimizer.state_dict()
    state = {number: saved["state"][name] for number, name in enumerate(mine) if name in saved["state"]}
    groups = []
    for group in packed["param_groups"]:
        members = [mine[number] for number in group["params"]]
        keys = dict.fromkeys(saved["group_of"][name] for name in members)
        options = [saved["groups"][key] for key in keys if key in saved["groups"]]
        if any(not _is_equal(options[0], other) for other in options[1:]):
            raise LeafMismatch(
                f"the parameters of one group of {type(optimizer).__name__} ({members[0]} …) were saved with different "
                f"options: {options}; divide them into groups as they were when saved"
            )
        groups.append({**group, **(options[0] if options else {})})
    optimizer.load_state_dict({**packed, "state": state, "param_groups": groups})
    # torch has cast the state to the parameters' type; what was saved is kept, or moments wider than those would be lost.
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, values in state.items():
        now = optimizer.state[parameters[number]]
        now.update({k: v for k, v in values.items() if getattr(v, "dtype", None) != getattr(now.get(k), "dtype", None)})


def _is_equal(a: Any, b: Any) -> bool:
    import torch

    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_equal(a[k], b[k]) for k in a)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return bool(torch.equal(a, b))
    return bool(type(a) is type(b) and a == b)
