"""Compares the names in the state of an object with the names that a step has for it, before anything is filled."""

from __future__ import annotations

from collections.abc import Iterator

from ckpt.errors import MAX_NAMED_LEAVES
from ckpt.storage.base.plural import first_few


def require_saved_names(state: object, saved: object, kind: str) -> None:
    """Raise ValueError if nested dicts of a state and of a step have different names.

    state: what a load fills: nested dicts of arrays, and of objects with a state of their own, which are not entered.
    saved: the outline of the saved state.
    kind: the type of the object, for the message.
    """
    missing, unknown = list(_names_besides(state, saved)), list(_names_besides(saved, state))
    differences = [f"the step lacks {first_few(missing, MAX_NAMED_LEAVES)}"] * bool(missing)
    differences += [f"the step also has {first_few(unknown, MAX_NAMED_LEAVES)}"] * bool(unknown)
    if differences:
        raise ValueError(f"{' and '.join(differences)}, unlike the {kind} of `like`: build it as it was when saved")


def _names_besides(value: object, other: object, path: str = "") -> Iterator[str]:
    """Yield the names in nested dicts that another one lacks."""
    if not isinstance(value, dict) or not isinstance(other, dict):
        return
    for key, child in value.items():
        name = f"{path}.{key}" if path else str(key)
        if key in other:
            yield from _names_besides(child, other[key], name)
        else:
            yield name
