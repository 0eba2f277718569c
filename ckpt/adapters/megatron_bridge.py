"""The checkpoint manager of Megatron-Bridge that saves to and loads from a ckpt repository.

Usage:

    register_allowed_target_prefix("ckpt.")
    cfg.checkpoint.custom_manager_class = "ckpt.adapters.megatron_bridge.CkptManager"
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.bridge.training import checkpointing
from megatron.core import dist_checkpointing

from ckpt import api
from ckpt.adapters import megatron
from ckpt.adapters.megatron_async import AsyncCallsQueue, handle_of
from ckpt.adapters.megatron_tracker import DelayedTrackers, repair_tracker
from ckpt.errors import FormatError, StepNotFound
from ckpt.storage.base.errors import InvalidArgument
from ckpt.support.path_kinds import is_folder


class CkptManager(checkpointing.DefaultCheckpointManager):  # type: ignore[misc]
    """Saves what the default manager saves, with the tensors and objects in the repository DIR/ckpt.

        cfg.checkpoint.custom_manager_class = "ckpt.adapters.megatron_bridge.CkptManager"

    DIR is the folder `checkpoint.save`. The small files of the Bridge (train state, configuration, trackers) stay in it, so
    that the Bridge finds the newest checkpoint as before. A checkpoint in the format of Megatron-Core is loaded, too.

    A process may be killed at any moment. A tracker is replaced in one operation when the checkpoint is complete, and only
    then old checkpoints are deleted. A load makes a tracker that is torn name the newest complete checkpoint.

    checkpoint_config: the configuration `checkpoint` of the Bridge. `most_recent_k` also limits the steps of the repository,
        which keeps one more, and at least two. `ckpt_format` must be "torch_dist".

    Raises:
        InvalidArgument: `ckpt_format` has another value.
    """

    def __init__(self, checkpoint_config: Any) -> None:
        if checkpoint_config.ckpt_format != "torch_dist":
            raise InvalidArgument(
                f"checkpoint.ckpt_format={checkpoint_config.ckpt_format!r}: use 'torch_dist' with CkptManager"
            )
        super().__init__(checkpoint_config)
        self._queue = AsyncCallsQueue()
        self._trackers = DelayedTrackers()
        recent = checkpoint_config.most_recent_k
        # The tracker of the Bridge names the step before the newest one until it is updated.
        self._functions = _Functions(recent + 1 if recent > 0 else 2 if recent == 0 else None)

    def save(self, ctx: Any, callback_manager: Any = None) -> None:
        """Save a checkpoint; with `checkpoint.async_save`, return when the state is copied."""
        with _replaced(dist_checkpointing=self._functions, schedule_async_save=self._schedule), self._delayed_trackers():
            super().save(ctx, callback_manager)

    def load(self, ctx: Any) -> tuple[int, int]:
        """Load a checkpoint on any parallelism, and return its iteration and count of floating point operations."""
        _repair(ctx.state.cfg.checkpoint.load)
        with _replaced(dist_checkpointing=self._functions):
            loaded: tuple[int, int] = super().load(ctx)
        return loaded

    def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:
        """Finish the saves that are committed on all ranks; with `blocking`, wait for all saves."""
        with self._delayed_trackers():
            self._queue.maybe_finalize_async_calls(blocking)
            if terminate:
                self._queue.close()
            super().finalize_async_saves(state, blocking, terminate)

    @contextmanager
    def _delayed_trackers(self) -> Iterator[None]:
        """Write trackers, and delete old checkpoints, after the code of the block has written all other files."""
        cleanup = self._trackers.cleanup(_cleanup)
        with _replaced(shutil=self._trackers, open=self._trackers.open, cleanup_old_non_persistent_checkpoint=cleanup):
            try:
                yield
            except BaseException:
                self._trackers.discard()
                raise
        self._trackers.finish(len(self._queue.async_calls))

    def _schedule(self, global_state: Any, async_request: Any) -> None:
        if handle_of(async_request) is None:  # a local checkpoint
            _schedule_async_save(global_state, async_request)
        else:
            self._queue.schedule_async_request(async_request)


_schedule_async_save: Callable[[Any, Any], None] = checkpointing.schedule_async_save
_cleanup: Callable[..., None] = checkpointing.cleanup_old_non_persistent_checkpoint


def _repair(load_dir: str | os.PathLike[str] | None) -> None:
    """Repair the tracker in a local folder, on rank 0."""
    is_group = dist.is_initialized() and dist.get_world_size() > 1
    try:
        if load_dir and is_folder(load_dir) and (not is_group or dist.get_rank() == 0):
            repair_tracker(os.fspath(load_dir), _Functions(None).check_is_distributed_checkpoint)
    finally:
        if is_group:
            dist.barrier()


class _Functions:
    """The functions of `dist_checkpointing`: `save` writes to ckpt, and those that read a checkpoint take both formats.

    keep: how many steps the repository keeps; None keeps all.
    """

    def __init__(self, keep: int | None) -> None:
        self._keep = keep

    def __getattr__(self, name: str) -> Any:
        return getattr(dist_checkpointing, name)

    def save(self, *args: Any, **options: Any) -> Any:
        return megatron.save(*args, **{**options, "keep": self._keep})

    def load(self, sharded_state_dict: Any, checkpoint_dir: str, *args: Any, **options: Any) -> Any:
        return _module_for(checkpoint_dir).load(sharded_state_dict, checkpoint_dir, *args, **options)

    def load_common_state_dict(self, checkpoint_dir: str) -> Any:
        return _module_for(checkpoint_dir).load_common_state_dict(checkpoint_dir)

    def check_is_distributed_checkpoint(self, checkpoint_dir: str) -> bool:
        return _module_for(checkpoint_dir) is megatron or dist_checkpointing.check_is_distributed_checkpoint(checkpoint_dir)


def _module_for(checkpoint_dir: str | os.PathLike[str]) -> Any:
    """Return the module that can load a checkpoint: that of ckpt if the repository has the step."""
    url, step = megatron.repository_and_step(checkpoint_dir)
    try:
        return megatron if step is not None and step in api.open(url).steps() else dist_checkpointing
    except (FormatError, StepNotFound):
        return dist_checkpointing


@contextmanager
def _replaced(**names: object) -> Iterator[None]:
    """Replace globals of the module with which the Bridge saves and loads, which has no parameter for them."""
    before = {name: getattr(checkpointing, name, _MISSING) for name in names}
    try:
        for name, value in names.items():
            setattr(checkpointing, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:  # a built-in function
                delattr(checkpointing, name)
            else:
                setattr(checkpointing, name, value)


_MISSING = object()
