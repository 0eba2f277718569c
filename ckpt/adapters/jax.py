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
        """The leaves by the names of their paths: {"params.dense.kernel": …}. A second one of one name gets a "~"."""
        leaves = jax.tree_util.tree_flatten_with_path(self.value)[0]
        return dict(zip(_leaf_names(leaves), (leaf for _, leaf in leaves), strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put leaves of these names in the places of those that are there; raise KeyError where one is missing.

        Also where two were saved under a name that only one has here: which of them is meant can't be told.
        """
        leaves, structure = jax.tree_util.tree_flatten_with_path(self.value)
        names = _leaf_names(leaves)
        if doubtful := [name for name in names if f"{name}~" in state and f"{name}~" not in names]:
            raise KeyError(f"two leaves were saved as {doubtful[0]}, and here is one: give a tree that has both")
        self.value = structure.unflatten([state[name] for name in names])


def _leaf_names(leaves: list[tuple[tuple[Any, ...], Any]]) -> list[str]:
    """A name for each: {"a.b": x, "a": {"b": y}} has two leaves of one path."""
    names: dict[str, None] = {}
    for path, _ in leaves:
        name = ".".join(jax.tree_util.keystr((key,), simple=True) for key in path) or "value"
        while name in names:
            name += "~"
        names[name] = None
    return list(names)
