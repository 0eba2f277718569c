"""One tree of many: what the ranks of a group say of the state, merged by the committer and told apart again by a load.

Where all ranks say the same it stands once. Dicts are united, so that stages of a pipeline may hold different leaves.
Values that differ are kept for each rank, as the node {"ranks": {"0": …, "1": …}}.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from ckpt.storage.errors import StepRefused
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
            common = {tag: value for tag, value in first.items() if all(node.get(tag) == value for _, node in told)}
            return {**common, "object": merge_trees([(ranks, node["object"]) for ranks, node in told])}
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


def settle(node: Node, stored: Collection[str]) -> Node:
    """The tree with arrays that were stored; raise StepRefused for one that nobody stored any of.

    Of leaves that are tied, a rank may know one by another name than the others, where its own shards are empty.
    """
    if isinstance(node, list):
        return [settle(n, stored) for n in node]
    if not isinstance(node, dict):
        return node
    if "ranks" in node:
        arrays = [n for n in node["ranks"].values() if isinstance(n, dict) and "array" in n]
        known = {n["array"]: n for n in arrays if n["array"] in stored}
        if len(arrays) == len(node["ranks"]) and len(known) == 1 and any(n["array"] not in stored for n in arrays):
            return next(iter(known.values()))
        return {"ranks": {rank: settle(n, stored) for rank, n in node["ranks"].items()}}
    if "array" in node and node["array"] not in stored:
        raise StepRefused(
            f"leaf {node['array']}: no rank stored any of it; one must hold each of its elements, and where a "
            "Shard says replica=(i, n), a rank must bring each i"
        )
    return {tag: _settled(tag, value, stored) for tag, value in node.items()}


def _settled(tag: str, value: Any, stored: Collection[str]) -> Any:
    if tag == "dict":
        return [[key, settle(v, stored)] for key, v in value]
    return settle(value, stored) if tag in _WITH_NODES else value


_WITH_NODES = ("tuple", "namedtuple", "dataclass", "object", "set", "frozenset", "metadata")


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
        elif tag in _WITH_NODES:
            value = resolve(value, rank, world_size)
        found[tag] = value
    return found


def array_names(tree: Node) -> Iterator[str]:
    """The name of each array of a tree, of all ranks. A loop and no recursion: a file may be nested to any depth."""
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, list):
            left += node
        elif isinstance(node, dict):
            if isinstance(node.get("array"), str):
                yield node["array"]
            left += node.values()


def differs_by_rank(data: bytes) -> bool:
    """Whether a tree file may hold such a node: a look at its bytes, so that most trees are taken as they are."""
    return b'"ranks":' in data
