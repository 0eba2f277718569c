"""Notes in the tree about saved arrays that shared memory, so that a load may fill such views in place.

A view and its base array are stored as two arrays. If they shared memory when they were saved, their stored bytes agree in the
shared part, so a load may write both to memory that they share in the same way.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ckpt.errors import UnsupportedLeaf
from ckpt.state.boxes import Box
from ckpt.state.leaves.base import ArrayLeaf, MemoryLayout
from ckpt.state.memory_overlap import AddressRange, address_range_of, overlapping_groups, overlapping_pairs

_RANK_SUFFIXES = re.compile(r"(@\d+)+$")  # of a group, and of its first leaf if that belongs to one rank alone


class AliasNote(NamedTuple):
    """The layout of an array in memory that it shared when it was saved: the field `alias` of its node."""

    group: str
    """A name that all arrays of one shared memory have in common."""
    start: int
    """Address of the first element, in bytes from the lowest address of the group."""
    strides: tuple[int, ...]
    """In bytes, one for each axis."""
    view: str
    """`MemoryLayout.view` of the saved array."""

    def is_of_same_memory(self, other: AliasNote) -> bool:
        """Return whether both are of one memory, or of the memories that correspond to each other on two ranks."""
        return _RANK_SUFFIXES.sub("", self.group) == _RANK_SUFFIXES.sub("", other.group)

    def has_same_layout(self, memory: MemoryLayout) -> bool:
        """Return whether `memory`, of a whole array or of a box, has the strides and the view of the saved array."""
        return (
            self.view == memory.view
            and len(self.strides) == len(memory.strides)
            and all(n < 2 or a == b for n, a, b in zip(memory.shape, self.strides, memory.strides, strict=True))
        )


def read_alias_notes(node: dict[str, Any], found: dict[str, AliasNote], of_rank: dict[str, AliasNote]) -> None:
    """Add the note of an array node to `found`, and to `of_rank` the one of the rank whose values are loaded.

    They are the same, unless the ranks that saved shared memory in different ways. A malformed note counts as none.
    """
    name = node["array"]
    if (note := _decode_note(node.get("alias"))) is not None:
        found[name] = note
    if (note := _decode_note(node[RANK_ALIAS]) if RANK_ALIAS in node else note) is not None:
        of_rank[name] = note


RANK_ALIAS = "alias of rank"
"""In a tree that is resolved for one rank: the note of an array on this rank, where it is another one than `alias`."""


def _decode_note(note: Any) -> AliasNote | None:
    try:
        group, start, strides, view = (note[field] for field in AliasNote._fields)
        return AliasNote(str(group), operator.index(start), tuple(operator.index(s) for s in strides), str(view))
    except (KeyError, TypeError):
        return None


def differing_aliases(note: Any, notes_by_rank: Mapping[int, Any]) -> dict[str, Any]:
    """Return the notes of those ranks on which an array shared memory in another way than `note` describes."""
    expected = _without_rank(note)
    return {str(rank): its for rank, its in notes_by_rank.items() if _without_rank(its) != expected}


def _without_rank(note: Any) -> Any:
    return None if note is None else {**note, "group": _RANK_SUFFIXES.sub("", note["group"])}


class _LeafBox(NamedTuple):
    """The owner of an address range: a whole leaf (`box` is None), or the shard `box` of a leaf."""

    name: str
    box: Box | None
    is_shard: bool
    """Whether it is a shard, which may be the whole array."""


def find_alias_notes(
    leaves: Mapping[str, ArrayLeaf], addresses: Sequence[int | None], rank: int | None
) -> dict[str, AliasNote]:
    """Return a note, by leaf name, for each array that shares memory with another array or with itself.

    addresses: `ArrayLeaf.address()` of each leaf.
    rank: the rank of this process in its group, else None. Sharing may differ between ranks, so each rank names its own groups.

    Raises UnsupportedLeaf if a shard shares memory with anything but the same shard: other ranks may not share it.
    """
    if None not in addresses and _are_disjoint(addresses, [leaf.nbytes for leaf in leaves.values()]):  # as in most states
        return {}
    ranges: dict[str, list[tuple[int, int, tuple[_LeafBox, MemoryLayout]]]] = {}
    self_overlapping: list[AddressRange[_LeafBox]] = []
    for name, leaf in leaves.items():
        memory = leaf.memory_layout()
        if memory is not None and leaf.flat is not None and not memory.view:  # contiguous: cannot overlap itself
            if leaf.nbytes:
                at = ranges.setdefault(memory.device, [])
                at.append((memory.start, memory.start + leaf.nbytes, (_LeafBox(name, None, False), memory)))
            continue
        for leaf_box, layout in _leaf_boxes(name, leaf, memory):
            span = address_range_of(layout, leaf_box)
            ranges.setdefault(layout.device, []).append((span.begin, span.end(), (leaf_box, layout)))
            if span.overlaps_itself():
                self_overlapping.append(span)
    pairs = [
        pair
        for of_device in ranges.values()
        for run in overlapping_groups(of_device)
        for pair in overlapping_pairs([address_range_of(layout, leaf_box) for leaf_box, layout in run])
    ]
    _refuse_aliased_shards(pairs)
    found: dict[str, AliasNote] = {}
    position = {name: i for i, name in enumerate(leaves)}
    for group in _connected_spans(self_overlapping, pairs):
        # The first in the tree, so that ranks with equal states choose equal names, wherever their memory lies.
        name = min((span.key.name for span in group), key=position.__getitem__)
        name = name if rank is None else f"{name}@{rank}"
        low = min(address_range_of(span.memory, None).begin for span in group)  # a span of a pair may count from elsewhere
        for span in group:
            if span.key.box is None:
                found[span.key.name] = AliasNote(name, span.memory.start - low, span.memory.strides, span.memory.view)
    return found


def _are_disjoint(addresses: Sequence[Any], lengths: Sequence[int]) -> bool:
    """Return whether no two of these address ranges overlap."""
    if len(addresses) < 100:  # numpy is slower for so few
        ranges = sorted(zip(addresses, lengths, strict=True))
        return all(a + n <= b for (a, n), (b, _) in itertools.pairwise(ranges))
    first = np.array(addresses, np.int64)
    order = np.argsort(first)
    last = (first + np.array(lengths, np.int64))[order]
    return bool(np.all(first[order][1:] >= last[:-1]))


def _refuse_aliased_shards(pairs: Sequence[tuple[AddressRange[_LeafBox], AddressRange[_LeafBox]]]) -> None:
    """Raise UnsupportedLeaf for two different views of one memory if at least one is a shard.

    A view that belongs to this rank alone may share memory with a shard that is the whole array, since a load sets it last.
    """
    for a, b in pairs:
        if not (a.key.is_shard or b.key.is_shard) or (a.key[1:], a.memory) == (b.key[1:], b.memory):
            continue
        is_own = _RANK_SUFFIXES.search(a.key.name) or _RANK_SUFFIXES.search(b.key.name)
        if not is_own or a.key.box is not None or b.key.box is not None:
            raise UnsupportedLeaf(
                f"leaf {a.key.name} and leaf {b.key.name} share memory, and one is a shard of an array, so a load could not "
                "decide which of them to write: save a clone of one, or leave one out"
            )


def _leaf_boxes(name: str, leaf: ArrayLeaf, memory: MemoryLayout | None) -> Iterator[tuple[_LeafBox, MemoryLayout]]:
    """Yield the memory of a leaf that has elements, or of each of its shards."""
    if memory is not None:
        if leaf.nbytes:
            yield _LeafBox(name, None, False), memory
        return
    if leaf.nbytes and (whole := leaf.whole_memory()) is not None:
        yield _LeafBox(name, None, True), whole
        return
    for part in leaf.shards() or ():
        if part.leaf.nbytes and (its := part.leaf.memory_layout()) is not None:
            yield _LeafBox(name, part.box, True), its


def _connected_spans(
    self_overlapping: Sequence[AddressRange[_LeafBox]], pairs: Sequence[tuple[AddressRange[_LeafBox], AddressRange[_LeafBox]]]
) -> list[list[AddressRange[_LeafBox]]]:
    """Return the connected groups of spans that `pairs` link, and a group for each span that overlaps only itself."""
    group_of: dict[_LeafBox, list[AddressRange[_LeafBox]]] = {span.key: [span] for span in self_overlapping}
    for a, b in pairs:
        first, second = (group_of.setdefault(span.key, [span]) for span in (a, b))
        if first is not second:
            first.extend(second)
            group_of.update((span.key, first) for span in second)
    return list({id(group): group for group in group_of.values()}.values())


def add_alias_notes(node: Any, notes: dict[str, AliasNote]) -> None:
    """Write the notes into the array nodes of a tree."""
    for found in _array_nodes(node):
        if note := notes.get(found["array"]):
            found["alias"] = note._asdict()


def _array_nodes(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, list):
        for item in node:
            yield from _array_nodes(item)
    elif isinstance(node, dict):
        if "array" in node:
            yield node
        for value in node.values():
            yield from _array_nodes(value)
