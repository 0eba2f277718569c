"""The class TargetMatcher, which matches saved leaves with the arrays of `like`, and checks them first.

Arrays are filled in place. Dicts and lists get the saved plain values in place. Tuples and other immutable objects are replaced
by new ones if something in them changes. The state is also returned, so that an immutable root works.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from ckpt.block_io.read_plan import Target
from ckpt.errors import DAMAGE_ADVICE, FormatError, LeafMismatch, LeafNotFound
from ckpt.format.dtype_text import plain_dtype
from ckpt.format.manifest import Saved, require_whole_leaf
from ckpt.loading.finish_functions import Finish, dataclass_like, fill_scalar, finish_once, tuple_like
from ckpt.loading.mismatch_errors import keys_mismatch, kind_mismatch, naming_leaf, refused_state
from ckpt.state.alias_notes import RANK_ALIAS, AliasNote, read_alias_notes
from ckpt.state.leaves import as_leaf, empty_leaf
from ckpt.state.leaves.base import ArrayLeaf
from ckpt.state.name_mapping import entry_names
from ckpt.state.name_patterns import children, entries, has_fields_of, has_object, select, suggest
from ckpt.state.optimizer_names import add_missing_moments, is_optimizer
from ckpt.state.optimizer_order import ParametersMismatch, modules_in, reorder_state
from ckpt.state.rank_tree import own_ranks
from ckpt.state.stateful import Stateful, as_stateful, get_attribute, method, state_of
from ckpt.state.static_values import is_function, is_plain, static_fields
from ckpt.state.torch_keys import has_named_parameters, mismatched_keys
from ckpt.state.tree import Node, PerRank, flatten, join_path
from ckpt.state.tree_rebuild import TreeError, decode_key, empty_dict, rebuild
from ckpt.storage.base.errors import IntegrityError

log = logging.getLogger("ckpt")


class TargetMatcher:
    """Collects the arrays to fill, and builds the function that returns the state after they are filled."""

    def __init__(
        self,
        saved: Mapping[str, Saved],
        selector: Callable[[str], bool] | None,
        where: str,
        stored_bytes: Callable[[], Mapping[str, float]],
    ) -> None:
        """saved: type and shape of each saved leaf.
        selector: returns whether to load the leaf at a path; other leaves keep their values. None loads all.
        where: the name of the step, for messages.
        stored_bytes: returns the decoded bytes of each leaf by name. No array is made if they do not match its shape.
        """
        self.targets: list[tuple[str, ArrayLeaf]] = []
        """The name of each saved leaf to read, and the array to fill."""
        self.aliases: dict[str, AliasNote] = {}
        """By leaf name, the targets in `like` that were saved as views of shared memory."""
        self.rank_aliases: dict[str, AliasNote] = {}  # the same, on the rank whose values are loaded
        self.own_ranks: dict[str, Sequence[int]] = {}  # by leaf name: the ranks that have saved a value of their own
        self._saved = saved
        self._selector = selector
        self._where = where
        self._stored_bytes = stored_bytes
        self._like: object = None  # the root of `like`
        self._new_arrays: dict[tuple[str, str, str | None], Finish] = {}
        self._filled_targets: dict[tuple[str, Hashable], Finish] = {}

    def read_targets(self) -> list[Target]:
        """Return the targets, with one entry for each local shard of a sharded leaf."""
        found = []
        for name, leaf in self.targets:
            parts = leaf.shards()
            if parts is None:
                found.append(Target(name, leaf, None))
            else:
                found += [Target(name, part.leaf, part.box) for part in parts if part.leaf.nbytes]
        return found

    def rebuild(self, node: Node) -> Finish:
        """Plan to load all of `node` into new arrays; return the function that returns the loaded value. Raises FormatError."""
        try:
            return rebuild(node, self._new_array)
        except TreeError as error:
            raise FormatError(f"{self._where}: {error}") from error

    def _new_array(self, node: Node) -> Finish:
        name = node["array"]
        key = name, node["kind"], node.get("class")
        finish = self._new_arrays.get(key)
        if finish is None:  # a tied leaf is one array at all its paths
            saved = self._lookup(name, name)
            stored_bytes = self._stored_bytes().get(name, 0)
            with naming_leaf(name, self._where):
                require_whole_leaf(saved.dtype, saved.shape, stored_bytes)
                leaf = empty_leaf(node["kind"], saved.dtype, saved.shape, node)
            finish = self._new_arrays[key] = finish_once(leaf, name)
            self.targets.append((name, leaf))
            self.own_ranks[name] = own_ranks(node)
        return finish

    def _lookup(self, name: str, path: str) -> Saved:
        if (saved := self._saved.get(name)) is None:
            raise IntegrityError(f"leaf {path} is in the tree of {self._where} but in none of its manifests; {DAMAGE_ADVICE}")
        return saved

    # --- with like -------------------------------------------------------------------------------------------

    def match(self, like: Any, node: Node, path: str = "") -> Finish | None:
        """Plan to load `node` into `like`; return the function that returns the result, or None if that is `like` itself."""
        if isinstance(node, dict) and "object" in node and as_stateful(like, path) is None:
            node = node["object"]
        if self._like is None:
            self._like = like
        if type(like) is dict:
            return self._dict(like, node, path)
        if (leaf := self._leaf(like, path)) is not None:
            return self._array(leaf, node, path)
        if type(like) is PerRank:
            return self._per_rank(like, node, path)
        if (stateful := as_stateful(like, path)) is not None:
            return self._object(like, stateful, node, path)
        if isinstance(like, dict):
            return self._dict(like, node, path)
        if isinstance(like, list):
            return self._list(like, node, path)
        if isinstance(like, tuple):
            return self._tuple(like, node, path)
        if dataclasses.is_dataclass(like) and not isinstance(like, type):
            return self._dataclass(like, node, path)
        if not self._is_selected(path) or (node is None and is_function(like)):
            return None
        if isinstance(node, dict) and "array" in node and node["kind"] != "bytes" and not self._is_traced_number(like, node):
            raise kind_mismatch(like, node, path, self._where)
        return self.rebuild(node)

    def _is_traced_number(self, like: object, node: Node) -> bool:
        """Return whether a number of `like` was saved as a jax array without axes, as jit returns it, like a step of flax."""
        is_number = isinstance(like, (int, float, complex))
        return is_number and node["kind"] == "jax" and "key" not in node and self._lookup(node["array"], "").shape == ()

    def _per_rank(self, like: PerRank, node: Node, path: str) -> Finish | None:
        finish = self.match(like.value, node, path)
        if finish is None:
            return None

        def load() -> PerRank:
            like.value = finish()
            return like

        return load

    def _is_selected(self, path: str) -> bool:
        return self._selector is None or self._selector(path or "(root)")

    def _leaf(self, value: object, path: str) -> ArrayLeaf | None:
        try:
            return as_leaf(value)
        except TypeError as error:
            raise LeafMismatch(f"leaf {path or '(root)'} of `like` cannot be filled: {error}") from error

    def _dict(self, like: dict[Any, Any], node: Node, path: str) -> Finish | None:
        if not (isinstance(node, dict) and "dict" in node):
            raise kind_mismatch(like, node, path, self._where)
        saved = {decode_key(k): v for k, v in node["dict"]}
        changed: list[tuple[object, Finish]] = []
        for key, value in like.items():
            name = join_path(path, key)
            if key not in saved:
                if self._selector is None or self._has_selected_in_like(value, name):
                    raise LeafNotFound(
                        f"leaf {name} of `like` is not in {self._where}{suggest(str(key), map(str, saved))}; "
                        "take it out of `like`, or map names with rename="
                    )
                continue
            finish = self.match(value, saved[key], name)
            if finish is not None:
                changed.append((key, finish))
        if isinstance(like, (collections.Counter, collections.defaultdict)):  # its keys are data, and the program adds them
            for key, child in saved.items():
                if key not in like and (self._selector is None or self._has_selected_in_node(child, join_path(path, key))):
                    changed.append((key, self.rebuild(child)))

        def finish_dict() -> object:
            for key, finish in changed:
                like[key] = finish()
            return like

        return finish_dict if changed else None

    def _has_selected_in_like(self, value: object, path: str) -> bool:
        if isinstance(value, dict):
            return any(self._has_selected_in_like(v, join_path(path, k)) for k, v in value.items())
        return any(map(self._is_selected, [*entry_names(value, path, in_objects=True)] or [path]))

    def _items(self, like: Sequence[Any], nodes: Sequence[Node], names: Sequence[object], path: str) -> list[Finish | None]:
        if len(nodes) != len(like):
            raise LeafMismatch(
                f"leaf {path or '(root)'}: {self._where} has {len(nodes)} entries, `like` has {len(like)}; give `like` as many "
                "entries as were saved"
            )
        return [self.match(v, n, join_path(path, name)) for v, n, name in zip(like, nodes, names, strict=True)]

    def _list(self, like: list[Any], node: Node, path: str) -> Finish | None:
        if not isinstance(node, list):
            raise kind_mismatch(like, node, path, self._where)
        parts = self._items(like, node, list(range(len(like))), path)

        def finish() -> object:
            for i, part in enumerate(parts):
                if part is not None:
                    like[i] = part()
            return like

        return finish if any(parts) else None

    def _tuple(self, like: tuple[Any, ...], node: Node, path: str) -> Finish | None:
        tag = "namedtuple" if hasattr(like, "_fields") else "tuple"
        if not (isinstance(node, dict) and tag in node):
            raise kind_mismatch(like, node, path, self._where)
        parts = self._items(like, node[tag], list(getattr(like, "_fields", range(len(like)))), path)
        make = lambda: tuple_like(like, [v if p is None else p() for v, p in zip(like, parts, strict=True)])  # noqa: E731
        return make if any(parts) else None

    def _dataclass(self, like: Any, node: Node, path: str) -> Finish | None:
        if not has_fields_of(like, node):
            raise kind_mismatch(like, node, path, self._where)
        static = static_fields(like)
        parts: dict[str, Finish] = {}
        for name, child in zip(node["fields"], node["dataclass"], strict=True):
            match = self._match_static if name in static else self.match
            if (part := match(getattr(like, name), child, join_path(path, name))) is not None:
                parts[name] = part
        return (lambda: dataclass_like(like, parts)) if parts else None

    def _match_static(self, value: object, node: Node, path: str) -> None:
        """Keep a static field of `like`; log a warning if it is another plain value than the saved one."""
        if is_plain(value) and flatten(value).node != node and self._is_selected(path):
            log.warning("leaf %s: `like` has %.80r, unlike %s; it is static, so it stays", path, value, self._where)

    def _array(self, leaf: ArrayLeaf, node: Node, path: str) -> Finish | None:
        if not self._is_selected(path):
            return None
        if not (isinstance(node, dict) and ("array" in node or "scalar" in node)):
            raise kind_mismatch(leaf.value, node, path, self._where)
        saved = self._lookup(node["array"], path) if "array" in node else Saved(plain_dtype(node["dtype"]), ())
        if saved.shape != leaf.shape:
            raise LeafMismatch(
                f"leaf {path or '(root)'}: {self._where} has shape {list(saved.shape)}, `like` has {list(leaf.shape)}; "
                "make `like` with the saved shape"
            )
        if saved.dtype != leaf.dtype:
            raise LeafMismatch(
                f"leaf {path or '(root)'}: {self._where} has dtype {saved.dtype}, `like` has {leaf.dtype}; "
                "load into the saved dtype and convert afterwards"
            )
        if "key" in node and (own := leaf.attributes().get("key", node["key"])) != node["key"]:
            raise LeafMismatch(
                f"leaf {path or '(root)'}: {self._where} has a key of {node['key']}, `like` has one of {own}; make the key of "
                "`like` with the saved generator: jax.random.key(0, impl=…)"
            )
        try:
            target = leaf.target()
        except TypeError as error:
            raise LeafMismatch(f"leaf {path or '(root)'} of `like` cannot be filled: {error}") from error
        if "scalar" in node:
            return fill_scalar(target, node)
        if "own" in node:
            self.own_ranks[node["array"]] = own_ranks(node)
        if "alias" in node or RANK_ALIAS in node:
            read_alias_notes(node, self.aliases, self.rank_aliases)
        if target is leaf:
            self.targets.append((node["array"], target))
            return None
        identity = leaf.identity()
        finish = None if identity is None else self._filled_targets.get((node["array"], identity))
        if finish is None:  # leaves tied in both the step and `like` are one target
            finish = finish_once(target, path or "(root)")
            self.targets.append((node["array"], target))
            if identity is not None:
                self._filled_targets[node["array"], identity] = finish
        return finish

    def _object(self, like: Any, stateful: Stateful, node: Node, path: str) -> Finish:
        """Plan to load into an object: fill the arrays of its state in place, make the missing ones, and call its setter.

        An object with `state_dict_like(saved, everything)` returns the state to fill, which may be a part of the saved state.
        It gets an outline of the saved state, with a `Saved` for each array.
        """
        state = node["object"] if isinstance(node, dict) and "object" in node else node
        if callable(shape := stateful.like or method(like, "state_dict_like")):
            try:
                target = shape(self._saved_outline(state, path), self._selector is None)
            except (TypeError, ValueError) as error:
                raise LeafMismatch(f"leaf {path or '(root)'} of `like` cannot be filled: {error}") from error
            finish = self._dict(target, state, path) or (lambda: target)
        else:
            current = state_of(stateful, like, path)
            if has_named_parameters(like):
                self._check_module_keys(like, current, state, path)
            if is_optimizer(like):
                state = self._reorder_optimizer_state(like, node, state, path)
                current = add_missing_moments(like, current, self._saved_outline(state, path))
            finish = self._merge(current, state, path)

        def load() -> object:
            try:
                made = stateful.set(finish())
            except Exception as error:
                raise refused_state(like, path, self._where, error) from error
            return made if stateful.replaces else like

        return load

    def _reorder_optimizer_state(self, optimizer: object, node: Node, state: Node, path: str) -> Node:
        """Return the saved state of an optimizer, renumbered in the order of its parameters in `like`."""
        kind = type(optimizer).__name__
        try:
            found = reorder_state(optimizer, list(modules_in(self._like)), node, state)
        except ParametersMismatch as error:
            message = f"leaf {path or '(root)'}: the {kind} of `like` does not fit {self._where}: {error}"
            raise LeafMismatch(message) from error
        if found is None:
            return state
        log.warning(
            "leaf %s: the parameters of the %s of `like` are in another order than in %s; their state follows their names",
            path or "(root)", kind, self._where,
        )  # fmt: skip
        return found

    def _check_module_keys(self, module: object, current: object, node: Node, path: str) -> None:
        """Raise LeafMismatch if the module would refuse the keys of the saved state."""
        if not (isinstance(node, dict) and "dict" in node and isinstance(current, dict)):
            return
        saved = {decode_key(key): child for key, child in node["dict"]}
        loaded_keys = {key for key, child in saved.items() if self._has_selected_in_node(child, join_path(path, key))}
        if self._selector is not None:
            loaded_keys |= current.keys()
        missing, unknown = mismatched_keys(module, current.keys(), loaded_keys)
        if missing or unknown:
            raise keys_mismatch(module, missing, unknown, path, self._where)

    def _saved_outline(self, node: Node, path: str) -> Any:
        """Return the part of the saved state that is loaded, with a `Saved` in place of each array."""
        if self._selector is not None:
            node = select(node, lambda name: self._is_selected(join_path(path, name)))
        return rebuild(node, lambda array: lambda: self._lookup(array["array"], path))()

    def _merge(self, current: object, node: Node, path: str) -> Finish:
        """Plan as `match` does, but with the saved structure: a new optimizer has no moments yet, and gets them."""
        if isinstance(node, dict) and "object" in node and (stateful := as_stateful(current, path)) is not None:
            return self._object(current, stateful, node, path)
        if isinstance(node, dict) and "dict" in node and isinstance(current, dict):
            parts = []
            for key, child in node["dict"]:
                key = decode_key(key)
                name = join_path(path, key)
                if key in current:
                    parts.append((key, self._merge(current[key], child, name)))
                elif self._selector is None or self._has_selected_in_node(child, name):
                    parts.append((key, self.rebuild(child)))
            extra = {} if self._selector is None else dict(current)
            metadata = get_attribute(current, "_metadata")

            def finish_dict() -> object:
                made = empty_dict(node)
                made.update(extra)
                made.update({key: part() for key, part in parts})
                if "metadata" in node:
                    made._metadata = rebuild(node["metadata"], self._new_array)()
                elif metadata is not None and hasattr(made, "__dict__"):
                    made._metadata = metadata
                return made

            return finish_dict
        if isinstance(node, list) and isinstance(current, list) and len(node) == len(current):
            parts_list = [self._merge(c, n, join_path(path, i)) for i, (c, n) in enumerate(zip(current, node, strict=True))]
            return lambda: [part() for part in parts_list]
        if self._selector is not None and not self._has_selected_in_node(node, path):
            return lambda: current.value if type(current) is PerRank else current
        if (self._selector is not None or has_object(node)) and (finish := self._merge_fields(current, node, path)):
            return finish
        leaf = self._leaf(current, path)
        if leaf is not None and isinstance(node, dict) and "array" in node:
            return self._array(leaf, node, path) or (lambda: current)
        return self.rebuild(node) if self._is_selected(path) else lambda: current

    def _merge_fields(self, current: object, node: Node, path: str) -> Finish | None:
        """Plan to merge into the value of PerRank, a tuple or a dataclass; return None if `node` does not fit it."""
        if type(current) is PerRank:
            return self._merge(current.value, node, path)
        if not has_fields_of(current, node):
            return None
        if not isinstance(current, tuple):
            return self._dataclass(current, node, path) or (lambda: current)
        parts = [self._merge(value, child, name) for value, (name, child) in zip(current, children(node, path), strict=True)]
        return lambda: tuple_like(current, [part() for part in parts])

    def _has_selected_in_node(self, node: Node, path: str) -> bool:
        return any(self._is_selected(name) for name, _ in entries(node, path))
