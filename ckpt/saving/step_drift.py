"""Detects ranks that no longer save the same moment, by a number that was equal on all and now differs.

The parts of a step are matched by how many saves each rank has made. A rank that has left out a save looks like a slow one.
Only the values in its state show the difference.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from ckpt.state.tree import Node

log = logging.getLogger("ckpt")

NodePath = tuple[str | int, ...]
"""The tags, keys and list positions from the root of a tree to a node."""

_NESTING_TAGS = ("tuple", "namedtuple", "dataclass", "object")
_MAX_ITEMS = 64
"""Longer lists of numbers are skipped: they are not step counters, but for example the state of a random generator."""


class DriftDetector:
    """Compares the numbers in the trees of the steps of one session.

    The committing threads of rank 0 use it without a lock. If two saves commit at the same time, it may repeat a warning.
    """

    def __init__(self) -> None:
        self._differing_paths: set[NodePath] = set()
        self._has_warned = False

    def check(self, step: int, tree: Node, read_previous: Callable[[], tuple[int, Node] | None]) -> None:
        """Warn, once, of a number that differs between the ranks in this step and was equal in the previous one.

        tree: the tree of this step for all ranks.
        read_previous: returns number and tree of the previous step; called only if another number differs than before.
        """
        try:
            self._check(step, tree, read_previous)
        except Exception as error:  # the check only warns, so its errors must not fail the save
            log.debug("can't check whether the ranks save the same moment: %r", error)

    def _check(self, step: int, tree: Node, read_previous: Callable[[], tuple[int, Node] | None]) -> None:
        if self._has_warned:
            return
        values_by_path = dict(differing_numbers(tree))
        new, self._differing_paths = values_by_path.keys() - self._differing_paths, set(values_by_path)
        if not new:
            return
        if (earlier := read_previous()) is None:
            return
        number, old = earlier
        if any(is_integer(value_at(old, path)) and value_at(old, path) != value for path, value in common_numbers(tree)):
            return  # another counter is still equal on all ranks, so these numbers differ for another reason
        for path in sorted(new, key=str):
            if is_integer(was := value_at(old, path)):
                self._has_warned = True
                shown = "; ".join(f"{value} on rank {rank}" for rank, value in list(values_by_path[path].items())[:4])
                log.warning(
                    "step %d: %s was the same on all ranks in step %d (%s), and is not now (%s): check whether a rank has left "
                    "out a save; give each step its number (step=), or end the job",
                    step, path_text(path), number, was, shown,
                )  # fmt: skip
                return


def is_integer(node: Node) -> bool:
    """Return whether a node is a whole number, which may count steps."""
    return type(node) is int


def differing_numbers(node: Node) -> Iterator[tuple[NodePath, dict[str, int]]]:
    """Yield the path of each number that differs between ranks, and its value on each rank."""
    for path, value in numbers(node):
        if isinstance(value, dict) and all(map(is_integer, value.values())) and len(set(value.values())) > 1:
            yield path, value


def common_numbers(node: Node) -> Iterator[tuple[NodePath, int]]:
    """Yield the path and the value of each number that is equal on all ranks."""
    return ((path, value) for path, value in numbers(node) if is_integer(value))


def numbers(node: Node, path: NodePath = ()) -> Iterator[tuple[NodePath, Node]]:
    """Yield the path of each number and its value, and of each value that differs by rank, with a dict of it by rank."""
    if is_integer(node):
        yield path, node
    elif isinstance(node, list):
        for i, item in enumerate(node if len(node) <= _MAX_ITEMS else ()):
            yield from numbers(item, (*path, i))
    elif isinstance(node, dict) and "ranks" in node:
        yield path, node["ranks"]
    elif isinstance(node, dict):
        for tag, inner in node.items():
            if tag == "dict":
                for key, value in inner:
                    yield from numbers(value, (*path, tag, str(key)))
            elif tag in _NESTING_TAGS:
                yield from numbers(inner, (*path, tag))


def value_at(node: Node, path: NodePath) -> Node:
    """Return the node at a path, or None if there is none."""
    for part in path:
        if isinstance(part, int):
            node = node[part] if isinstance(node, list) and part < len(node) else None
        elif isinstance(node, dict):
            node = node.get(part)
        elif isinstance(node, list):  # the entries of a dict
            node = next((entry[1] for entry in node if isinstance(entry, list) and str(entry[0]) == part), None)
        else:
            return None
    return node


def path_text(path: NodePath) -> str:
    """Return a path as the name of a leaf, without the tags."""
    return ".".join(str(part) for part in path if part not in ("dict", *_NESTING_TAGS))
