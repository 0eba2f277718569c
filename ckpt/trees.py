"""One tree of many: what the ranks of a group say of the state, merged by the committer and told apart again by a load.

Where all ranks say the same it stands once. Dicts are united, so that stages of a pipeline may hold different leaves.
Values that differ are kept for each rank, as the node {"ranks": {"0": …, "1": …}}.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ckpt.tree import Node

Told = list[tuple[Sequence[int], Node]]
"""Each different node, with the ranks that told it."""


def merge_trees(told: Told) -> Node:
    """One node for all ranks. Depends only on what each rank told, in the order of the ranks."""
    first = told[0][1]
    if all(node == first and _same_types(node, first) for _, node in told[1:]):
        return first
    if all(isinstance(node, list) for _, node in told):
        if len({len(node) for _, node in told}) == 1:
            return _each(told, lambda node: node)
    elif all(isinstance(node, dict) for _, node in told):
        if all("ranks" in node for _, node in told):
            return {"ranks": {rank: node for _, told_node in told for rank, node in told_node["ranks"].items()}}
        if len({node.get("array") for _, node in told}) == 1 and "array" in first:
            return first  # one array; that one rank needs its gradient and another does not is no difference of the state
        if all("dict" in node for _, node in told):
            return {**first, "dict": _dict(told)}
        if "object" in first and all(node.get("class") == first.get("class") for _, node in told):
            return {**first, "object": merge_trees([(ranks, node["object"]) for ranks, node in told])}
        for tag in ("tuple", "namedtuple", "dataclass"):
            if len({_shape(node, tag) for _, node in told}) == 1 and tag in first:
                return {**first, tag: _each(told, lambda node, tag=tag: node[tag])}
    return {"ranks": {str(rank): node for ranks, node in told for rank in ranks}}


def _each(told: Told, items: Any) -> list[Node]:
    count = len(items(told[0][1]))
    return [merge_trees([(ranks, items(node)[i]) for ranks, node in told]) for i in range(count)]


def _shape(node: Node, tag: str) -> str:
    """Equal for two nodes of this tag whose items stand for the same things."""
    if tag not in node:
        return ""
    return json.dumps([len(node[tag]), node.get("class"), node.get("fields")])


def _dict(told: Told) -> list[list[Node]]:
    entries: dict[str, tuple[Node, Told]] = {}
    for ranks, node in told:
        for key, value in node["dict"]:
            entries.setdefault(json.dumps(key), (key, []))[1].append((ranks, value))
    return [[key, merge_trees(values)] for key, values in entries.values()]


def _same_types(a: Node, b: Node) -> bool:
    """Python takes 1, 1.0 and True for equal; a state does not."""
    return json.dumps(a) == json.dumps(b)


def resolve(node: Node, rank: int, world_size: int) -> Node:
    """The tree as this rank sees it. A rank beyond those that saved takes the values of rank modulo their number."""
    if isinstance(node, list):
        return [resolve(n, rank, world_size) for n in node]
    if not isinstance(node, dict):
        return node
    if "ranks" in node:
        known = node["ranks"]
        chosen = known.get(str(rank % world_size))
        if chosen is None and str(rank % world_size) not in known:
            chosen = known[min(known, key=int)]
        return resolve(chosen, rank, world_size)
    found = {}
    for tag, value in node.items():
        if tag == "dict":
            value = [[key, resolve(v, rank, world_size)] for key, v in value]
        elif tag in ("tuple", "namedtuple", "dataclass", "object", "set", "frozenset", "metadata"):
            value = resolve(value, rank, world_size)
        found[tag] = value
    return found


def differs_by_rank(data: bytes) -> bool:
    """Whether a tree file may hold such a node: a look at its bytes, so that most trees are taken as they are."""
    return b'"ranks":' in data
