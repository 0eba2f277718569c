"""Hooks of `register_save_state_pre_hook` and `register_load_state_pre_hook`, whose files are stored in the step.

accelerate gives its hooks the folder of the checkpoint. A step has no folder, so they get a temporary one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ckpt.groups import as_group
from ckpt.state.leaves.base import Bytes
from ckpt.state.leaves.sharded import Shard
from ckpt.storage.base.errors import InvalidArgument

HOOK_FILES = "hook_files"
"""The entry of a step with the files of hooks: for each rank, the bytes of each file by its path."""


def call_save_hooks(accelerator: Any, name: str) -> dict[str, dict[str, dict[str, Shard | None]]]:
    """Call the hooks of a save with a temporary folder called `name`, and return what to add to the state of the step.

    Raises InvalidArgument if a hook has changed the weights that accelerate would save, because a step has those of the models.
    """
    hooks = accelerator._save_model_state_pre_hook
    if not hooks:
        return {}
    weights = [accelerator.get_state_dict(model, unwrap=False) for model in _whole_models(accelerator)]
    before = {id(each): dict(each) for each in weights}
    with tempfile.TemporaryDirectory(prefix="ckpt-") as root:
        folder = os.path.join(root, name)
        os.mkdir(folder)
        for hook in list(hooks.values()):
            hook(accelerator._models, weights, folder)
        if any(not _is_unchanged(each, before.get(id(each))) for each in weights):
            raise InvalidArgument(
                "a hook of register_save_state_pre_hook has changed the weights, but a step has those of the models: let it "
                "write its own file, or change the model"
            )
        return {HOOK_FILES: {str(as_group().rank): dict(_read_files(folder))}}


def _whole_models(accelerator: Any) -> list[Any]:
    """Return the models that accelerate gives to hooks: those that are not sharded over the ranks."""
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    return [] if kind in ("FSDP", "DEEPSPEED") else list(accelerator._models)


def _is_unchanged(weights: Mapping[str, object], before: Mapping[str, object] | None) -> bool:
    return before is not None and before.keys() == weights.keys() and all(weights[name] is before[name] for name in before)


def _raise(error: OSError) -> None:
    """Raise the error of a folder that can't be listed, which os.walk skips otherwise."""
    raise error


def _read_files(folder: str) -> Iterator[tuple[str, Shard | None]]:
    """Yield each file below a folder: its path, and its bytes, which only this rank has; None if the file is empty.

    The bytes are mapped, and stay valid when the file is deleted.
    """
    for parent, _, names in sorted(os.walk(folder, onerror=_raise)):
        for name in sorted(names):
            path = os.path.join(parent, name)
            data = np.asarray(np.memmap(path, np.uint8, "r")) if os.path.getsize(path) else None
            yield os.path.relpath(path, folder), None if data is None else Shard(data, data.shape, (0,))


@contextmanager
def called_load_hooks(accelerator: Any, name: str, files: Mapping[str, Mapping[str, Bytes | None]]) -> Iterator[None]:
    """Call the hooks of a load with a temporary folder that has the files of a step. The block then loads the step.

    A model that a hook removes from the list of models is one that the hook has loaded: it keeps its values after the block.
    """
    models = _whole_models(accelerator)
    given = list(models)
    with tempfile.TemporaryDirectory(prefix="ckpt-") as root:
        folder = os.path.join(root, name)
        os.mkdir(folder)
        _write_files(folder, files)
        for hook in list(accelerator._load_model_state_pre_hook.values()):
            hook(models, folder)
    remaining = {id(model) for model in models}
    loaded = [tensor for model in given if id(model) not in remaining for tensor in _tensors(model)]
    copies = [tensor.detach().clone() for tensor in loaded]
    yield
    with torch.no_grad():
        for tensor, copy in zip(loaded, copies, strict=True):
            tensor.copy_(copy)


def _tensors(model: Any) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _write_files(folder: str, files: Mapping[str, Mapping[str, Bytes | None]]) -> None:
    """Write the files of all ranks. Where several ranks have one of the same name, that of the lowest rank is written."""
    for rank in sorted(files, key=int, reverse=True):
        for name, data in files[rank].items():
            path = os.path.normpath(os.path.join(folder, name))
            if not path.startswith(folder + os.sep):
                raise InvalidArgument(
                    f"a file of a hook has the path {name!r}, which is outside of its folder: save the step again"
                )
            os.makedirs(os.path.dirname(path), exist_ok=True)
            np.asarray([] if data is None else data, np.uint8).tofile(path)
