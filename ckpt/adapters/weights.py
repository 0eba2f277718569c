"""Streams the weights of a model from a step, as torch tensors, for servers and other processes that only read a model."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from ckpt.block_io.staging_arena import round_up
from ckpt.errors import LeafMismatch, LeafNotFound
from ckpt.format.manifest import Saved
from ckpt.format.signature import KeyOption
from ckpt.loading.leaf_stream import nbytes_of, ordered_leaves, stream_leaves
from ckpt.repository.checkpoint import Checkpoint
from ckpt.repository.repository import Url, open_repository, resolve_url
from ckpt.state.leaves.base import ArrayLeaf
from ckpt.state.leaves.torch import TorchLeaf, empty_leaf
from ckpt.state.name_mapping import Rename, as_rename_function
from ckpt.state.name_patterns import entries, parts_with_arrays, suggest
from ckpt.storage.base.errors import InvalidArgument
from ckpt.storage.base.huge_pages import map_huge_pages

_MAX_BYTES = 256 << 20
_HUGE_PAGES_FROM_BYTES = 4 << 20


def iterate_weights(
    url: Url | None = None, step: int | None = None, *, prefix: str = "", rename: Rename | None = None, rank: int = 0,
    world: int = 1, max_bytes: int = _MAX_BYTES, key: KeyOption = None,
) -> Iterator[tuple[str, torch.Tensor]]:  # fmt: skip
    """Yield the names and tensors of a saved model, in the order in which they are stored, each verified.

        for name, tensor in iterate_weights("/data/run", prefix="model"):
            parameters[name].copy_(tensor)

    Threads read the next tensors while the caller uses one. Each tensor belongs to the caller: its memory, on the host, is used
    again only when the caller has dropped the tensor and all views of it.

    url: as for `ckpt.save`.
    step: the number of the step; None means the newest.
    prefix: the part of the state that is the model, such as "model" of {"model": model, "optimizer": optimizer}. Its names are
        yielded without the prefix.
    rename: how a name without the prefix becomes the yielded one: a function, or {regular expression: replacement}.
    rank, world: yield one of `world` parts of about equal bytes. Each tensor is in exactly one part.
    max_bytes: of tensors that are read ahead. A larger tensor is read alone.
    key: as for `ckpt.save`.

    Tied weights are yielded under each of their names, as one tensor. Entries that are not arrays are left out.

    Raises, before the first tensor:
        InvalidArgument: An argument has a value that makes no sense, or two tensors would get one name.
        StepNotFound: The repository has no such step.
        LeafNotFound: No array is below `prefix`.
        LeafMismatch: An array has a type that torch lacks.

    Raises, at the tensor that it concerns:
        IntegrityError: Stored bytes are damaged.
        StoreError: The store failed.
    """
    if not 0 <= rank < world:
        raise InvalidArgument(f"rank={rank}, world={world}: give a rank from 0 to world - 1")
    checkpoint = open_step(url, step, key)
    names_of = weight_names(checkpoint, prefix, rename)
    _require_torch_dtypes(checkpoint, names_of)
    mine = list(names_of) if world == 1 else _part(checkpoint, list(names_of), rank, world)
    return _tensors(checkpoint, mine, names_of, max_bytes)


def open_step(url: Url | None, step: int | None, key: KeyOption = None) -> Checkpoint:
    """Return a step of a repository, the newest complete one if `step` is None.

    url, key: as for `ckpt.save`.

    Raises:
        StepNotFound: There is none.
    """
    repository = open_repository(resolve_url(url), key)
    found = repository[step] if step is not None else repository.latest()
    if found is None:
        raise repository.no_step_error()
    return found


def weight_names(checkpoint: Checkpoint, prefix: str, rename: Rename | None) -> dict[str, list[str]]:
    """Return for each leaf of a model the names of its tensor.

    checkpoint: the step.
    prefix, rename: as for `iterate_weights`.

    Raises:
        InvalidArgument: The step has several parts and no prefix is given, or two tensors would get one name.
        LeafNotFound: No array is below `prefix`.
    """
    tree = checkpoint.tree()
    if not prefix and (parts := parts_with_arrays(tree)):
        raise InvalidArgument(
            f"{checkpoint.where} has the parts {', '.join(parts[:5])}: name that of the model, as in prefix={parts[0]!r}"
        )
    start = f"{prefix.rstrip('.')}." if prefix else ""
    new_name = as_rename_function(rename) if rename is not None else str
    found: dict[str, list[str]] = {}
    origin: dict[str, str] = {}
    for path, node in entries(tree):
        if not (path.startswith(start) and isinstance(node, dict) and "array" in node):
            continue
        name = new_name(path.removeprefix(start))
        if origin.setdefault(name, path) != path:
            raise InvalidArgument(
                f"rename gives {origin[name]} and {path} of {checkpoint.where} one name, {name}: change rename"
            )
        found.setdefault(node["array"], []).append(name)
    if not found:
        raise LeafNotFound(f"no array of {checkpoint.where} is below {prefix!r}{suggest(prefix, checkpoint)}")
    return found


def _require_torch_dtypes(checkpoint: Checkpoint, leaves: Iterable[str]) -> None:
    saved = checkpoint.saved()
    for leaf in leaves:
        try:
            empty_leaf(saved[leaf].dtype, (0,), {})
        except TypeError as error:
            raise LeafMismatch(f"leaf {leaf} of {checkpoint.where} can't be a tensor: {error}") from error


def _part(checkpoint: Checkpoint, names: Sequence[str], rank: int, world: int) -> list[str]:
    """Return the leaves of one of `world` contiguous parts of about equal bytes."""
    saved = checkpoint.saved()
    ordered = [name for name, _ in ordered_leaves(checkpoint.manifest().select(names))]
    sizes = np.array([nbytes_of(saved[name]) for name in ordered], np.int64)
    middles = np.cumsum(sizes) - sizes / 2
    parts = np.minimum(middles * world / max(1, sizes.sum()), world - 1).astype(int)
    return [name for name, part in zip(ordered, parts.tolist(), strict=True) if part == rank]


def _tensors(
    checkpoint: Checkpoint, leaves: Sequence[str], names_of: dict[str, list[str]], max_bytes: int
) -> Iterator[tuple[str, torch.Tensor]]:
    saved = checkpoint.saved()
    memory = _Memory(min(max_bytes, sum(nbytes_of(saved[leaf]) for leaf in leaves)))
    for leaf, filled in stream_leaves(checkpoint, leaves, lambda saved: _new_tensor(saved, memory), max_bytes):
        for name in names_of[leaf]:
            yield name, filled.value


def _new_tensor(saved: Saved, memory: _Memory) -> ArrayLeaf:
    """Return a tensor of its own memory; that of a large one is on huge pages, which are mapped several times faster."""
    nbytes = nbytes_of(saved)
    if nbytes < _HUGE_PAGES_FROM_BYTES:
        return empty_leaf(saved.dtype, saved.shape, {})
    dtype = empty_leaf(saved.dtype, (0,), {}).value.dtype
    return TorchLeaf(torch.from_numpy(memory.take(nbytes)).view(dtype).view(saved.shape))


class _Memory:
    """Memory of large tensors, which is used again once the caller has dropped a tensor and all views of it.

    The kernel zeroes new memory, which takes longer than reading a file from its cache.
    """

    def __init__(self, nbytes: int) -> None:
        """nbytes: how much memory is kept for reuse. A tensor for which it has no room gets new memory."""
        self._memory = np.frombuffer(map_huge_pages(round_up(nbytes), wiped_on_fork=False), np.uint8)
        self._free = [(0, len(self._memory))]
        self._returned: SimpleQueue[tuple[int, int]] = SimpleQueue()  # finalizers put into it, from any thread

    def take(self, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return `nbytes` bytes with any content. Only one thread may call it."""
        self._collect()
        size = round_up(nbytes)
        for i, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[i] = start + size, end
                found = self._memory[start : start + nbytes]
                weakref.finalize(found, self._returned.put, (start, start + size)).atexit = False
                return found
        return np.frombuffer(map_huge_pages(nbytes, wiped_on_fork=False), np.uint8)

    def _collect(self) -> None:
        """Join the ranges that are free with those that were returned."""
        while not self._returned.empty():
            self._free.append(self._returned.get())
        joined: list[tuple[int, int]] = []
        for start, end in sorted(self._free):
            if joined and joined[-1][1] == start:
                joined[-1] = joined[-1][0], end
            elif start < end:
                joined.append((start, end))
        self._free = joined
