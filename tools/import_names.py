"""The names of an imported state, as --strip and --rename of ckpt-import make them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckpt.state.tree import join_path
from ckpt.storage.base.errors import CkptError
from ckpt.tools.export_names import ExportNames


def renamed(state: Any, names: ExportNames, source: Path) -> Any:
    """Return one dict of all names of a state, as a state_dict; the state itself if no name changes.

    Raises CkptError if two entries get one name, or no entry is left.
    """
    if not names.changes:
        return state
    found: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, value in _all_entries(state, source):
        if not names.selects(name):
            continue
        new = names(name)
        if new in found:
            raise CkptError(f"--rename gives {origin[new]} and {name} of {source} one name, {new}; change it, or use --only")
        found[new], origin[new] = value, name
    if not found:
        raise CkptError(f"no name in {source} begins with --strip {names.strip}; give the names that a load of it shows")
    return found


def _all_entries(state: Any, source: Path) -> Iterator[tuple[str, Any]]:
    try:
        yield from _entries(state, "")
    except RecursionError as error:
        raise CkptError(f"{source} is nested too deeply for --rename, so it may be damaged: copy it again") from error


def _entries(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _entries(part, join_path(path, key))
    elif isinstance(value, (list, tuple)):
        for i, part in enumerate(value):
            yield from _entries(part, join_path(path, i))
    else:
        yield path or "(root)", value
