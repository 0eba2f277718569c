"""Rebuild a state from its tree and its filled arrays.

Nothing is unpickled, and no code that a file names is run. A class is used only if this process has imported it and it has the
fields that were saved; otherwise a new plain class of the same name replaces it.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import inspect
import struct
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np

from ckpt.errors import DAMAGE_ADVICE, FormatError
from ckpt.state.dtype_names import numpy_dtype
from ckpt.state.leaves.numpy import scalar_of
from ckpt.state.tree import FACTORIES, Node

namedtuple_type: Callable[..., Any] = collections.namedtuple  # the field names come from a file, so no static type fits

MakeArray = Callable[[Node], Callable[[], Any]]
"""From an array node to a function that returns the array; the function is called after the data was read."""


class TreeError(FormatError):
    """This version cannot read the tree of a step. The message does not name the step: the caller adds it."""


@contextmanager
def refusing_deep_trees(where: str) -> Iterator[None]:
    """Turn a RecursionError into FormatError: the call comes from deeper in the stack than the save. where: the step's name."""
    try:
        yield
    except RecursionError as error:
        raise FormatError(
            f"{where} is nested too deeply for the stack of this call; raise sys.setrecursionlimit, and load it again"
        ) from error


def rebuild(node: Node, make_array: MakeArray) -> Callable[[], Any]:
    """Return a function that builds the state of `node`; call it after every array was filled.

    Raises FormatError for a node of an unknown kind.
    """
    if type(node) is dict and "array" in node:  # most nodes by far
        return make_array(node)
    if node is None or isinstance(node, (bool, str, int, float)):
        return lambda: node
    if isinstance(node, list):
        return _sequence(node, make_array, list)
    if not isinstance(node, dict):
        raise TreeError(f"the tree file has an entry that is not a node: {str(node)[:80]}; {DAMAGE_ADVICE}")
    for tag, build in _BUILDERS.items():
        if tag in node:
            return build(node, make_array)
    raise TreeError(
        f"the tree file has a node of an unknown kind ({', '.join(node)}): install a newer ckpt-store, which may know it"
    )


def _sequence(nodes: list[Node], make_array: MakeArray, build: Callable[[list[Any]], Any]) -> Callable[[], Any]:
    parts = [rebuild(n, make_array) for n in nodes]
    return lambda: build([part() for part in parts])


def _rebuild_dict(node: Node, make_array: MakeArray) -> Callable[[], Any]:
    entries = [(decode_key(k), rebuild(v, make_array)) for k, v in node["dict"]]
    metadata = rebuild(node["metadata"], make_array) if "metadata" in node else None

    def finish() -> Any:
        made = empty_dict(node)
        for key, part in entries:
            made[key] = part()
        if metadata is not None:
            made._metadata = metadata()
        return made

    return finish


def empty_dict(node: Node) -> Any:
    """Return an empty dict of the type that a dict node names."""
    kind = node.get("type")
    if kind == "OrderedDict":
        return collections.OrderedDict()
    if kind == "Counter":
        return collections.Counter()
    if kind == "defaultdict":
        return collections.defaultdict(FACTORIES.get(node.get("factory")))
    return {}


def decode_key(key: Node) -> Any:
    """Return the dict key from the JSON that `encode_key` made."""
    if isinstance(key, str):
        return key
    return rebuild(key[0], _no_array)()


def _no_array(node: Node) -> NoReturn:
    raise TreeError(f"the tree file has an array where a plain value belongs; {DAMAGE_ADVICE}")


def _rebuild_namedtuple(node: Node, make_array: MakeArray) -> Callable[[], Any]:
    fields = tuple(node["fields"])
    found: Any = _find_imported(node["class"])
    own_fields = _attribute_of(found, "_fields")
    if found is None or not issubclass(found, tuple) or type(own_fields) is not tuple or own_fields != fields:
        found = namedtuple_type(_short_class_name(node["class"]), fields, rename=True)
    return _sequence(node["namedtuple"], make_array, lambda values: tuple.__new__(found, values))


def _rebuild_dataclass(node: Node, make_array: MakeArray) -> Callable[[], Any]:
    fields = node["fields"]
    found: Any = _find_imported(node["class"])
    if found is None or _dataclass_fields(found) != fields:
        found = dataclasses.make_dataclass(_short_class_name(node["class"]), fields)

    def build(values: list[Any]) -> Any:
        made = object.__new__(found)  # not the constructor: a file must not decide which code runs
        for name, value in zip(fields, values, strict=True):
            object.__setattr__(made, name, value)
        return made

    return _sequence(node["dataclass"], make_array, build)


def _short_class_name(name: str) -> str:
    short = name.rpartition(":")[2].rpartition(".")[2]
    return short if short.isidentifier() else "Saved"


def _find_imported(name: str) -> type | None:
    """Return the class of this name if its module is already imported, else None.

    No code runs for it: no import of a module that a file names, also not by `__getattr__` of a module, and no descriptor.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = _attribute_of(found, part)
    return found if issubclass(type(found), type) else None  # isinstance may run code: it asks for __class__


def _attribute_of(value: object, name: str) -> Any:
    """Return an attribute as it is stored in a module or class, None if there is none; getattr would run code."""
    return inspect.getattr_static(value, name, None)


def _dataclass_fields(kind: type) -> list[str] | None:
    """Return the names of the fields of a dataclass, None for another class."""
    found: Any = types.SimpleNamespace(__dataclass_fields__=_attribute_of(kind, "__dataclass_fields__"))
    return [field.name for field in dataclasses.fields(found)] if type(found.__dataclass_fields__) is dict else None


def _plain_value_builder(make: Callable[[Any], Any], tag: str) -> Callable[[Node, MakeArray], Callable[[], Any]]:
    def build(node: Node, _: MakeArray) -> Callable[[], Any]:
        value = make(node[tag])
        return lambda: value

    return build


def _rebuild_bytes(node: Node, _: MakeArray) -> Callable[[], Any]:
    data = base64.b64decode(node["bytes"])
    return lambda: bytearray(data) if node.get("type") == "bytearray" else data


def scalar_bytes(node: Node) -> bytes:
    """Return the bytes of a numpy scalar; raise FormatError if their number does not match the dtype."""
    data = base64.b64decode(node["scalar"])
    if len(data) != numpy_dtype(node["dtype"]).itemsize:
        raise TreeError(f"the tree file has a {node['dtype']} of {len(data)} bytes; {DAMAGE_ADVICE}")
    return data


def _rebuild_scalar(node: Node, _: MakeArray) -> Callable[[], Any]:
    dtype, data = numpy_dtype(node["dtype"]), scalar_bytes(node)
    return lambda: scalar_of(np.ndarray((), dtype, bytearray(data)))


_BUILDERS: dict[str, Callable[[Node, MakeArray], Callable[[], Any]]] = {
    "dict": _rebuild_dict,
    "tuple": lambda node, make_array: _sequence(node["tuple"], make_array, tuple),
    "namedtuple": _rebuild_namedtuple,
    "dataclass": _rebuild_dataclass,
    "object": lambda node, make_array: rebuild(node["object"], make_array),
    "int": _plain_value_builder(lambda text: int(text, 0), "int"),
    "float": _plain_value_builder(lambda text: struct.unpack(">d", bytes.fromhex(text))[0], "float"),
    "complex": _plain_value_builder(lambda text: complex(*struct.unpack(">dd", bytes.fromhex(text))), "complex"),
    "bytes": _rebuild_bytes,
    "scalar": _rebuild_scalar,
    "set": lambda node, make_array: _sequence(node["set"], make_array, set),
    "frozenset": lambda node, make_array: _sequence(node["frozenset"], make_array, frozenset),
}
