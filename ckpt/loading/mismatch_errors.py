"""The errors of a load whose `like`, or whose version of ckpt, does not fit the saved step: they name the leaf and the step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ckpt.errors import LeafMismatch
from ckpt.state.tree import Node
from ckpt.storage.base.errors import CkptError


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


def refused_state(like: object, path: str, where: str, error: Exception) -> LeafMismatch:
    """Return the error for an object of `like` that refuses the saved state. where: the name of the step."""
    kind, reason = _with_article(type(like).__name__), " ".join(str(error).split())
    return LeafMismatch(
        f"leaf {path or '(root)'}: {kind} refused the state of {where} ({reason}); construct it as it was when saved, or leave "
        "it out of `like`"
    )


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'aeio' else 'a'} {name}"
