"""Any jax pytree as an entry of a state, by the key paths of its leaves.

Dicts, lists, tuples, namedtuples (optax) and dataclasses (flax) need no adapter. Types that are pytrees only because they
were registered do: nothing else tells how to make them again.
"""

from __future__ import annotations

from typing import Any

import jax


class Tree:
    """Carries a pytree: `state = {"train": Tree(train_state)}`; after a load, `state["train"].value` is the new one.

    jax arrays are immutable, so that a load makes new ones, with the shardings of those that were there.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        """The leaves by the names of their paths: {"params.dense.kernel": …}."""
        leaves = jax.tree_util.tree_flatten_with_path(self.value)[0]
        return {_name(path): leaf for path, leaf in leaves}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put leaves of these names in the places of those that are there; raise KeyError where one is missing."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(self.value)
        self.value = structure.unflatten([state[_name(path)] for path, _ in leaves])


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(jax.tree_util.keystr((key,), simple=True) for key in path) or "value"
