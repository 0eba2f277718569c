"""Decides which buffers of modules each rank stores for itself, because nothing guarantees that they are equal on all ranks.

The statistics of a BatchNorm differ by rank where nobody broadcasts them. No rank knows the values of another one during a
save, so each stores its own, up to a limit. The committer leaves out those that equal the first rank's (`buffer_merge.py`). Of
larger buffers, which are mostly constants, only the first rank's is stored, and samples are compared. The same holds for a
buffer that is a part of an array, such as a buffer of an expert.

Buffers that are views of one memory are one unit: a rank stores all of them for itself or none, and the committer leaves out
all or none. Otherwise a load would write values of two ranks into one memory.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ckpt.format.digest import digest
from ckpt.groups.base import Group
from ckpt.saving.block_plan import Block, LeafSpec
from ckpt.saving.wrapped_buffers import WrappedPart, wrapped_buffers
from ckpt.state.boxes import Replica, whole_box
from ckpt.state.leaves.base import ArrayLeaf, Bytes
from ckpt.state.rank_tree import own_name
from ckpt.state.tree import FlatState

if TYPE_CHECKING:
    from ckpt.saving.local_shards import LocalShard

OWN_BUFFER_BYTES = 4 << 20
"""The most bytes of buffers that each rank stores for itself, the smallest first. The statistics of a ResNet-152 have 0.6 MB,
those of an EfficientNet-B7 1.2 MB; masks, codebooks and quantised weights are mostly larger, and equal on all ranks."""


@dataclass(frozen=True, slots=True)
class BufferShares:
    """What this rank stores of the buffers that every rank has."""

    first: frozenset[str] = frozenset()
    """Buffers that this rank stores for all ranks, while the others store their own too."""
    own: frozenset[str] = frozenset()
    """Buffers that this rank stores for itself alone, under `own_name`."""
    large: dict[str, ArrayLeaf] = field(default_factory=dict)
    """Buffers beyond the limit, parts of arrays, and views of an array that is not a buffer: only the first rank that has a
    copy stores it."""
    memories: Mapping[str, str] = field(default_factory=dict)
    """By name, the memory that a buffer of `first` or `own` shares with others of them."""
    wrapped: Mapping[str, WrappedPart] = field(default_factory=dict)
    """By name, the buffers of which PerRank has all or some elements, which ranks do not compare."""


NO_SHARES = BufferShares()


def buffer_shares(flat: FlatState, shards: Sequence[LocalShard], group: Group) -> BufferShares:
    """Return what this rank stores. The choice depends only on sizes and names, so ranks with equal buffers choose the same."""
    if group.size == 1 or not flat.buffers:
        return NO_SHARES
    wrapped = wrapped_buffers(flat)
    covered = {name for name, part in wrapped.items() if part.is_whole}  # each rank stores their elements anyway
    names = flat.buffers - flat.per_rank - covered
    everywhere = Replica(group.rank, group.size, is_stored_whole=True)
    memories = {name: note.group for name, note in flat.aliases.items()}
    units: dict[tuple[str, str], list[_Candidate]] = {}  # by (name, "") or ("", memory), since a memory has the name of a leaf
    large: dict[str, ArrayLeaf] = {}
    for name, leaf, part, shape in shards:
        replica = everywhere if part is None else part.replica
        if name not in names or not leaf.nbytes or not replica.is_stored_whole or replica.total == 1:
            continue
        if part is not None and part.box != whole_box(shape):
            large[f"{name} at {list(part.box.offset)}"] = leaf
        elif own_name(name, group.rank) not in flat.leaves:
            key = ("", memories[name]) if name in memories else (name, "")
            units.setdefault(key, []).append(_Candidate(leaf.nbytes, name, leaf, replica))
    whole = Counter(memory for name, memory in memories.items() if name not in flat.per_rank and name not in covered)
    first: set[str] = set()
    own: set[str] = set()
    total = 0
    for (_, memory), unit in sorted(units.items(), key=lambda item: (_nbytes(item[1]), item[1][0].name)):
        has_others = bool(memory) and len(unit) < whole[memory]  # an array that is not a buffer, or a part of one
        total += 0 if has_others else _nbytes(unit)
        if has_others or total > OWN_BUFFER_BYTES:
            large.update((buffer.name, buffer.leaf) for buffer in unit)
            continue
        for buffer in unit:
            (own if buffer.replica.number else first).add(buffer.name)
    shared = {name: memory for name, memory in memories.items() if name in first or name in own}
    return BufferShares(frozenset(first), frozenset(own), large, shared, wrapped)


class _Candidate(NamedTuple):
    """A buffer that this rank may store for itself."""

    nbytes: int
    name: str
    leaf: ArrayLeaf
    replica: Replica


def _nbytes(unit: Iterable[_Candidate]) -> int:
    return sum(buffer.nbytes for buffer in unit)


class BufferDigests:
    """The digests of the buffers that this rank stores, which the writer threads compute. Safe to use from many threads."""

    def __init__(self, shares: BufferShares, rank: int) -> None:
        self._names = {name: name for name in shares.first} | {own_name(name, rank): name for name in shares.own}
        self._memories = shares.memories
        self._lock = threading.Lock()
        """Guards `_digests`."""
        self._digests: dict[str, bytes] = {}
        """By the name that the buffer has on all ranks."""

    def add_block(self, block: Block, specs: Sequence[LeafSpec], data: Bytes) -> None:
        """Compute the digests of those buffers that are in a block. data: the raw bytes of the block."""
        if not self._names:
            return
        found = {
            self._names[specs[piece.leaf].name]: digest("xxh3-128", data[piece.start : piece.start + piece.nbytes])
            for piece in block.pieces
            if specs[piece.leaf].name in self._names
        }
        if found:
            with self._lock:
                self._digests.update(found)

    def by_name(self) -> dict[str, bytes]:
        """Return the digests; call it when all blocks are written.

        Buffers that share memory have one digest, of all of them, so that they are equal on two ranks together or not at all.
        """
        with self._lock:
            found = dict(self._digests)
        of_memory: dict[str, list[bytes]] = {}
        for name in sorted(self._memories):
            of_memory.setdefault(self._memories[name], []).append(found[name])
        common = {memory: digest("xxh3-128", b"".join(digests)) for memory, digests in of_memory.items()}
        return found | {name: common[memory] for name, memory in self._memories.items()}
