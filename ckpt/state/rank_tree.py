"""Merge the trees of all ranks of a group into one, and resolve the merged tree for one rank.

The committer merges, a load resolves. A node that is equal on all ranks is stored once. Dicts are united, so that stages of a
pipeline may have different leaves. Where values differ, each rank's is stored: the node {"ranks": {"0": …, "1": …}}.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from ckpt.errors import StepRefused
from ckpt.state.alias_notes import RANK_ALIAS, differing_aliases
from ckpt.state.tree import Node

RankNodes = list[tuple[Sequence[int], Node]]
"""Each different node, with the ranks that reported it."""


def merge_trees(rank_nodes: RankNodes) -> Node:
    """Return one node for all ranks. It depends only on what each rank reported, in the order of the ranks."""
    first = rank_nodes[0][1]
    if all(node == first and _has_same_types(node, first) for _, node in rank_nodes[1:]):
        return first
    if all(isinstance(node, list) for _, node in rank_nodes):
        if len({len(node) for _, node in rank_nodes}) == 1:
            return _merge_items(rank_nodes, lambda node: node)
    elif all(isinstance(node, dict) for _, node in rank_nodes):
        if all("ranks" in node for _, node in rank_nodes):
            return {"ranks": {rank: node for _, rank_node in rank_nodes for rank, node in rank_node["ranks"].items()}}
        if len({node.get("array") for _, node in rank_nodes}) == 1 and "array" in first:
            # One array: ranks may differ in requires_grad, which does not make the state differ.
            aliases = {rank: node.get("alias") for ranks, node in rank_nodes for rank in ranks}
            differing = differing_aliases(first.get("alias"), aliases)
            return {**first, "aliases": differing} if differing else first
        if all("dict" in node for _, node in rank_nodes):
            return {**first, "dict": _merge_dicts(rank_nodes)}
        if "object" in first and all(node.get("class") == first.get("class") for _, node in rank_nodes):
            common = {tag: value for tag, value in first.items() if all(node.get(tag) == value for _, node in rank_nodes)}
            return {**common, "object": merge_trees([(ranks, node["object"]) for ranks, node in rank_nodes])}
        for tag in ("tuple", "namedtuple", "dataclass"):
            if len({_structure_key(node, tag) for _, node in rank_nodes}) == 1 and tag in first:
                return {**first, tag: _merge_items(rank_nodes, operator.itemgetter(tag))}
    return {"ranks": {str(rank): node for ranks, node in rank_nodes for rank in ranks}}


def _merge_items(rank_nodes: RankNodes, items: Callable[[Node], list[Node]]) -> list[Node]:
    count = len(items(rank_nodes[0][1]))
    return [merge_trees([(ranks, items(node)[i]) for ranks, node in rank_nodes]) for i in range(count)]


def _structure_key(node: Node, tag: str) -> str:
    """Return a key that is equal for two nodes of this tag whose items correspond to each other."""
    if tag not in node:
        return ""
    return json.dumps([len(node[tag]), node.get("class"), node.get("fields")])


def _merge_dicts(rank_nodes: RankNodes) -> list[list[Node]]:
    entries: dict[str, tuple[Node, RankNodes]] = {}
    for ranks, node in rank_nodes:
        for key, value in node["dict"]:
            entries.setdefault(json.dumps(key), (key, []))[1].append((ranks, value))
    return [[key, merge_trees(values)] for key, values in entries.values()]


def _has_same_types(a: Node, b: Node) -> bool:
    """Return whether two equal nodes have the same types too: in Python 1, 1.0 and True are equal, in a state they differ."""
    return json.dumps(a) == json.dumps(b)


def keep_stored_arrays(node: Node, stored: Collection[str]) -> Node:
    """Return the tree with names of stored arrays only; raise StepRefused for an array of which no rank stored anything.

    A rank with empty shards may use another name for one of several tied leaves than the other ranks; the stored name wins.
    """
    if isinstance(node, list):
        return [keep_stored_arrays(n, stored) for n in node]
    if not isinstance(node, dict):
        return node
    if "ranks" in node:
        arrays = [n for n in node["ranks"].values() if isinstance(n, dict) and "array" in n]
        stored_nodes = {n["array"]: n for n in arrays if n["array"] in stored}
        if len(arrays) == len(node["ranks"]) and len(stored_nodes) == 1 and any(n["array"] not in stored for n in arrays):
            return next(iter(stored_nodes.values()))
        return {"ranks": {rank: keep_stored_arrays(n, stored) for rank, n in node["ranks"].items()}}
    if "array" in node and node["array"] not in stored:
        raise StepRefused(
            f"leaf {node['array']}: no rank stored any of it; some rank must have each of its elements, and where a "
            "Shard has replica=(i, n), a rank must save each i"
        )
    return {tag: _keep_stored_in(tag, value, stored) for tag, value in node.items()}


def _keep_stored_in(tag: str, value: Node, stored: Collection[str]) -> Node:
    if tag == "dict":
        return [[key, keep_stored_arrays(v, stored)] for key, v in value]
    return keep_stored_arrays(value, stored) if tag in _TAGS_WITH_NODES else value


_TAGS_WITH_NODES = ("tuple", "namedtuple", "dataclass", "object", "set", "frozenset", "metadata")


def resolve_for_rank(node: Node, rank: int, world_size: int) -> Node:
    """Return the tree with the values of one rank where ranks differ.

    A rank beyond those that saved gets the values of the rank `rank` modulo `world_size`, the number of ranks that saved.
    """
    if isinstance(node, list):
        return [resolve_for_rank(n, rank, world_size) for n in node]
    if not isinstance(node, dict):
        return node
    if "ranks" in node:
        by_rank = node["ranks"]
        chosen = by_rank.get(str(rank % world_size))
        if chosen is None and str(rank % world_size) not in by_rank:
            chosen = by_rank[min(by_rank, key=int)]
        return resolve_for_rank(chosen, rank, world_size)
    found = {}
    for tag, value in node.items():
        if tag == "dict":
            value = [[key, resolve_for_rank(v, rank, world_size)] for key, v in value]
        elif tag in _TAGS_WITH_NODES:
            value = resolve_for_rank(value, rank, world_size)
        found[tag] = value
    aliases = node.get("aliases")
    if isinstance(aliases, dict) and str(rank % world_size) in aliases:
        found[RANK_ALIAS] = aliases[str(rank % world_size)]
    return found


def own_name(name: str, rank: int) -> str:
    """Return the name of the value that a rank has of an array of which each rank may have its own."""
    return f"{name}@{rank}"


def own_ranks(node: Node) -> Sequence[int]:
    """Return the ranks that have a value of their own of the array of a node (`own_name`)."""
    ranks = node.get("own", ())
    return [rank for rank in ranks if type(rank) is int] if isinstance(ranks, list) else ()


def add_own_ranks(node: Node, ranks: Mapping[str, Sequence[int]]) -> Node:
    """Return a tree in which nodes of arrays list the ranks with a value of their own. ranks: these ranks by array."""
    if not ranks:
        return node
    if isinstance(node, list):
        return [add_own_ranks(item, ranks) for item in node]
    if not isinstance(node, dict):
        return node
    if "array" in node:
        return {**node, "own": list(ranks[node["array"]])} if node["array"] in ranks else node
    found = {}
    for tag, value in node.items():
        if tag == "dict":
            value = [[key, add_own_ranks(item, ranks)] for key, item in value]
        elif tag == "ranks":
            value = {rank: add_own_ranks(item, ranks) for rank, item in value.items()}
        elif tag in _TAGS_WITH_NODES:
            value = add_own_ranks(value, ranks)
        found[tag] = value
    return found


def array_names(tree: Node) -> Iterator[str]:
    """Yield the name of each array of a tree, for all ranks.

    A loop rather than recursion, since a damaged file may be nested to any depth.
    """
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending += node
        elif isinstance(node, dict):
            if isinstance(node.get("array"), str):
                yield node["array"]
                yield from (own_name(node["array"], rank) for rank in own_ranks(node))
            pending += node.values()


def has_rank_nodes(data: bytes) -> bool:
    """Return whether a tree file may contain a node {"ranks": …}, from its bytes alone; most trees need no resolving."""
    return b'"ranks":' in data
