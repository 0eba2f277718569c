"""Flatten a state into a JSON tree and named leaves; `tree_rebuild` builds the state from them.

The tree consists of *nodes*. JSON null, booleans, strings, small integers and finite floats stand for themselves; a JSON list
is a list; a JSON object has one tag that names its type (docs/reference/format.md lists the tags).
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import json
import re
import struct
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from ckpt.errors import MORE_MEMORY_ADVICE, StagingFailed, UnsupportedLeaf
from ckpt.state.alias_notes import AliasNote, add_alias_notes, find_alias_notes
from ckpt.state.dtype_names import dtype_name
from ckpt.state.extra_attributes import require_plain_array, require_plain_container
from ckpt.state.leaves import as_leaf
from ckpt.state.leaves.base import ArrayLeaf
from ckpt.state.leaves.numpy import BytesLeaf, NumpyScalarLeaf
from ckpt.state.module_leaves import ModuleLeaves
from ckpt.state.optimizer_names import is_optimizer, names_by_path
from ckpt.state.stateful import Stateful, as_stateful, get_attribute, is_random_generator, state_of
from ckpt.state.static_values import is_function, keeps_functions, refusal, replacement_advice, static_fields
from ckpt.state.torch_keys import has_named_parameters, module_entries
from ckpt.storage.base.errors import first_line, is_transient

Node = Any
INLINE_BYTES = 64 << 10
"""A longer bytes object becomes a leaf, since JSON would need all of it in memory as base64. In a group each rank stores its
own."""

RANK_SUFFIX = re.compile(r"@\d+$")  # the suffix of a leaf that one rank alone has; a path that ends like it needs another name
_SAFE_INTEGER = 1 << 53  # other JSON readers round larger integers
_DECIMAL_BITS = 2048  # fits in 640 digits, the lowest limit that Python can have for conversions between int and decimal text
FACTORIES: dict[str, Callable[[], object]] = {
    "int": int, "float": float, "list": list, "dict": dict, "set": set, "str": str, "bool": bool, "tuple": tuple,
    "Counter": collections.Counter, "OrderedDict": collections.OrderedDict,
}  # fmt: skip
"""The factories of a defaultdict that can be stored, by their stored names."""


@dataclasses.dataclass(frozen=True, slots=True)
class FlatState:
    """A flattened state: its tree, and its leaves by name in the order of the tree."""

    node: Node
    leaves: dict[str, ArrayLeaf]
    per_rank: set[str] = dataclasses.field(default_factory=set)
    """Names of leaves that belong to this rank alone; other ranks may have other values under the same path."""
    buffers: set[str] = dataclasses.field(default_factory=set)
    """Names of leaves that are buffers of a torch module. Buffers may differ between ranks."""
    frozen: set[str] = dataclasses.field(default_factory=set)
    """Names of leaves that are parameters without requires_grad. Training does not change them."""
    aliases: Mapping[str, AliasNote] = dataclasses.field(default_factory=dict)
    """By leaf name: the arrays that share memory with others."""


class PerRank:
    """Mark a value of a state that each rank has for itself: `{"reader": ckpt.PerRank(reader)}`.

    Each rank stores its own value, and loads the value of the rank with its number, modulo the number of ranks that saved.
    Arrays that differ between ranks need PerRank, because arrays of one name count as copies of one array. Plain values and
    random generators need no PerRank: each rank's own is stored anyway.

    value: anything that a state may contain: arrays, containers, plain values, objects with state_dict().
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


def flatten(state: Any, rank: int | None = None) -> FlatState:
    """Return the tree and the leaves of a state.

    rank: the rank of this process in its group; None if the process saves alone.

    Raises UnsupportedLeaf with the path of a value that cannot be stored, and StagingFailed where memory for a copy is missing.
    """
    try:
        return _Flattener(rank).run(state)
    except RecursionError:
        raise UnsupportedLeaf("the state is nested too deeply: use lists instead of chains of objects") from None


def encode_tree(node: Node, layouts: Sequence[str] = ()) -> bytes:
    """Return the content of the tree file. layouts: the values of `ArrayLeaf.layout` with which ranks load their own values."""
    body = {"format": 1, "tree": node, **({"layouts": list(layouts)} if layouts else {})}
    return json.dumps(body, separators=(",", ":")).encode()


def join_path(path: str, key: object) -> str:
    """Return the path of the entry `key` below `path`: the keys joined by dots."""
    return f"{path}.{key}" if path else str(key)


class _Flattener:
    def __init__(self, rank: int | None = None) -> None:
        self.leaves: dict[str, ArrayLeaf] = {}
        self._rank = rank
        self._current_per_rank: set[str] | None = None  # `_per_rank` while a value of this rank alone is flattened, else None
        self._per_rank: set[str] = set()
        self._of_modules = ModuleLeaves()
        self._modules: list[tuple[str, Any]] = []
        self._optimizers: list[tuple[Any, Node]] = []
        self._name_of_identity: dict[Hashable, str] = {}
        self._name_at_address: dict[int, str] = {}  # the first leaf at each address
        self._addresses: list[int | None] = []  # one for each leaf, in the order of `leaves`
        self._open_function_containers = 0  # the number of open containers in which functions count as static
        self._open_containers: set[int] = set()  # ids of the containers around the current value: finds a state in itself

    def run(self, state: Any) -> FlatState:
        node = self.node(state, "")
        if notes := find_alias_notes(self.leaves, self._addresses, self._rank):
            add_alias_notes(node, notes)
        for optimizer, described in self._optimizers:
            if self._modules and (names := names_by_path(optimizer, self._modules)) is not None:
                described["parameters"] = names
        found = self._of_modules
        return FlatState(node, self.leaves, self._per_rank, found.buffers, found.frozen, notes)

    def node(self, value: Any, path: str) -> Node:
        kind = type(value)
        if kind is dict:
            return self._container(value, path, self._dict)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            is_safe = -_SAFE_INTEGER < value < _SAFE_INTEGER
            return value if is_safe else {"int": str(value) if value.bit_length() <= _DECIMAL_BITS else hex(value)}
        if kind is float:
            return value if value - value == 0 else {"float": struct.pack(">d", value).hex()}
        try:
            leaf = as_leaf(value)
            if leaf is not None:
                leaf.require_data()
        except TypeError as error:
            raise UnsupportedLeaf(f"leaf {path or '(root)'}: {error}") from error
        except MemoryError as error:
            why = first_line(error)
            raise StagingFailed(f"leaf {path or '(root)'}: no memory to copy it ({why}): {MORE_MEMORY_ADVICE}") from error
        if leaf is not None:
            require_plain_array(value, path)
            if self._rank is not None and type(leaf) is NumpyScalarLeaf:
                return self._scalar(leaf, path)
            return self._array(leaf, path)
        return self._other_value(value, kind, path)

    def _other_value(self, value: Any, kind: type, path: str) -> Node:
        if kind is list:
            return self._container(value, path, self._list)
        if isinstance(value, tuple):
            return self._container(value, path, self._tuple)
        if kind is bytes or kind is bytearray:
            if len(value) > INLINE_BYTES:
                if self._can_differ_by_rank():
                    return self._per_rank_node(value, path)
                return self._array(BytesLeaf(np.frombuffer(value, np.uint8), kind), path)
            return {"bytes": base64.b64encode(value).decode(), **({"type": "bytearray"} if kind is bytearray else {})}
        if kind is complex:
            return {"complex": struct.pack(">dd", value.real, value.imag).hex()}
        if kind in (set, frozenset):
            items = sorted(value, key=lambda item: _require_repr(item, path))
            return {kind.__name__: [self.node(item, join_path(path, "{}")) for item in items]}
        if kind is PerRank:
            return self._per_rank_node(value.value, path)
        if (stateful := as_stateful(value, path)) is not None:
            if self._can_differ_by_rank() and is_random_generator(value):
                return self._per_rank_node(value, path)
            return self._container(value, path, lambda _, p: self._object(stateful, value, p))
        if isinstance(value, dict):
            return self._container(value, path, self._dict)
        if isinstance(value, list):
            return self._container(value, path, self._list)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._container(value, path, self._dataclass)
        if self._open_function_containers and is_function(value):
            return None
        raise refusal(value, path)

    def _can_differ_by_rank(self) -> bool:
        """Return whether other ranks may have another value under this path."""
        return self._rank is not None and self._current_per_rank is None

    def _per_rank_node(self, value: Any, path: str) -> Node:
        """Return the node of a value that this rank alone has; names of its arrays end with the rank."""
        if self._current_per_rank is not None:
            return self.node(value, path)
        self._current_per_rank = self._per_rank
        outer = self._name_of_identity, self._name_at_address
        # No ties to the arrays outside: on other ranks the value may contain other arrays.
        self._name_of_identity, self._name_at_address = {}, {}
        try:
            return {"ranks": {str(self._rank or 0): self.node(value, path)}}
        finally:
            self._current_per_rank = None
            self._name_of_identity, self._name_at_address = outer

    def _container(self, value: Any, path: str, encode: Callable[[Any, str], Node]) -> Node:
        if id(value) in self._open_containers:
            raise UnsupportedLeaf(f"leaf {path}: the state contains itself here: leave this one out")
        self._open_containers.add(id(value))
        try:
            return encode(value, path)
        finally:
            self._open_containers.discard(id(value))

    def _dict(self, value: dict[Any, Any], path: str) -> Node:
        prefix = path + "." if path else ""
        node: dict[str, Node] = {
            "dict": [
                [k, self.node(v, prefix + k)] if type(k) is str else [encode_key(k, path), self.node(v, f"{prefix}{k}")]
                for k, v in value.items()
            ]
        }
        kind = type(value)
        if kind is not dict:
            for known in (collections.OrderedDict, collections.Counter, collections.defaultdict):
                if isinstance(value, known):
                    node["type"] = known.__name__
            metadata = _torch_metadata(value)
            stored = value if metadata is None else {**value, "_metadata": metadata}
            require_plain_container(value, path, stored)
            if isinstance(value, collections.defaultdict) and value.default_factory is not None:
                node["factory"] = _factory_name(value.default_factory, path)
            if metadata is not None:
                node["metadata"] = self.node(metadata, join_path(path, "_metadata"))
        return node

    def _list(self, value: list[Any], path: str) -> Node:
        if type(value) is not list:
            require_plain_container(value, path, {})
        return [self.node(item, join_path(path, i)) for i, item in enumerate(value)]

    def _tuple(self, value: tuple[Any, ...], path: str) -> Node:
        fields = getattr(value, "_fields", None)
        if type(value) is not tuple:
            require_plain_container(value, path, {})
        names = fields if fields is not None else range(len(value))
        items = [self.node(item, join_path(path, name)) for name, item in zip(names, value, strict=True)]
        if fields is not None:
            return {"namedtuple": items, "class": type_name(type(value)), "fields": list(fields)}
        return {"tuple": items}

    def _dataclass(self, value: Any, path: str) -> Node:
        values = {f.name: self._field(value, f.name, path) for f in dataclasses.fields(value)}
        if replacement_advice(value) is not None:
            raise refusal(value, path)
        require_plain_container(value, path, values)
        static, keeps = static_fields(value), keeps_functions(value)
        self._open_function_containers += keeps
        nodes = [
            (self._static_value if name in static else self.node)(item, join_path(path, name)) for name, item in values.items()
        ]
        self._open_function_containers -= keeps
        return {"dataclass": nodes, "class": type_name(type(value)), "fields": list(values)}

    def _static_value(self, value: Any, path: str) -> Node:
        """Return the node of a static field: null for a value that cannot be stored, since a load keeps that of `like`."""
        try:
            _Flattener(self._rank).node(value, path)
        except UnsupportedLeaf:
            return None
        return self.node(value, path)

    def _field(self, value: object, name: str, path: str) -> Any:
        try:
            return getattr(value, name)
        except Exception as error:
            if is_transient(error):
                raise
            raise UnsupportedLeaf(
                f"leaf {join_path(path, name)}: this field of a {type_name(type(value))} cannot be read "
                f"({type(error).__name__}: {first_line(error)}): set it before the save"
            ) from error

    def _object(self, stateful: Stateful, value: Any, path: str) -> Node:
        is_module = has_named_parameters(value)
        with self._of_modules.inside(module_entries(value), path, is_module):
            node = {"object": self.node(state_of(stateful, value, path), path), "class": type_name(type(value))}
        if is_module:
            self._modules.append((path, value))
        elif is_optimizer(value):
            self._optimizers.append((value, node))
        return node

    def _scalar(self, leaf: NumpyScalarLeaf, path: str) -> Node:
        """Return the node of a numpy scalar in a group: a plain value, since an array would count as a copy of other ranks'."""
        if leaf.nbytes <= INLINE_BYTES:
            return {"scalar": base64.b64encode(leaf.array.tobytes()).decode(), "dtype": leaf.dtype}
        return self._per_rank_node(leaf.value, path) if self._can_differ_by_rank() else self._array(leaf, path)

    def _array(self, leaf: ArrayLeaf, path: str) -> Node:
        address, identity, name = leaf.address(), None, None
        if leaf.nbytes and (address is None or address in self._name_at_address):
            identity = self._identity(leaf, address)
            name = self._name_of_identity.get(identity) if identity is not None else None
        if name is None:
            name = path or "(root)"
            if self._current_per_rank is not None:
                name += f"@{self._rank or 0}"
            elif "@" in name and RANK_SUFFIX.search(name):
                name += "~"
            if not name.isascii():
                _require_utf8(name)
            while name in self.leaves:  # two entries have the same path, as in {"a.b": x, "a": {"b": y}}
                name += "~"
            self.leaves[name] = leaf
            self._addresses.append(address)
            if self._current_per_rank is not None:
                self._current_per_rank.add(name)
            if identity is not None:
                self._name_of_identity[identity] = name
            elif address is not None:
                self._name_at_address[address] = name
        self._of_modules.add(name, path)
        node: dict[str, Node] = {"array": name, "kind": leaf.kind}
        if attributes := leaf.attributes():
            node.update(attributes)
            if "parameter" in attributes:
                self._of_modules.add_parameter(name, is_trained="requires_grad" in attributes)
        return node

    def _identity(self, leaf: ArrayLeaf, address: int | None) -> Hashable | None:
        """Return the identity of a leaf that may be the same array as an earlier leaf.

        The identity of the first leaf at an address is computed only now, when a second leaf has the same address.
        """
        if address is not None:
            first = self._name_at_address[address]
            self._name_of_identity.setdefault(self.leaves[first].identity(), first)
        return leaf.identity()


def _require_utf8(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UnsupportedLeaf(f"leaf {name!r}: its name can't be encoded as UTF-8; rename the key") from None


def encode_key(key: object, path: str) -> Node:
    """Return a dict key as JSON: a string as it is, another plain value in a list of one item. Raises UnsupportedLeaf."""
    if type(key) is str:
        return key
    if type(key) is np.str_:
        array = np.asarray(key)  # of an empty text, it has one character, and `key.dtype` none
        return [{"scalar": base64.b64encode(array.tobytes()).decode(), "dtype": dtype_name(array.dtype)}]
    if key is None or type(key) in (bool, int, float, bytes, tuple):
        _require_repr(key, path)  # the key becomes part of leaf names
        flat = _Flattener()
        node = flat.node(key, path)
        if not flat.leaves:
            return [node]
    raise UnsupportedLeaf(
        f"leaf {path or '(root)'}: a dict key of type {type_name(type(key))} cannot be stored; use a str, int or tuple, "
        "or the value or name of an enum"
    )


def _torch_metadata(value: dict[Any, Any]) -> dict[Any, Any] | None:
    """Return the versions that a torch module adds to its state_dict, None if there are none."""
    found = get_attribute(value, "_metadata")
    return found if isinstance(found, dict) else None


def _factory_name(factory: Callable[[], object], path: str) -> str:
    """Return the stored name of the factory of a defaultdict; raise UnsupportedLeaf for one that has none."""
    for name, known in FACTORIES.items():
        if factory is known:
            return name
    raise UnsupportedLeaf(
        f"leaf {path or '(root)'}: the factory of this defaultdict is code, which is not stored; use one of "
        f"{', '.join(FACTORIES)}, or store a plain dict"
    )


def _require_repr(value: object, path: str) -> str:
    try:
        return repr(value)
    except ValueError as error:  # an integer beyond Python's limit for decimal digits
        where = f"leaf {path or '(root)'}"
        raise UnsupportedLeaf(f"{where}: an integer this long cannot be a dict key or in a set: store it as text") from error


def type_name(kind: type) -> str:
    """Return the name under which a step stores a type: its module and its qualified name."""
    return f"{kind.__module__}:{kind.__qualname__}"
