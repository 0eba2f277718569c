"""The state of torch optimizers by parameter name: reading, renaming and loading it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ckpt.errors import LeafMismatch
from ckpt.state.name_patterns import children
from ckpt.state.optimizer_load import load_optimizer_state
from ckpt.state.tree import Node, join_path
from ckpt.storage.base.errors import InvalidArgument

_NON_OPTION_KEYS = ("params", "param_names")


def group_options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group, which are all its entries but the parameters and their names."""
    return {option: value for option, value in group.items() if option not in _NON_OPTION_KEYS}


def ordered_parameter_names(optimizer: Any, names: dict[Any, str]) -> list[str]:
    """Return the names of the parameters of an optimizer, in the order of their numbers in its state_dict."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if unknown := sum(p not in names for p in parameters):
        raise InvalidArgument(
            f"{unknown} of {len(parameters)} parameters of {type(optimizer).__name__} are none of the model's; create the "
            "optimizer after wrapping or sharding the model, or give ModelState all models"
        )
    return [names[p] for p in parameters]


class SavedParameter(NamedTuple):
    """The saved optimizer state of one parameter."""

    optimizer: dict[str, dict[str, Node]]
    """The parts of the saved optimizer (state, group_of, groups), each by its keys."""
    name: str
    """The name of the parameter in these parts."""


def saved_parameter_states(node: Node, path: str) -> Iterator[tuple[str, SavedParameter]]:
    """Yield the name in the tree and the optimizer state of each tensor of every ModelState that has an optimizer."""
    parts = dict(children(node, ""))
    optimizer = {part: dict(children(n, "")) for part, n in children(parts.get("optimizer"), "")}
    if "model" in parts and optimizer.keys() >= {"state", "group_of", "groups"}:
        for name, _ in children(parts["model"], ""):
            yield join_path(join_path(path, "model"), name), SavedParameter(optimizer, name)
        return
    for name, child in children(node, path):
        yield from saved_parameter_states(child, name)


def optimizer_node(saved_parameters: dict[str, SavedParameter]) -> Node:
    """Return the tree of an optimizer over these parameters. The name of a group is that of its first parameter."""
    state, group_of = [], []
    groups: dict[tuple[int, str], list[Node]] = {}
    for name, (optimizer, saved) in saved_parameters.items():
        if saved in optimizer["state"]:
            state.append([name, optimizer["state"][saved]])
        if (label := optimizer["group_of"].get(saved)) in optimizer["groups"]:
            groups.setdefault((id(optimizer), label), [name, optimizer["groups"][label]])
            group_of.append([name, groups[id(optimizer), label][0]])
    return {"dict": [["state", {"dict": state}], ["group_of", {"dict": group_of}], ["groups", {"dict": [*groups.values()]}]]}


def load_optimizer(optimizer: Any, names: dict[Any, str], saved: dict[str, Any]) -> None:
    """Load the saved state of the parameters of one optimizer. names: the name of each parameter in the model."""
    mine = ordered_parameter_names(optimizer, names)
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
    load_optimizer_state(optimizer, optimizer.load_state_dict, {**packed, "state": state, "param_groups": groups})


def _is_equal(a: object, b: object) -> bool:
    import torch

    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_equal(a[k], b[k]) for k in a)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return bool(torch.equal(a, b))
    return bool(type(a) is type(b) and a == b)
