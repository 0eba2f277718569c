"""Ranks that no longer save the same moment: a number that all had in common, such as a step, and that differs now.

Parts of a step belong together by how often each rank has saved. One that has left out a save can't be told from one that is
slow, but by what it says itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from ckpt.state.tree import Node

log = logging.getLogger("ckpt")

NodePath = tuple[Any, ...]
"""Tags, keys and numbers that lead to a node."""

_NESTING_TAGS = ("tuple", "namedtuple", "dataclass", "object")
_MAX_ITEMS = 64
"""A longer list of numbers is no place for a step: the state of a random generator, for one."""


class DriftDetector:
    """What the ranks of a session say, step by step."""

    def __init__(self) -> None:
        self._differing_paths: set[NodePath] = set()
        self._has_warned = False

    def check(self, step: int, tree: Node, read_previous: Callable[[], tuple[int, Node] | None]) -> None:
        """Warn, once, of a number that differs between the ranks in the tree of a step, and did not in the step before.

        before: the number and tree of that; asked only where something differs anew.
        """
        try:
            self._check(step, tree, read_previous)
        except Exception as error:  # it only warns: nothing that it meets may be what a save fails for
            log.debug("whether the ranks save the same moment is not known: %r", error)

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
            return  # something that counts on is still the same on all: these differ for a reason of their own
        for path in sorted(new, key=str):
            if is_integer(was := value_at(old, path)):
                self._has_warned = True
                shown = "; ".join(f"{value} on rank {rank}" for rank, value in list(values_by_path[path].items())[:4])
                log.warning(
                    "step %d: %s was the same on all ranks in step %d (%s), and is not now (%s): see whether one of them has "
                    "left out a save, for then it saves other moments than the others; name the steps (step=), or end this job",
                    step, path_text(path), number, was, shown,
                )  # fmt: skip
                return


def is_integer(node: Node) -> bool:
    """Whether it may count something."""
    return type(node) is int


def differing_numbers(node: Node) -> Iterator[tuple[NodePath, dict[str, int]]]:
    """The numbers that differ between ranks: where they are, and what each rank has."""
    for path, value in numbers(node):
        if isinstance(value, dict) and all(map(is_integer, value.values())) and len(set(value.values())) > 1:
            yield path, value


def common_numbers(node: Node) -> Iterator[tuple[NodePath, int]]:
    """The numbers that are the same on all ranks."""
    return ((path, value) for path, value in numbers(node) if is_integer(value))


def numbers(node: Node, path: NodePath = ()) -> Iterator[tuple[NodePath, Any]]:
    """Where a number is, or something that each rank has of its own: that, or a dict of what each rank has."""
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
    """What is there; None where nothing is."""
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
    """As a user would say it."""
    return ".".join(str(part) for part in path if part not in ("dict", *_NESTING_TAGS))
