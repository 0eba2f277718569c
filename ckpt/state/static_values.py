"""Parts of a state that are code, not data: functions, and the fields that a framework's registration makes static.

Where the framework of an object counts them as static, a save writes null in place of those that cannot be stored, and a load
keeps those of `like`. Elsewhere, a save refuses a function.
"""

from __future__ import annotations

import functools
import types

import numpy as np

from ckpt.errors import UnsupportedLeaf
from ckpt.state.frameworks import framework_function, imported_files

_FUNCTION_TYPES = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, type, np.ufunc,
)  # fmt: skip
_PACKAGES_OF_FUNCTIONS = ("jax", "jaxlib")
"""Callable objects of these packages are functions: results of jit and custom_jvp."""

_PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes)


def is_function(value: object) -> bool:
    """Return whether a value is a function or a class."""
    if isinstance(value, _FUNCTION_TYPES):
        return True
    return callable(value) and type(value).__module__.partition(".")[0] in _PACKAGES_OF_FUNCTIONS


def is_plain(value: object) -> bool:
    """Return whether a value is a plain value, which every save stores."""
    return isinstance(value, _PLAIN_TYPES)


def static_fields(value: object) -> frozenset[str]:
    """Return the fields of a dataclass that are static for a framework with which it is registered."""
    found: frozenset[str] = frozenset()
    for file in imported_files().values():
        if hasattr(file, "static_fields"):
            found |= file.static_fields(value)
    return found


def keeps_functions(value: object) -> bool:
    """Return whether the framework of an object treats functions inside of it as static."""
    function = framework_function(value, "keeps_functions")
    return function is not None and bool(function(value))


def replacement_advice(value: object) -> str | None:
    """Return what to store in place of a value that is refused; None where only the general advice applies."""
    if is_function(value):
        return (
            "a function is code: leave it out, or make its field of the pytree static (optax: store the state that init() "
            "returned)"
        )
    function = framework_function(value, "advice")
    return None if function is None else function(value)


def refusal(value: object, path: str) -> UnsupportedLeaf:
    """Return the error for a value that cannot be stored."""
    advice = replacement_advice(value) or (
        "give it state_dict() and load_state_dict(), turn it into arrays and plain values, or leave it out of the state"
    )
    name = f"{type(value).__module__}:{type(value).__qualname__}"
    return UnsupportedLeaf(f"leaf {path or '(root)'}: a {name} cannot be stored without pickle; {advice}")
