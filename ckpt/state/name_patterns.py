"""Select leaves by name with shell patterns, reduce a tree to them, and suggest similar names."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ckpt.errors import LeafNotFound
from ckpt.state.tree import Node, join_path
from ckpt.state.tree_rebuild import decode_key

Patterns = str | Iterable[str]


def matcher(patterns: Patterns) -> Callable[[str], bool]:
    """Return a function that tests a name against shell patterns.

    `*` also matches dots. A pattern that matches a container also matches everything below it.
    """
    if isinstance(patterns, str):
        patterns = [patterns]
    joined = "|".join(f"{fnmatch.translate(p)}|{fnmatch.translate(p + '.*')}" for p in patterns)
    match = re.compile(joined or r"(?!)").match
    return lambda name: match(name) is not None


def children(node: Node, path: str) -> list[tuple[str, Node]]:
    """Return the items of a container node, each with its path; an empty list for a leaf."""
    if isinstance(node, list):
        return [(join_path(path, i), n) for i, n in enumerate(node)]
    if not isinstance(node, dict):
        return []
    if "dict" in node:
        return [(join_path(path, decode_key(k)), n) for k, n in node["dict"]]
    if "tuple" in node:
        return [(join_path(path, i), n) for i, n in enumerate(node["tuple"])]
    for tag in ("namedtuple", "dataclass"):
        if tag in node:
            return [(join_path(path, f), n) for f, n in zip(node["fields"], node[tag], strict=True)]
    if "object" in node:
        return children(node["object"], path) or [(path, node["object"])]
    return []


def entries(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """Yield every array and plain value of a tree, with its path."""
    below = children(node, path)
    for name, child in below:
        yield from entries(child, name)
    if not below:
        yield path or "(root)", node


def has_object(node: Node) -> bool:
    """Return whether a node is, or contains, an object with a state, which arrays and plain values alone can't replace."""
    return (isinstance(node, dict) and "object" in node) or any(has_object(child) for _, child in children(node, ""))


def has_fields_of(value: object, node: Node) -> bool:
    """Return whether a node is a tuple or dataclass with the same fields as `value`."""
    if isinstance(value, tuple):
        tag = "namedtuple" if hasattr(value, "_fields") else "tuple"
        return isinstance(node, dict) and tag in node and len(node[tag]) == len(value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type) or not (isinstance(node, dict) and "dataclass" in node):
        return False
    return bool(node["fields"] == [field.name for field in dataclasses.fields(value)])


def parts_with_arrays(tree: Node) -> list[str]:
    """Return the names of the entries at the root that are containers of arrays."""
    return [
        name
        for name, node in children(tree, "")
        if children(node, name) and any(isinstance(n, dict) and "array" in n for _, n in entries(node, name))
    ]


def select(node: Node, selector: Callable[[str], bool]) -> Node:
    """Return the tree with only the selected leaves.

    Dicts lose the other entries; sequences keep their length and have None for the others.
    """
    kept = _select(node, "", selector)
    return None if kept is _NOTHING else kept


_NOTHING = object()


def _select(node: Node, path: str, selector: Callable[[str], bool]) -> Any:
    below = children(node, path)
    if not below:
        return node if selector(path or "(root)") else _NOTHING
    if isinstance(node, dict) and "object" in node:
        return _select(node["object"], path, selector)
    kept = [_select(child, name, selector) for name, child in below]
    if all(k is _NOTHING for k in kept):
        return _NOTHING
    if isinstance(node, list):
        return [None if k is _NOTHING else k for k in kept]
    if "dict" in node:
        pairs = [[key, k] for (key, _), k in zip(node["dict"], kept, strict=True) if k is not _NOTHING]
        return {**node, "dict": pairs}
    tag = next(t for t in ("tuple", "namedtuple", "dataclass") if t in node)
    return {**node, tag: [None if k is _NOTHING else k for k in kept]}


def require_match(names: Iterable[str], patterns: Patterns, where: str) -> None:
    """Raise LeafNotFound for the first pattern that matches no name."""
    names = list(names)
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if not any(map(matcher(pattern), names)):
            raise LeafNotFound(f"no leaf of {where} matches {pattern!r}{suggest(pattern, names)}")


def suggest(name: str, names: Iterable[str]) -> str:
    """Return a hint for the end of a message: names similar to `name`, else the first of all names."""
    known = list(names)[:100_000]
    if close := difflib.get_close_matches(name, known, 3, 0.5):
        return f"; close to it: {', '.join(close)}"
    return f"; there are {', '.join(known[:3])}{' …' if len(known) > 3 else ''}" if known else ""
