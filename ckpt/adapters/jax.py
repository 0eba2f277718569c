"""The class Tree, which makes any jax pytree an entry of a state, with its leaves named by their key paths.

A state takes pytrees without it. It is needed for steps that were saved with it, and to fill a pytree in place.
"""

from __future__ import annotations

from typing import Any

import jax

from ckpt.state.leaves.jax_objects import leaf_names


class Tree:
    """A pytree as an entry of a state.

        state = {"train": Tree(train_state)}
        ckpt.load(url, like=state)
        train_state = state["train"].value

    value: the pytree; a load replaces it. jax arrays are immutable, so the loaded tree has new arrays, with the shardings of
        those that it replaces.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        """Return the leaves by the names of their paths: {"params.dense.kernel": …}. A second leaf of a name gets a "~"."""
        leaves = jax.tree_util.tree_flatten_with_path(self.value)[0]
        return dict(zip(leaf_names(leaves), (leaf for _, leaf in leaves), strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the leaves of the tree by the leaves of the same names.

        Raises:
            KeyError: A leaf is missing, or two leaves were saved under a name that only one leaf of this tree has, so that it
                is unknown which of them belongs here.
        """
        leaves, structure = jax.tree_util.tree_flatten_with_path(self.value)
        names = leaf_names(leaves)
        if doubtful := [name for name in names if f"{name}~" in state and f"{name}~" not in names]:
            raise KeyError(f"two leaves were saved as {doubtful[0]}, and this tree has one: give a tree that has both")
        self.value = structure.unflatten([state[name] for name in names])
