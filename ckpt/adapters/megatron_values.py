"""Values in checkpoints of Megatron that are objects, as plain values: buffers, types of torch, arguments of a program."""

from __future__ import annotations

import argparse
import io
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckpt.errors import FormatError, UnsupportedLeaf
from ckpt.state.leaves.torch import dtype_of_name
from ckpt.state.tree import flatten
from ckpt.support.user_warning import warn_user

_BYTES, _NAMESPACE, _DTYPE, _ITEMS = "io.BytesIO", "argparse.Namespace", "torch.dtype", "dict.items"
"""The keys of dicts that stand for an object of this class."""


def encoded(value: Any, path: str) -> Any:
    """Return a copy of nested containers in which known objects are dicts, with their class as the key."""
    if isinstance(value, dict):
        items = [(key, encoded(each, f"{path}.{key}")) for key, each in value.items()]
        if any(_has_dtype(key) for key in value):  # as the buffers of a distributed optimizer, which are listed by dtypes
            return {_ITEMS: [[encoded(key, path), each] for key, each in items]}
        return _dict_like(value, items)
    if type(value) in (list, tuple):
        return type(value)(encoded(each, f"{path}.{i}") for i, each in enumerate(value))
    if isinstance(value, io.BytesIO):
        return {_BYTES: value.getvalue()}
    if isinstance(value, DTensor):  # rank 0 alone stores these values, so the other parts would be lost
        raise UnsupportedLeaf(f"leaf {path}: a DTensor is not stored by megatron.save: use ckpt.save for a state with DTensors")
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    if isinstance(value, argparse.Namespace):
        kept, left_out = {}, []
        for name, each in vars(value).items():
            try:
                flatten(each := encoded(each, f"{path}.{name}"))
                kept[name] = each
            except UnsupportedLeaf:
                left_out.append(name)
        if left_out:
            warn_user(f"{path}: these attributes are not stored, because they are not plain values: {', '.join(left_out)}")
        return {_NAMESPACE: kept}
    return value


def decoded(value: Any) -> Any:
    """Return the value of which `encoded` made this one; raise FormatError for a dtype that the installed torch lacks."""
    if isinstance(value, dict):
        if value.keys() == {_BYTES}:
            return io.BytesIO(value[_BYTES])
        if value.keys() == {_ITEMS}:
            return {decoded(key): decoded(each) for key, each in value[_ITEMS]}
        if value.keys() == {_DTYPE}:
            return _decoded_dtype(str(value[_DTYPE]))
        if value.keys() == {_NAMESPACE}:
            return argparse.Namespace(**decoded(value[_NAMESPACE]))
        return _dict_like(value, ((key, decoded(each)) for key, each in value.items()))
    return type(value)(map(decoded, value)) if type(value) in (list, tuple) else value


def _decoded_dtype(name: str) -> torch.dtype:
    if (found := dtype_of_name(name)) is None:
        raise FormatError(
            f"the installed torch {torch.__version__} has no dtype {name!r}, which a saved value is: update torch"
        )
    return found


def _dict_like(value: dict[Any, Any], items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return a dict of these items; an OrderedDict if `value` is one. A defaultdict has a function, which is not stored."""
    return OrderedDict(items) if isinstance(value, OrderedDict) else dict(items)


def _has_dtype(key: object) -> bool:
    return any(map(_has_dtype, key)) if isinstance(key, tuple) else isinstance(key, torch.dtype)
