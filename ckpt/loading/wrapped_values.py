"""Loads arrays in PerRank that share memory with other arrays of the state: buffers of a module in the same state.

A step has the value of each rank of what is wrapped, but it may have only the first rank's value of a buffer. So the elements
of a wrapped array are set last. If as many ranks load as have saved, a buffer of which each rank has stored its own agrees
with them anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ckpt.format.manifest import Saved
from ckpt.loading.finish_functions import Finish
from ckpt.loading.target_matching import TargetMatcher
from ckpt.repository.checkpoint import Checkpoint
from ckpt.state.alias_notes import AliasNote
from ckpt.state.boxes import whole_box
from ckpt.state.dtype_names import numpy_dtype
from ckpt.state.leaves import as_leaf
from ckpt.state.leaves.base import ArrayLeaf, MemoryLayout
from ckpt.state.memory_overlap import address_range_of, covers, overlapping_pairs
from ckpt.state.tree import RANK_SUFFIX


@dataclass(frozen=True, slots=True)
class WrappedValues:
    """The arrays in PerRank that share memory with other targets of a load."""

    names: frozenset[str] = frozenset()
    """The names of targets that are wrapped, or all of whose elements a wrapped array sets."""
    writes: Sequence[tuple[ArrayLeaf, ArrayLeaf]] = ()
    """For each wrapped array that is set last, the array into which it is read, and the array of `like`."""

    def write_before(self, finish: Finish) -> Finish:
        """Return a function that sets the elements of the arrays of `like`, and then returns the result of `finish`."""
        if not self.writes:
            return finish

        def write_and_finish() -> object:
            for source, leaf in self.writes:
                data = source.flat
                assert data is not None
                leaf.write(whole_box(leaf.shape), data)
            return finish()

        return write_and_finish


@dataclass(frozen=True, slots=True)
class _AliasedTarget:
    """A target whose saved array shared memory with others."""

    index: int
    """The index in `TargetMatcher.targets`."""
    name: str
    leaf: ArrayLeaf
    memory: MemoryLayout
    is_wrapped: bool


def split_off_wrapped_values(matcher: TargetMatcher, checkpoint: Checkpoint) -> WrappedValues:
    """Change the targets so that wrapped arrays do not conflict with others, and return what is to be written afterwards.

    An array that is in the state a second time, wrapped in PerRank, gets the wrapped value at once. Targets that share memory
    in another way than when they were saved stay as they are, so that `check_aliasing` refuses them.
    """
    targets = _aliased_targets(matcher)
    wrapped = {target.index for target in targets if target.is_wrapped}
    if not wrapped:
        return WrappedValues()
    partners: dict[int, list[_AliasedTarget]] = {}
    by_device: dict[str, list[_AliasedTarget]] = {}
    for target in targets:
        by_device.setdefault(target.memory.device, []).append(target)
    for of_device in by_device.values():
        for a, b in overlapping_pairs([address_range_of(target.memory, target) for target in of_device]):
            for one, other in ((a.key, b.key), (b.key, a.key)):
                if one.is_wrapped and not other.is_wrapped:
                    partners.setdefault(one.index, []).append(other)
    names = {target.name for target in targets if target.is_wrapped}
    writes: list[tuple[ArrayLeaf, ArrayLeaf]] = []
    for target in targets:
        others = partners.get(target.index, ())
        if others and all(_is_same_array(target, other, checkpoint.saved()) for other in others):
            for other in others:
                matcher.targets[other.index] = (target.name, other.leaf)
        elif others and all(_shared_memory_alike(target, other, matcher.rank_aliases) for other in others):
            source = as_leaf(np.empty(target.leaf.shape, numpy_dtype(target.leaf.dtype)))
            assert source is not None
            matcher.targets[target.index] = (target.name, source)
            shards = target.leaf.shards()
            writes.append((source, target.leaf if shards is None else shards[0].leaf))
            names.update(other.name for other in others if covers(target.memory, other.memory))
    return WrappedValues(frozenset(names), writes)


def _aliased_targets(matcher: TargetMatcher) -> list[_AliasedTarget]:
    """Return the targets that are whole arrays with elements, and that shared memory when they were saved."""
    found = []
    for i, (name, leaf) in enumerate(matcher.targets):
        if name in matcher.rank_aliases and leaf.nbytes and (memory := leaf.whole_memory()) is not None:
            found.append(_AliasedTarget(i, name, leaf, memory, RANK_SUFFIX.search(name) is not None))
    return found


def _is_same_array(target: _AliasedTarget, other: _AliasedTarget, saved: Mapping[str, Saved]) -> bool:
    return target.memory == other.memory and saved[target.name] == saved[other.name]


def _shared_memory_alike(target: _AliasedTarget, other: _AliasedTarget, aliases: Mapping[str, AliasNote]) -> bool:
    """Return whether two targets share memory in the same way as the saved arrays did, which may be of two ranks."""
    a, b = aliases[target.name], aliases[other.name]
    return (
        a.is_of_same_memory(b)
        and a.has_same_layout(target.memory)
        and b.has_same_layout(other.memory)
        and target.memory.start - other.memory.start == a.start - b.start
    )
