"""A handler by which Orbax's own Checkpointer and CheckpointManager store an item with ckpt.

    manager.save(step, args=ocp.args.Composite(state=CkptSave(state), data=ocp.args.JsonSave(position)))
    state = manager.restore(step, args=ocp.args.Composite(state=CkptRestore(state)))["state"]

The folder of the item has a repository with one step. Orbax makes the folder, and gives it its name when all items are written.
Steps do not share blocks then: `ckpt.adapters.orbax.CheckpointManager` stores less where little changes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

import ckpt
from ckpt.repository.repository import REPOSITORY_FOLDER
from ckpt.saving.handle import SaveHandle
from ckpt.storage.base.errors import StoreError

_STEP = 0
_FOLDER_SECONDS = 300.0
"""How long a save waits for Orbax to make the folder, which it does in the background."""
_POLL_SECONDS = 0.005


class CkptHandler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]
    """Saves and restores the item of `CkptSave` and `CkptRestore`, for which Orbax uses it by itself.

        manager.save(step, args=ocp.args.Composite(state=CkptSave(state)))

    Any state that `ckpt.save` stores is an item: pytrees of jax and numpy arrays, `flax.nnx` objects, typed keys, plain values.
    All processes of `jax.distributed` save together.
    """

    async def async_save(self, directory: str | os.PathLike[str], args: CkptSave) -> list[_Commit]:
        """Copy the item, and return the save that runs in the background.

        Raises:
            StoreError: Orbax has not made the folder in time.
            CkptError: As of `ckpt.save`.
        """
        folder = Path(directory)
        end = time.monotonic() + _FOLDER_SECONDS
        while not folder.is_dir():
            if time.monotonic() > end:
                raise StoreError(
                    f"{folder} was not made within {_FOLDER_SECONDS:.0f} s: check the log of Orbax, and save again"
                )
            await asyncio.sleep(_POLL_SECONDS)
        return [_Commit(ckpt.save(args.item, folder / REPOSITORY_FOLDER, _STEP, blocking=False))]

    def save(self, directory: str | os.PathLike[str], args: CkptSave) -> None:
        """Save the item, and wait until it is durable."""
        ckpt.save(args.item, Path(directory, REPOSITORY_FOLDER), _STEP)

    def restore(self, directory: str | os.PathLike[str], args: CkptRestore | None = None) -> Any:
        """Return the item, filled into that of `args` if it has one.

        Raises:
            CkptError: As of `ckpt.load`.
        """
        return ckpt.load(Path(directory, REPOSITORY_FOLDER), None if args is None else args.item, step=_STEP)

    def metadata(self, directory: str | os.PathLike[str]) -> dict[str, Any]:
        """Return a `jax.ShapeDtypeStruct` for each array, by its name."""
        import jax

        saved = ckpt.open(Path(directory, REPOSITORY_FOLDER))[_STEP].leaves()
        return {leaf.name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in saved}


class _Commit:
    """A save in the background as a future of Orbax."""

    def __init__(self, handle: SaveHandle) -> None:
        self._handle = handle

    def result(self, timeout: float | None = None) -> None:
        self._handle.result(timeout)


@ocp.args.register_with_handler(CkptHandler, for_save=True)
@dataclasses.dataclass
class CkptSave(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Saves an item with ckpt."""

    item: Any


@ocp.args.register_with_handler(CkptHandler, for_restore=True)
@dataclasses.dataclass
class CkptRestore(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Restores an item that `CkptSave` saved. item: filled as `like` of `ckpt.load` is; without it, new arrays are made."""

    item: Any = None
