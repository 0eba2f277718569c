"""Renumber the saved state of an optimizer whose parameters now have another order, by parameter name."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from ckpt.errors import MAX_NAMED_LEAVES
from ckpt.state.optimizer_names import NamedModules, ParameterNames, groups_of, names_by_group, parameter_names
from ckpt.state.torch_keys import has_named_parameters
from ckpt.state.tree import Node, PerRank, encode_key, join_path
from ckpt.state.tree_rebuild import decode_key
from ckpt.storage.base.plural import first_few


def modules_in(state: object, path: str = "", above: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the modules in the containers of a state, each with its path.

    above: the ids of the containers around this one.
    """
    if has_named_parameters(state):
        yield path, state
        return
    if id(state) in above:  # the state contains itself, which flatten() refuses
        return
    below: Iterable[tuple[object, object]] = ()
    if isinstance(state, PerRank):
        yield from modules_in(state.value, path, (*above, id(state)))
    elif isinstance(state, dict):
        below = state.items()
    elif isinstance(state, list):
        below = enumerate(state)
    elif isinstance(state, tuple):
        below = zip(getattr(state, "_fields", range(len(state))), state, strict=True)
    elif dataclasses.is_dataclass(state) and not isinstance(state, type):
        below = ((field.name, getattr(state, field.name)) for field in dataclasses.fields(state))
    for key, value in below:
        yield from modules_in(value, join_path(path, key), (*above, id(state)))


class ParametersMismatch(Exception):
    """The state of an optimizer was saved for other parameters than it has now. The message names them."""


def new_numbers(saved: ParameterNames, current: ParameterNames) -> list[int] | None:
    """Return the current number of the parameter with each saved number; None where none changes or names are unknown.

    Raises ParametersMismatch if only some parameters are the same.
    """
    for old, new in zip(saved, current, strict=True):
        if not old or not new or len(old) != len(new) or len(set(old)) < len(old) or len(set(new)) < len(new):
            continue
        if old == new:
            return None
        if common := set(old) & set(new):
            if len(common) < len(old):
                raise ParametersMismatch(
                    f"it was saved for {_first_few_sorted(set(old) - common)}, for which `like` has "
                    f"{_first_few_sorted(set(new) - common)}; construct it with "
                    "the saved parameters"
                )
            numbers = {name: number for number, name in enumerate(new)}
            return [numbers[name] for name in old]
    return None


def new_groups(saved: Sequence[Collection[int]], current: Sequence[Collection[int]]) -> list[int]:
    """Return, for each current parameter group, the index of the saved group with the same parameters.

    saved, current: for each group its parameters, by their current numbers.

    Raises ParametersMismatch if a current group has no equal saved one.
    """
    found = []
    known = {frozenset(members): number for number, members in enumerate(saved)}
    for number, members in enumerate(current):
        if frozenset(members) not in known:
            raise ParametersMismatch(
                f"the parameters of its group {number} were saved in other groups, whose options differ; group them as they "
                "were saved, or save and load it in a ckpt.adapters.torch.ModelState, which uses names"
            )
        found.append(known[frozenset(members)])
    return found


def _first_few_sorted(names: Collection[str]) -> str:
    return first_few(sorted(names), MAX_NAMED_LEAVES)


# --- the saved state as a node ---------------------------------------------------------------------------------


def reorder_state(optimizer: Any, modules: NamedModules, node: Node, state: Node) -> Node | None:
    """Return the saved state with the current numbers of an optimizer's parameters; None if no number changes.

    node: the saved node of the optimizer, with the names of its parameters.
    state: the node of its `state_dict()`, a part of `node`.

    Raises ParametersMismatch if the parameters or their groups are others than those saved.
    """
    groups = _parameter_groups(state)
    if not groups:
        return None
    by_path = node.get("parameters") if isinstance(node, dict) and "object" in node else None
    if not isinstance(by_path, list) or not all(isinstance(name, str) for name in by_path):
        by_path = None
    by_group = names_by_group([{"param_names": _dict_value(group, "param_names")} for group in groups])
    count = sum(len(_dict_value(group, "params")) for group in groups)
    saved = ParameterNames(*(names if names and len(names) == count else None for names in (by_path, by_group)))
    numbers = new_numbers(saved, parameter_names(optimizer, modules))
    return None if numbers is None else _renumber(state, groups, numbers, groups_of(optimizer))


def _parameter_groups(state: Node) -> list[Node]:
    """Return the parameter groups of a saved state; none unless their parameters are 0, 1, 2 …, as torch numbers them."""
    groups = _dict_value(state, "param_groups") if isinstance(state, dict) and "dict" in state else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) and "dict" in group for group in groups):
        return []
    members = [_dict_value(group, "params") for group in groups]
    if not all(isinstance(numbers, list) and all(type(n) is int for n in numbers) for numbers in members):
        return []
    every = [n for numbers in members for n in numbers]
    return groups if every == list(range(len(every))) else []


def _dict_value(node: Node, key: str) -> Node:
    return next((child for name, child in node["dict"] if name == key), None)


def _replace_values(node: Node, changed: dict[str, Node]) -> Node:
    """Return a dict node with the values of some keys replaced."""
    return {**node, "dict": [[k, changed[k] if isinstance(k, str) and k in changed else v] for k, v in node["dict"]]}


def _renumber(state: Node, groups: list[Node], numbers: list[int], current: Sequence[dict[str, Any]]) -> Node:
    saved = [[numbers[n] for n in _dict_value(group, "params")] for group in groups]
    now: list[range] = []
    for group in current:
        first = now[-1].stop if now else 0
        now.append(range(first, first + len(group["params"])))
    chosen = []
    for which, members in zip(new_groups(saved, now), now, strict=True):
        names = _dict_value(groups[which], "param_names")
        position_of = {number: index for index, number in enumerate(saved[which])}
        order = [position_of[number] for number in members]
        changed: dict[str, Node] = {"params": list(members), "param_names": names}
        if isinstance(names, list) and len(names) == len(order):
            changed["param_names"] = [names[index] for index in order]
        chosen.append(_replace_values(groups[which], changed))
    entries = _dict_value(state, "state")
    if isinstance(entries, dict) and "dict" in entries:
        entries = {**entries, "dict": [[_new_key(key, numbers), child] for key, child in entries["dict"]]}
    return _replace_values(state, {"param_groups": chosen, "state": entries})


def _new_key(key: Node, numbers: list[int]) -> Node:
    number = decode_key(key)
    return encode_key(numbers[number], "") if type(number) is int and 0 <= number < len(numbers) else key
