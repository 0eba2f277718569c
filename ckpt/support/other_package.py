"""Recognises the package `ckpt` of PyPI, which is another project: it installs a top-level package of the same name."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from ckpt.support.user_warning import warn_user

_FILE_OF_THE_OTHER = os.path.join("ckpt", "decorator.py")
"""A file that the other package has, and this one never has."""
_REPAIR = "run pip uninstall ckpt; then, in a clone of ckpt-store, pip install --force-reinstall --no-deps ."


def warn_of_other_package(path: Iterable[str] | None = None) -> None:
    """Warn if the other package is installed on the import path, `sys.path` by default. This takes one stat for each folder."""
    for folder in sys.path if path is None else path:
        if isinstance(folder, str) and os.path.exists(os.path.join(folder, _FILE_OF_THE_OTHER)):
            where = folder or "."
            warn_user(f"{where} has PyPI's package `ckpt`, which hides this project's module or is hidden: {_REPAIR}")
            return


def require_this_package(module: object) -> None:
    """Raise ImportError if the module `ckpt` is not this project's: an installation replaced or removed its first file."""
    if not hasattr(module, "_MODULE_OF"):
        where = next(iter(getattr(module, "__path__", ["?"])))
        raise ImportError(f"{where} is not ckpt-store: PyPI's package `ckpt` has replaced or removed its module: {_REPAIR}")
