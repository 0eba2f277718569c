"""Writes a step as a .pt file: the state with tensors for arrays, which torch.load(weights_only=True) accepts."""

from __future__ import annotations

import io
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt.block_io.read_plan import Target
from ckpt.format.manifest import Saved
from ckpt.state.leaves import empty_leaf
from ckpt.state.leaves.base import ArrayLeaf
from ckpt.state.leaves.numpy import NumpyLeaf
from ckpt.state.name_patterns import matcher, select
from ckpt.state.tree import Node, flatten
from ckpt.state.tree_rebuild import decode_key, rebuild, scalar_bytes
from ckpt.storage.base.errors import CkptError, first_line
from ckpt.storage.base.store import ByteProgress
from ckpt.tools.common import import_optional
from ckpt.tools.step_contents import PIECE_BYTES, Array, Contents, as_raw

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

TENSOR_TYPES = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "bfloat16", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
}  # fmt: skip


def write(contents: Contents, path: str, advance: ByteProgress) -> list[str]:
    """Write the file; return the names of the arrays that it has as plain integers. The whole state is in memory meanwhile.

    If names change, the file has one dict of all names, as a state_dict, because the old containers would not fit them.
    """
    torch = import_optional("torch", "a .pt file", "torch")
    tensors = _TensorReader(contents, torch)
    if contents.names.changes:
        tree: Node = {"dict": [[name, node] for name, node in contents.nodes.items()]}
    else:
        tree = select(contents.tree, matcher(contents.only)) if contents.only else contents.tree
    finish = rebuild(make_plain(tree), tensors.plan_array)
    tensors.read_all(advance)
    with open(path, "wb") as file:
        _save(torch, finish(), _CountingFile(file, advance), path)
    return tensors.raw_names


def _save(torch: ModuleType, value: Any, file: _CountingFile, path: str) -> None:
    """Write a value by torch.save, whose RuntimeError about the end of the file hides the OSError of a full disk."""
    try:
        torch.save(value, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise CkptError(f"torch can't write {path}: {first_line(error)}; choose another format") from error


class _TensorReader:
    """Reads the arrays of a tree as tensors. Each name is read once, so that tied leaves stay tied."""

    def __init__(self, contents: Contents, torch: ModuleType) -> None:
        self._contents = contents
        self._torch = torch
        self._saved = contents.checkpoint.saved()
        self._leaves: dict[str, ArrayLeaf] = {}
        self._values: dict[str, Any] = {}
        self.raw_names: list[str] = []

    def plan_array(self, node: Node) -> Callable[[], Any]:
        """Plan to read one array of the tree; return a function that gives the tensor after `read_all`."""
        name = node["array"]
        if name not in self._leaves:
            self._leaves[name] = self._leaf(node, self._saved[name])
        return lambda: self._value(name)

    def _leaf(self, node: Node, saved: Saved) -> ArrayLeaf:
        if node["kind"] == "bytes":
            return empty_leaf("bytes", saved.dtype, saved.shape, {})
        if saved.dtype in TENSOR_TYPES:
            attributes = node if node["kind"] == "torch" else {}
            return empty_leaf("torch", saved.dtype, saved.shape, attributes)
        return NumpyLeaf(np.empty(saved.shape, Array("", "", *saved).numpy))

    def read_all(self, advance: ByteProgress) -> None:
        """Read all planned arrays."""
        batch: list[Target] = []
        pending = 0
        for name, leaf in self._leaves.items():
            batch.append(Target(name, leaf, None))
            pending += leaf.nbytes
            if pending >= 4 * PIECE_BYTES:
                self._contents.checkpoint.read(batch)
                advance(pending)
                batch, pending = [], 0
        self._contents.checkpoint.read(batch)
        advance(pending)

    def _value(self, name: str) -> Any:
        if name not in self._values:
            leaf = self._leaves[name]
            value = leaf.finish()
            if isinstance(value, np.ndarray):
                value = self._from_numpy(name, value)
            self._values[name] = value
        return self._values[name]

    def _from_numpy(self, name: str, value: np.ndarray[Any, Any]) -> Any:
        """Return an array without a torch type as a tensor in the machine's byte order, or as integers with its type name."""
        array = Array(name, name, *self._saved[name])
        if array.native is not None and array.native.name in TENSOR_TYPES:
            return self._torch.from_numpy(value.astype(array.native))
        _ = array.raw  # raises if it has too many axes
        self.raw_names.append(name)
        return {"dtype": array.dtype, "raw": self._torch.from_numpy(as_raw(value))}


def make_plain(node: Node) -> Node:
    """Return the tree without the containers that weights_only refuses: see `ckpt-restore --help`."""
    if isinstance(node, list):
        return [make_plain(n) for n in node]
    if not isinstance(node, dict):
        return node
    if "object" in node:
        return make_plain(node["object"])
    if "dataclass" in node:
        return {"dict": [[f, make_plain(n)] for f, n in zip(node["fields"], node["dataclass"], strict=True)]}
    for tag in ("tuple", "namedtuple", "frozenset"):
        if tag in node:
            return {"tuple": [make_plain(n) for n in node[tag]]}
    if "scalar" in node:
        value = rebuild(node, lambda _: lambda: None)().item()
        return flatten(value if isinstance(value, (bool, int, float, complex, str, bytes)) else scalar_bytes(node)).node
    if "set" in node:
        return {"set": [make_plain(n) for n in node["set"]]}
    if "dict" in node:
        made: dict[str, Node] = {"dict": [[_plain_key(k), make_plain(n)] for k, n in node["dict"]]}
        if node.get("type") in ("OrderedDict", "Counter"):
            made["type"] = node["type"]
        if "metadata" in node and node.get("type") == "OrderedDict":  # the versions of torch modules
            made["metadata"] = make_plain(node["metadata"])
        return made
    return node


def _plain_key(key: Node) -> Node:
    """Return a key of a dict without its type of numpy."""
    decoded = decode_key(key)
    return str(decoded) if isinstance(decoded, np.str_) else key


class _CountingFile(io.RawIOBase):
    """A file that reports how many bytes are written to it."""

    def __init__(self, file: io.BufferedWriter, advance: ByteProgress) -> None:
        self._file = file
        self._advance = advance

    def write(self, data: ReadableBuffer) -> int:
        written = self._file.write(data)
        self._advance(written)
        return written

    def flush(self) -> None:
        self._file.flush()
