"""Rename a saved tree to the names of `like`, so that the rest of a load needs no renaming."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ckpt.errors import LeafMismatch, LeafNotFound
from ckpt.state.leaves import as_leaf
from ckpt.state.name_patterns import children, suggest
from ckpt.state.optimizer_order import modules_in
from ckpt.state.stateful import as_stateful, state_of
from ckpt.state.torch_keys import bare_name, is_module
from ckpt.state.tree import Node, PerRank, encode_key, join_path, type_name
from ckpt.storage.base.errors import InvalidArgument

Rename = Callable[[str], str] | Mapping[str, str]
"""Maps names in `like` to saved names: a function, or regular expressions with their replacements."""


def rename_tree(tree: Node, like: Any, rename: Rename, selector: Callable[[str], bool] | None, where: str) -> Node:
    """Return a tree with the structure of `like` whose nodes are those saved under the renamed names.

    If all entries of an object were saved under one other path, the whole saved object is returned for it, so that a new
    optimizer also gets moments for which it has no entry yet. A module gets only the entries that it has.

    selector: which entries to load, by name in `like`; None for all.
    where: the repository and step, for messages.

    Raises LeafNotFound if `tree` lacks an entry that `selector` selects.
    """
    return _Renamer(tree, like, as_rename_function(rename), selector, where).node(like, "")


def as_rename_function(rename: Rename) -> Callable[[str], str]:
    """Return a renaming as a function; patterns are applied one after the other."""
    if callable(rename):
        return functools.partial(_call_rename, rename)
    patterns = [(re.compile(pattern), replacement) for pattern, replacement in rename.items()]

    def apply(name: str) -> str:
        for pattern, replacement in patterns:
            name = pattern.sub(replacement, name)
        return name

    return apply


def _call_rename(rename: Callable[[str], str], name: str) -> str:
    found = rename(name)
    if not isinstance(found, str):
        raise InvalidArgument(f"rename={rename!r} returned {found!r} for {name}: a function must return a name for each")
    return found


class _Renamer:
    def __init__(
        self, tree: Node, like: Any, rename: Callable[[str], str], selector: Callable[[str], bool] | None, where: str
    ) -> None:
        self._tree = tree
        self._like = like
        self._saved = dict(_walk_nodes(tree, ""))
        self._rename = rename
        self._selector = selector
        self._where = where

    def node(self, like: Any, path: str) -> Node:
        if type(like) is PerRank:
            return self.node(like.value, path)
        if _is_object(like, path):
            return self._object(like, path)
        if (below := _children_of(like)) is None or _is_leaf(like, path):
            return self._saved_entry(path)
        parts = [(key, self.node(value, join_path(path, key))) for key, value in below]
        if isinstance(like, dict):
            return {"dict": [[encode_key(key, path), part] for key, part in parts]}
        nodes = [part for _, part in parts]
        if isinstance(like, list):
            return nodes
        if isinstance(like, tuple) and not hasattr(like, "_fields"):
            return {"tuple": nodes}
        tag = "namedtuple" if isinstance(like, tuple) else "dataclass"
        return {tag: nodes, "class": type_name(type(like)), "fields": [key for key, _ in parts]}

    def _saved_entry(self, path: str) -> Node:
        name = self._rename(path or "(root)")
        if name in self._saved:
            return self._saved[name]
        if self._selector is not None and not self._selector(path or "(root)"):
            return None
        names = [saved for saved in self._saved if saved != "(root)"] or self._saved
        raise LeafNotFound(
            f"leaf {path} of `like`, renamed to {name}, is not in {self._where}{suggest(name, names)}; change rename"
        )

    def _object(self, like: Any, path: str) -> Node:
        stateful = as_stateful(like, path)
        assert stateful is not None
        state = state_of(stateful, like, path)
        if not is_module(like) and (saved_path := self._saved_path(state, path)) in self._saved:
            return self._rename_parameters(self._saved[saved_path])
        if hasattr(type(like), "renamed"):
            state_node = like.renamed(
                self._tree,
                lambda name: self._rename(join_path(path, name)),
                lambda v, name: self.node(v, join_path(path, name)),
            )
        else:
            state_node = self.node(state, path)
        return {"object": state_node}

    def _rename_parameters(self, node: Node) -> Node:
        """Return the node with the parameter names of `like`, if it is an optimizer that was saved with parameter names."""
        if not isinstance(node, dict) or not isinstance(node.get("parameters"), list):
            return node
        found = {}
        for path, module in modules_in(self._like):
            for name, _ in module.named_parameters(remove_duplicate=False):
                name = bare_name(join_path(path, name))
                found[self._rename(name)] = name
        return {**node, "parameters": [found.get(name) for name in node["parameters"]]}

    def _saved_path(self, state: object, path: str) -> str | None:
        """Return the path under which all entries of an object's state were saved; None if there is no such path."""
        saved_paths = set()
        for inner in entry_names(state, ""):
            name = self._rename(join_path(path, inner))
            if name == inner:
                saved_paths.add("(root)")
            elif name.endswith("." + inner):
                saved_paths.add(name[: -len(inner) - 1])
            else:
                return None
            if len(saved_paths) > 1:
                return None
        return next(iter(saved_paths), None)


def _walk_nodes(node: Node, path: str) -> Iterator[tuple[str, Node]]:
    """Yield every node of a tree, containers too, with its path."""
    yield path or "(root)", node
    for name, child in children(node, path):
        yield from _walk_nodes(child, name)


def entry_names(like: object, path: str, in_objects: bool = False) -> Iterator[str]:
    """Yield the names of the entries of a state; nothing for a state that is itself an array or plain value.

    in_objects: whether to yield the names of the entries of each object's state, too, and not only the name of the object.
    """
    like = like.value if type(like) is PerRank else like
    if in_objects and _is_object(like, path) and (stateful := as_stateful(like, path)) is not None:
        yield from entry_names(state_of(stateful, like, path), path, in_objects)
        return
    below = None if _is_leaf(like, path) or _is_object(like, path) else _children_of(like)
    if below is None:
        if path:
            yield path
        return
    for key, value in below:
        yield from entry_names(value, join_path(path, key), in_objects)


def _children_of(like: object) -> list[tuple[Any, Any]] | None:
    """Return the items of a container with their keys; None for a value that is not a container."""
    if isinstance(like, dict):
        return list(like.items())
    if isinstance(like, list):
        return list(enumerate(like))
    if isinstance(like, tuple):
        return list(zip(getattr(like, "_fields", range(len(like))), like, strict=True))
    if dataclasses.is_dataclass(like) and not isinstance(like, type):
        return [(f.name, getattr(like, f.name)) for f in dataclasses.fields(like)]
    return None


def _is_leaf(value: object, path: str) -> bool:
    try:
        return as_leaf(value) is not None
    except TypeError as error:
        raise LeafMismatch(f"leaf {path or '(root)'} of `like` cannot be filled: {error}") from error


def _is_object(value: object, path: str) -> bool:
    return type(value) is not dict and as_stateful(value, path) is not None and not _is_leaf(value, path)
