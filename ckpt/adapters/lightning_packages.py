"""The two packages of Lightning: base classes of callbacks and plugins, and messages where Lightning's own appear."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from ckpt.storage.base.errors import CkptError

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_FABRIC = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


def packages() -> list[str]:
    """Return the package of Lightning that this process has imported, or both; otherwise an installed one."""
    if imported := [name for name in _PACKAGES if name in sys.modules or _FABRIC[name] in sys.modules]:
        return imported
    for name in _PACKAGES:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return [name]
    raise CkptError("Lightning is not installed: pip install lightning")


def with_bases(cls: type, bases: list[type]) -> type:
    """Return a class derived from `cls` and the base classes of Lightning, with the name of `cls`."""
    return type(cls.__name__, (cls, *bases), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def is_a(value: object, *names: str) -> bool:
    """Return whether the class of an object, or one that it is derived from, has one of these names, in either package."""
    return any(base.__name__ in names for base in type(value).__mro__)


def has_callback(trainer: Any, name: str) -> bool:
    """Return whether a Trainer has a callback of a class with this name."""
    return any(is_a(callback, name) for callback in trainer.callbacks)


def callback_bases(kind: str = "Checkpoint") -> list[type]:
    """Return the base classes of checkpoint callbacks, which Lightning runs after all others; or of kind "Callback", of any."""
    return [getattr(importlib.import_module(f"{name}.callbacks"), kind) for name in packages()]


def plugin_bases() -> list[type]:
    """Return the base classes of plugins that write and read checkpoints."""
    return [importlib.import_module(f"{_FABRIC[name]}.plugins").CheckpointIO for name in packages()]


def info(message: str) -> None:
    """Log a message on rank 0."""
    _rank_zero("rank_zero_info", message)


def warn(message: str) -> None:
    """Issue a warning on rank 0."""
    _rank_zero("rank_zero_warn", message)


def _rank_zero(function: str, message: str) -> None:
    getattr(importlib.import_module(f"{packages()[0]}.utilities.rank_zero"), function)(f"ckpt: {message}")
