"""Finds the file of `ckpt/state/leaves/` that knows the arrays and objects of a framework, by the type of a value.

Each file defines

    is_array(kind) -> bool                          whether values of a type are arrays
    as_leaf(value) -> ArrayLeaf                     the leaf of an array
    empty_leaf(dtype, shape, attributes)            the target of a new array for a load

and, where the framework has them,

    as_stateful(value) -> Stateful | None           functions that read and set the state of an object
    is_module(value) -> bool                        whether it has `named_parameters(remove_duplicate=)`, as torch's
    module_entries(value) -> ModuleEntries          the names of its buffers and parameters
    is_framework_class(kind) -> bool                whether a type is of the framework, though it names another module
    param_groups(value) -> list[dict] | None        of an optimizer whose state numbers its parameters, as torch's does
    is_random_generator(value) -> bool              each rank of a group stores its own
    as_pytree(value) -> Stateful | None             as `as_stateful`, for a class that a user registers with the framework
    static_fields(value) -> frozenset[str]          the fields of a dataclass that are not data, but part of the program
    keeps_functions(value) -> bool                  whether functions inside of an object are part of the program
    advice(value) -> str | None                     what to store in place of an object that is refused
    random_state() -> Any, set_random_state(state)  the global generators, for `ckpt.RandomState`

A further framework is one file there, and one row of the table here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

from ckpt.errors import FormatError, LeafMismatch
from ckpt.storage.base.errors import first_line, is_transient
from ckpt.support.user_warning import warn_user

_FILE_OF_PACKAGE = {
    "torch": "torch",
    "jax": "jax", "jaxlib": "jax", "flax": "jax", "equinox": "jax", "optax": "jax",
    "grain": "grain", "tensorflow": "tensorflow", "keras": "keras", "paddle": "paddle",
    "mindspore": "mindspore",
}  # fmt: skip
"""By the package in which a framework defines its types: the file in `ckpt/state/leaves/`, which is also the stored kind."""

PACKAGES = frozenset(_FILE_OF_PACKAGE)
"""The packages of the frameworks."""

_KINDS = frozenset(_FILE_OF_PACKAGE.values()) - {"keras"}  # the arrays of Keras are stored as those of its backend

_files: dict[type, ModuleType | None] = {}
"""By type, the results of `framework_file`."""

_unusable: dict[str, ModuleType] = {}
"""By the file in `ckpt/state/leaves/`: the imported package that it can't use."""


def framework_file(kind: type) -> ModuleType | None:
    """Return the module of `ckpt.state.leaves` for the framework that defines a type or one of its bases; None for other types.

    A value of a framework that the process has not imported can't exist, so this imports no framework.
    """
    try:
        return _files[kind]
    except KeyError:
        found = _files[kind] = _find_file(kind)
        return found


def _find_file(kind: type) -> ModuleType | None:
    for base in kind.__mro__:
        package = base.__module__.partition(".")[0]
        name = _FILE_OF_PACKAGE.get(package)
        if name is not None and (file := _file_of_imported(name, package)) is not None:
            return file
    return None


def _file_of_imported(name: str, package: str) -> ModuleType | None:
    """Return a file of `ckpt.state.leaves`; None if its package is not imported or, with one warning, can't be used.

    The package may be one of the user with the same name, or a framework whose import has failed: neither may break a save.
    """
    module = sys.modules.get(package)
    if module is None or _unusable.get(name) is module:
        return None
    try:
        return importlib.import_module(f"ckpt.state.leaves.{name}")
    except Exception as error:
        if is_transient(error):  # no fault of the package: a later import may succeed
            raise
        _unusable[name] = module
        warn_user(
            f"the imported package {package} cannot be used ({type(error).__name__}: {first_line(error)}), so its objects and "
            "random generators are not saved: install a version that ckpt supports, or ignore this if you do not use it"
        )
        return None


def usable_torch() -> ModuleType | None:
    """Return torch if the process has imported it; None otherwise, and for a package that only has its name."""
    return sys.modules["torch"] if "torch" in sys.modules and _file_of_imported("torch", "torch") is not None else None


def framework_function(value: object, name: str) -> Callable[[Any], Any] | None:
    """Return a function of the file of the framework that defines the type of `value`; None if the file has none."""
    file = framework_file(type(value))
    return None if file is None else getattr(file, name, None)


def imported_files() -> dict[str, ModuleType]:
    """Return the files of all frameworks that this process has imported, by kind."""
    names = sorted(name for package, name in _FILE_OF_PACKAGE.items() if package == name and package in sys.modules)
    files = {name: _file_of_imported(name, name) for name in names}
    return {name: file for name, file in files.items() if file is not None}


@lru_cache(maxsize=16)
def file_of_kind(kind: str) -> ModuleType:
    """Return the module of `ckpt.state.leaves` for a stored kind of array.

    Raises FormatError for an unknown kind, and LeafMismatch where its framework is not installed.
    """
    if kind not in _KINDS:
        raise FormatError(
            f"unknown array kind {kind!r}: install a newer ckpt-store, or give `like` with arrays of another kind"
        )
    try:
        return importlib.import_module(f"ckpt.state.leaves.{kind}")
    except ImportError as error:
        if is_transient(error):
            raise
        raise LeafMismatch(
            f"the array was saved by {kind}, which is not installed: install it, or give `like` with numpy arrays ({error})"
        ) from error
