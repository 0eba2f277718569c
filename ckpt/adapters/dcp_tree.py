"""The state tree of a step, made of the entries into which DCP splits a state, and split into them again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckpt.state.tree import Node
from ckpt.state.tree_rebuild import decode_key

KeyPath = tuple[str | int, ...]
"""The keys and list positions from the root to an entry. Its name is their text joined by dots."""


def nested_tree(entries: Mapping[KeyPath, Node], all_paths: Iterable[KeyPath]) -> Node:
    """Return the tree of entries at these paths. A list becomes a dict by position if this rank lacks some of its entries."""
    lengths: dict[KeyPath, int] = {}
    for path in all_paths:
        for i, key in enumerate(path):
            if isinstance(key, int):
                lengths[path[:i]] = max(lengths.get(path[:i], 0), key + 1)

    def build(at: KeyPath, below: list[tuple[KeyPath, Node]]) -> Node:
        if len(below) == 1 and below[0][0] == at:
            return below[0][1]
        parts: dict[str | int, list[tuple[KeyPath, Node]]] = {}
        for path, node in below:
            parts.setdefault(path[len(at)], []).append((path, node))
        if at in lengths and sorted(parts, key=str) == sorted(range(lengths[at]), key=str):
            return [build((*at, i), parts[i]) for i in range(lengths[at])]
        pairs = [[key if isinstance(key, str) else [key], build((*at, key), inner)] for key, inner in parts.items()]
        return {"dict": pairs}

    return build((), list(entries.items())) if entries else {"dict": []}


def dcp_entries(node: Node, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
    """Yield the entries of a tree as DCP splits a state: at dicts, and at lists that contain tensors or dicts."""
    if isinstance(node, dict) and "object" in node:
        yield from dcp_entries(node["object"], path)
    elif isinstance(node, dict) and "dict" in node:
        for key, child in node["dict"]:
            yield from dcp_entries(child, (*path, str(decode_key(key))))
    elif isinstance(node, list) and _has_tensor_or_dict(node):
        for i, child in enumerate(node):
            yield from dcp_entries(child, (*path, i))
    else:
        yield path, node


def _has_tensor_or_dict(nodes: Sequence[Node]) -> bool:
    return any(
        _has_tensor_or_dict(n) if isinstance(n, list) else isinstance(n, dict) and (is_tensor(n) or "dict" in n) for n in nodes
    )


def is_tensor(node: Node) -> bool:
    """Return whether a node of a state tree is an array that DCP takes as a tensor."""
    return isinstance(node, dict) and node.get("kind") in ("torch", "jax", "numpy")
