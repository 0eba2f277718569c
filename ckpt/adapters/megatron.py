"""Functions of Megatron-Core's dist_checkpointing that save to and load from a ckpt repository.

Usage:

    from ckpt.adapters import megatron as dist_checkpointing
    dist_checkpointing.save(sharded_state_dict, "/data/run/iter_0000100")
    state_dict = dist_checkpointing.load(sharded_state_dict, "/data/run/iter_0000100")
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import apply_factory_merges
from megatron.core.dist_checkpointing.serialization import StrictHandling
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.dist_checkpointing.validation import (
    determine_global_metadata,
    parse_strict_flag,
    validate_sharding_integrity,
)

from ckpt import api
from ckpt.adapters.megatron_async import AsyncCallsQueue, request_of
from ckpt.adapters.megatron_state import LoadTargets, clear_padding, saved_state
from ckpt.adapters.megatron_values import decoded
from ckpt.repository.repository import REPOSITORY_FOLDER
from ckpt.storage.base.errors import InvalidArgument

__all__ = [
    "AsyncCallsQueue", "load", "load_common_state_dict", "load_content_metadata", "repository_and_step", "save"
]  # fmt: skip

_ITERATION = re.compile(r"(.*?)/*iter_(\d+)/*")
_CONTENT_METADATA = "content_metadata"


def save(
    sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str], sharded_strategy: object = None,
    common_strategy: object = None, validate_access_integrity: bool = True, async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = None,
    content_metadata: dict[str, Any] | None = None, **options: Any,
) -> Any:  # fmt: skip
    """Save a sharded state dict as one step, as `dist_checkpointing.save` does to a folder.

        dist_checkpointing.save(sharded_state_dict, "/data/run/iter_0000100")

    sharded_state_dict: nested dicts and lists with ShardedTensors, ShardedObjects and plain values.
    checkpoint_dir: RUN/iter_N, a folder or URL, for step N of the repository RUN/ckpt; or a repository, which gets the step
        after its newest.
    sharded_strategy, common_strategy: no effect. Each rank writes an equal share of what several ranks have.
    async_sharded_save: whether to return an AsyncRequest when the state is copied. Its finalize function waits for the commit;
        `AsyncCallsQueue` calls it when the step is committed.
    validate_access_integrity, preprocess_common_before_consistancy_check, content_metadata: as for Megatron-Core.
    options: `keep` is that of `ckpt.save`. Others have no effect.

    What Megatron-Core stores in common.pt is stored by rank 0, as plain values. Attributes of a Namespace that can't be stored
    are left out with a warning.

    Raises:
        InvalidArgument: The state has an object of Megatron-Core that is neither a ShardedTensor nor a ShardedObject.
        CheckpointingException: The shards do not cover each tensor exactly once.
        UnsupportedLeaf: The state has an object that can't be stored without pickle.
        CkptError: The save failed; see `ckpt.save`.

    Returns:
        An AsyncRequest of Megatron-Core with async_sharded_save, else None.
    """
    if content_metadata is not None:
        sharded_state_dict[_CONTENT_METADATA] = content_metadata
    clear_padding(sharded_state_dict)
    sharded, common = save_preprocess(sharded_state_dict, False)
    of_all_ranks = _of_all_ranks(sharded)
    if validate_access_integrity:
        prepare = preprocess_common_before_consistancy_check
        validate_sharding_integrity(of_all_ranks, common_state_dict=common if prepare is None else prepare(common))
    url, step = repository_and_step(checkpoint_dir)
    state = saved_state(sharded, common, of_all_ranks)
    handle = api.save(state, url, step, blocking=False, overwrite=step is not None, keep=options.get("keep"))
    if async_sharded_save:
        return request_of(handle, url)
    handle.result()
    return None


def _of_all_ranks(sharded: Any) -> Any:
    """Return the ShardedTensors and ShardedObjects of each rank, without data."""
    if dist.get_world_size() == 1:  # nothing to exchange
        return [[entry.without_data() for entry in nested_values(sharded)]]
    return determine_global_metadata(sharded)[1]


def load(
    sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str], sharded_strategy: object = None,
    common_strategy: object = None, validate_access_integrity: bool = True,
    strict: Any = StrictHandling.ASSUME_OK_UNEXPECTED,
) -> dict[str, Any]:  # fmt: skip
    """Load a sharded state dict on any parallelism, as `dist_checkpointing.load` does from a folder.

        state_dict = dist_checkpointing.load(sharded_state_dict, "/data/run/iter_0000100")

    sharded_state_dict: its tensors are filled in place.
    checkpoint_dir: as for `save`; a repository loads its newest complete step.
    strict: "assume_ok_unexpected", under which a missing tensor is an error.
    sharded_strategy, common_strategy, validate_access_integrity: no effect.

    Returns:
        The state dict, with the common values of the step.

    Raises:
        InvalidArgument: `strict` has another value, or `sharded_state_dict` has another object than for `save`.
        StepNotFound: There is no such step.
        LeafNotFound: The step lacks a tensor or object of `sharded_state_dict`.
        LeafMismatch: A tensor has another global shape, and does not have allow_shape_mismatch.
        IntegrityError: The step is damaged.
    """
    if parse_strict_flag(strict) is not StrictHandling.ASSUME_OK_UNEXPECTED:
        raise InvalidArgument(f"strict={strict!r}: use 'assume_ok_unexpected', since ckpt loads all entries or none")
    sharded, local_only, factories = load_preprocess(sharded_state_dict)
    sharded, _ = extract_sharded_base(sharded)
    targets = LoadTargets(sharded)
    url, step = repository_and_step(checkpoint_dir)
    loaded = api.load(url, targets.like(), step=step)
    state: dict[str, Any] = decoded(loaded["common"])
    merge(state, local_only)
    merge(state, dict_list_map_outplace(lambda entry: targets.value(entry, loaded["objects"]), sharded))
    return apply_factory_merges(state, factories)  # type: ignore[no-any-return]


def load_common_state_dict(checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the values of a step that are neither tensors nor sharded objects. checkpoint_dir: as for `load`."""
    url, step = repository_and_step(checkpoint_dir)
    found: dict[str, Any] = decoded(api.load(url, {"common": None}, step=step)["common"])
    return found


def load_content_metadata(
    checkpoint_dir: str | os.PathLike[str] | None = None, *, preloaded_state_dict: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Return what `save` got as `content_metadata`, of a step or of a loaded state dict.

    checkpoint_dir: as for `load`; not needed with preloaded_state_dict.
    preloaded_state_dict: what `load_common_state_dict` has returned.

    Raises:
        InvalidArgument: Neither is given.
    """
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise InvalidArgument("load_content_metadata: give checkpoint_dir or preloaded_state_dict")
        preloaded_state_dict = load_common_state_dict(checkpoint_dir)
    return preloaded_state_dict.get(_CONTENT_METADATA)


def repository_and_step(checkpoint_dir: str | os.PathLike[str]) -> tuple[str, int | None]:
    """Return the URL of the repository and the number of the step that a checkpoint folder of Megatron stands for.

    checkpoint_dir: as for `save`; for a repository, the number is None.
    """
    text = os.fspath(checkpoint_dir)
    if (found := _ITERATION.fullmatch(text)) is None:
        return text, None
    return f"{found[1] or ('/' if text.startswith('/') else '.')}/{REPOSITORY_FOLDER}", int(found[2])
