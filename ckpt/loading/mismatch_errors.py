"""The errors of a load whose `like`, or whose version of ckpt, does not fit the saved step: they name the leaf and the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ckpt.errors import MAX_NAMED_LEAVES, LeafMismatch
from ckpt.state.tree import Node
from ckpt.storage.base.errors import CkptError
from ckpt.storage.base.plural import first_few


@contextmanager
def naming_leaf(name: str, where: str) -> Iterator[None]:
    """Add a leaf and the step to the message of an error. where: the name of the step."""
    try:
        yield
    except CkptError as error:
        raise type(error)(f"leaf {name} of {where}: {error}") from error


def kind_mismatch(like: object, node: Node, path: str, where: str) -> LeafMismatch:
    """Return the error for a value of `like` of another kind than the saved one. where: the name of the step."""
    saved = str(next(iter(node))) if isinstance(node, dict) else type(node).__name__
    return LeafMismatch(
        f"leaf {path or '(root)'}: {where} has {_with_article(saved)}, `like` has {_with_article(type(like).__name__)}; "
        "give `like` the structure that was saved, or load without it"
    )


def keys_mismatch(module: object, missing: Sequence[str], unknown: Sequence[str], path: str, where: str) -> LeafMismatch:
    """Return the error for a module of `like` that would refuse the keys of the saved state.

    missing: keys that the saved state lacks. unknown: keys that the module lacks. where: the name of the step.
    """
    differences = [f"{where} lacks {first_few(missing, MAX_NAMED_LEAVES)} of `like`"] * bool(missing)
    of_step = "" if missing else f" of {where}"
    differences += [f"`like` lacks {first_few(unknown, MAX_NAMED_LEAVES)}{of_step}"] * bool(unknown)
    return LeafMismatch(
        f"leaf {path or '(root)'}: {', and '.join(differences)}; build {type(module).__name__} as saved, or use "
        "rename= or only="
    )


def refused_state(like: object, path: str, where: str, error: Exception) -> LeafMismatch:
    """Return the error for an object of `like` that refuses the saved state. where: the name of the step."""
    kind, reason = _with_article(type(like).__name__), " ".join(str(error).split())
    return LeafMismatch(
        f"leaf {path or '(root)'}: {kind} refused the state of {where} ({reason}); construct it as it was when saved, or leave "
        "it out of `like`"
    )


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'aeio' else 'a'} {name}"
