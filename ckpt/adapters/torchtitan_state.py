"""The parts of a torchtitan training as entries of a state: model and optimizers by rank, and the position in the data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.dataloader import ParallelAwareDataloader

from ckpt.adapters.torch_replicas import with_replica_ranks, without_replica_ranks
from ckpt.format.manifest import Saved
from ckpt.state.leaves.torch import dtype_of_name
from ckpt.state.torch_keys import ModuleEntries
from ckpt.state.tree import PerRank

_PACKED = "int64 list"
"""The key of a dict that stands for a long list of integers, such as the tokens that the data buffers."""
_PACKED_LENGTH = 64
"""The length from which a list counts as long."""


def ranks_with_names(names: Iterable[str]) -> tuple[int, ...] | None:
    """Return the ranks that have tensors of the same names, as those of one pipeline stage; None if all ranks have."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    digests: list[bytes | None] = [None] * dist.get_world_size()
    own = hashlib.blake2b("\n".join(sorted(names)).encode(), digest_size=16).digest()
    dist.all_gather_object(digests, own)
    ranks = tuple(rank for rank, digest in enumerate(digests) if digest == own)
    return None if len(ranks) == len(digests) else ranks


class ShardedState:
    """A part of a training run with a flat state dict, of which each pipeline stage has other entries.

    stateful: torchtitan's ModelWrapper or OptimizersContainer.
    ranks: the ranks with the same entries; None means all.
    model_parts: the modules whose tensors these are, for the names of buffers and frozen parameters.
    """

    def __init__(
        self, stateful: Any, ranks: tuple[int, ...] | None, model_parts: Iterable[torch.nn.Module] = (), dtype: Any = None
    ) -> None:
        self._stateful, self._ranks, self._model_parts, self._dtype = stateful, ranks, list(model_parts), dtype

    def converted(self, dtype: torch.dtype) -> ShardedState:
        """Return the same part with its floating-point tensors converted when a save reads them."""
        return ShardedState(self._stateful, self._ranks, self._model_parts, dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors by name, without a copy unless they are converted."""
        buffers = {name for part in self._model_parts for name, _ in part.named_buffers()}
        return {name: self._placed(name, value, buffers) for name, value in self._stateful.state_dict().items()}

    def state_dict_like(self, saved: object, everything: bool) -> dict[str, Any]:
        """Return the tensors that a load fills. Those of a model have the saved type, which may be that of an export."""
        found = self.state_dict()
        if self._model_parts and isinstance(saved, dict):
            for name, value in found.items():
                tensor, stored = without_replica_ranks(value), saved.get(name)
                if (
                    isinstance(stored, Saved)
                    and isinstance(tensor, torch.Tensor)
                    and str(tensor.dtype) != f"torch.{stored.dtype}"
                ):
                    made = torch.empty_like(tensor, dtype=dtype_of_name(stored.dtype))
                    found[name] = with_replica_ranks(made, self._ranks)
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load filled tensors into the model or the optimizers."""
        self._stateful.load_state_dict({name: without_replica_ranks(value) for name, value in state.items()})

    def members(self) -> ModuleEntries:
        """Return the names of buffers, which may differ between ranks, and of parameters."""
        buffers = [name for part in self._model_parts for name, _ in part.named_buffers()]
        parameters = [item for part in self._model_parts for item in part.named_parameters(remove_duplicate=False)]
        frozen, trained = ([name for name, p in parameters if p.requires_grad == is_trained] for is_trained in (False, True))
        return ModuleEntries(buffers, frozen, trained)

    def _placed(self, name: str, value: Any, buffers: set[str]) -> Any:
        if self._dtype is not None and isinstance(value, torch.Tensor) and value.is_floating_point():
            value = value.to(self._dtype)
        return with_replica_ranks(value, self._ranks, name in buffers)


class DataloaderPosition:
    """The position of each data-parallel rank in its data, as plain values in place of torchtitan's pickled ones."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._is_plain = (
            isinstance(loader, ParallelAwareDataloader) and type(loader).state_dict is ParallelAwareDataloader.state_dict
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position, by the name of this data-parallel rank."""
        if not self._is_plain:
            return dict(_packed(self._loader.state_dict()))
        position = StatefulDataLoader.state_dict(self._loader)
        return {self._loader._rank_id: _packed(position), "world_size": self._loader.dp_world_size}

    def state_dict_like(self, saved: Any, everything: bool) -> dict[str, Any]:
        """Return an empty entry for the position of this rank; raise ValueError if the saved one is of other ranks."""
        if not self._is_plain:
            return dict.fromkeys(saved)
        ranks = saved.get("world_size")
        if ranks != self._loader.dp_world_size:
            raise ValueError(
                f"the position in the data is that of {ranks} data-parallel ranks, and this run has "
                f"{self._loader.dp_world_size}; with checkpoint.exclude_from_loading=['dataloader'] the data begins anew"
            )
        return {self._loader._rank_id: None, "world_size": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the data at a saved position."""
        if self._is_plain:
            StatefulDataLoader.load_state_dict(self._loader, _unpacked(state[self._loader._rank_id]))
        else:
            self._loader.load_state_dict(_unpacked(state))


def _packed(value: Any) -> Any:
    """Return a copy in which long lists of integers are arrays of this rank, because each item of a list takes a node."""
    if isinstance(value, dict):
        return {key: _packed(each) for key, each in value.items()}
    if type(value) is list and len(value) >= _PACKED_LENGTH and all(type(each) is int for each in value):
        try:
            return {_PACKED: PerRank(np.array(value, np.int64))}
        except OverflowError:
            return value
    if type(value) in (list, tuple):
        return type(value)(_packed(each) for each in value)
    return PerRank(value) if isinstance(value, (torch.Tensor, np.ndarray)) else value


def _unpacked(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_PACKED}:
            return value[_PACKED].tolist()
        return {key: _unpacked(each) for key, each in value.items()}
    return type(value)(map(_unpacked, value)) if type(value) in (list, tuple) else value
