"""Leaves of which this process has only some boxes, and `Shard`, with which a user declares them."""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

from ckpt.state.boxes import Box, Replica, flat_boxes, whole_box
from ckpt.state.leaves.base import ArrayLeaf, Bytes, LeafShard, MemoryLayout
from ckpt.storage.base.errors import InvalidArgument


class Shard:
    """The part of a global array that this rank has, for arrays that do not describe it themselves (as DTensor does).

        Shard(local, global_shape, offset)                          one box
        Shard([a, b], global_shape, [offset_a, offset_b])           several boxes
        Shard(local, global_shape, flat=start)                      elements [start, start + size) of the flattened array
        Shard(local, global_shape, offset, replica=(i, n))          copy i of n equal copies, which share the writing

    local: an array of any kind that can be saved, with the shape of the box; for `flat`, contiguous and of any shape; a list of
        arrays for several boxes. A load with the Shard in `like` fills the local arrays in place.
    global_shape: the shape of the whole array.
    offset: the index of the first element of the box, one number for each axis; for several boxes a list of them.
    flat: the index of the first element in the flattened global array (C order).
    replica: (i, n) for copy i of n.

    For example, four ranks with 256 of 1024 rows each:

        ckpt.save({"weights": ckpt.Shard(local, (1024, 64), (rank * 256, 0))}, url)

    Raises:
        InvalidArgument: An argument has a wrong value, or both or neither of `offset` and `flat` are given.
    """

    def __init__(
        self,
        local: Any,
        global_shape: Sequence[int],
        offset: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        flat: int | None = None,
        replica: tuple[int, int] | Replica = (0, 1),
    ) -> None:
        if (offset is None) == (flat is None):
            raise InvalidArgument("Shard: give either offset=, the corner of the box, or flat=, the first element")
        self.local = local
        self.global_shape = _as_integers(global_shape, "global_shape")
        self.flat = None if flat is None else operator.index(flat)
        if not isinstance(replica, Replica) and (not isinstance(replica, (tuple, list)) or len(replica) != 2):
            raise InvalidArgument(f"Shard: replica={replica!r}: use (i, n) for copy i of n")
        self.replica = Replica(*replica)
        if not 0 <= self.replica.number < self.replica.total:
            raise InvalidArgument(f"Shard: replica={tuple(replica)[:2]}: use (i, n) with 0 <= i < n")
        self._several = flat is None and isinstance(local, (list, tuple))
        self.offset: list[tuple[int, ...]] = []
        if offset is not None:
            corners: Any = offset if self._several else [offset]
            if self._several and (hasattr(corners, "__index__") or any(hasattr(corner, "__index__") for corner in corners)):
                raise InvalidArgument(f"Shard: offset={offset!r}: to a list of arrays give a list of offsets, as [(2, 0)]")
            self.offset = [_as_integers(o, "offset") for o in corners]
            if self._several and len(self.offset) != len(local):
                raise InvalidArgument(f"Shard: {len(local)} local arrays and {len(self.offset)} offsets: give one for each")

    def locals(self) -> list[Any]:
        """Return the local arrays."""
        return list(self.local) if self._several else [self.local]

    def replicas(self) -> list[Replica]:
        """Return which copy of each box this rank has."""
        return [self.replica] * len(self.offset)

    def __repr__(self) -> str:
        at = f"flat={self.flat}" if self.flat is not None else f"offset={self.offset}"
        return f"Shard(global_shape={self.global_shape}, {at}, replica={tuple(self.replica[:2])})"


class ShardedLeaf(ArrayLeaf):
    """A leaf as its local shards, which lie within it (see `require_in_bounds`).

    `shape` is the global shape; `nbytes` counts the bytes of the local shards.
    """

    __slots__ = ("_attributes", "_shards", "kind")

    kind: str  # type: ignore[misc]

    def __init__(
        self, value: Any, kind: str, shape: tuple[int, ...], dtype: str, itemsize: int, shards: list[LeafShard],
        attributes: Mapping[str, str | bool] | None = None,
    ) -> None:  # fmt: skip
        self.value = value
        self.kind = kind
        self.dtype = dtype
        self.shape = shape
        self.itemsize = itemsize
        self.nbytes = shards[0].leaf.nbytes if len(shards) == 1 else sum(p.leaf.nbytes for p in shards)
        self.flat = None
        self._shards = shards
        self._attributes = attributes or {}

    def shards(self) -> list[LeafShard]:
        return self._shards

    def layout(self) -> str:
        inner = getattr(self.value, "tensor", None) if isinstance(self.value, Shard) else self.value
        if hasattr(inner, "device_mesh"):
            from ckpt.state.leaves.dtensor import division_of_dtensor

            return division_of_dtensor(inner)
        if len(self._shards) == 1 and self._shards[0].box == whole_box(self.shape):
            return ""
        kind = "flat" if isinstance(self.value, Shard) and self.value.flat is not None else "boxes"
        return f"{kind} of {max((part.replica.total for part in self._shards), default=1)} copies"

    def full_copy(self) -> ArrayLeaf | None:
        if len(self._shards) != 1 or not isinstance(self.value, Shard):  # an array of a framework describes its own copies
            return None
        leaf, box, replica = self._shards[0]
        return leaf if replica.total > 1 and not replica.is_stored_whole and box == whole_box(self.shape) else None

    def read(self, box: Box, out: Bytes) -> None:
        raise AssertionError("a sharded leaf is read through its shards")

    def write(self, box: Box, data: Bytes) -> None:
        raise AssertionError("a sharded leaf is written through its shards")

    def identity(self) -> Hashable | None:
        found: list[Hashable] = [self.shape]
        for part in self._shards:
            if (known := part.leaf.identity()) is None:
                return None
            found += (part.box, known)
        return tuple(found) if self._shards else None

    def address(self) -> int | None:
        return self._shards[0].leaf.address() if len(self._shards) == 1 else None

    def whole_memory(self) -> MemoryLayout | None:
        is_whole = len(self._shards) == 1 and self._shards[0].box == whole_box(self.shape)
        return self._shards[0].leaf.memory_layout() if is_whole else None

    def attributes(self) -> Mapping[str, str | bool]:
        return self._attributes

    def is_immutable(self) -> bool:
        return all(p.leaf.is_immutable() for p in self._shards)

    def cuda_device(self) -> Any:
        return next((device for p in self._shards if (device := p.leaf.cuda_device()) is not None), None)

    def target(self) -> ArrayLeaf:
        parts = [LeafShard(p.leaf.target(), p.box, p.replica) for p in self._shards]
        if all(a.leaf is b.leaf for a, b in zip(parts, self._shards, strict=True)):
            return self
        if any(a.leaf.value is not b.leaf.value for a, b in zip(parts, self._shards, strict=True)):
            raise TypeError(
                "its local array cannot be filled in place: use a numpy array that can be written to or a torch tensor"
            )
        return ShardedLeaf(self.value, self.kind, self.shape, self.dtype, self.itemsize, parts, self._attributes)


def as_leaf(value: Shard) -> ArrayLeaf:
    """Return the leaf of a `Shard`; raise TypeError if its arrays and boxes do not match."""
    from ckpt.state.leaves import as_leaf as leaf_of

    leaves = []
    for local in value.locals():
        leaf = leaf_of(local)
        if leaf is None or leaf.shards() is not None:
            raise TypeError(f"the local array of a Shard must be a plain array, not a {type(local).__name__}")
        leaves.append(leaf)
    if not leaves:
        raise TypeError("a Shard without a local array has no dtype: give it an array of size 0")
    first = leaves[0]
    if any(leaf.dtype != first.dtype for leaf in leaves):
        raise TypeError(
            f"the local arrays of a Shard have the dtypes {', '.join(leaf.dtype for leaf in leaves)}: give all of them one"
        )
    if value.flat is not None:
        parts = _flat_shards(first, value)
    else:
        boxes = [Box(offset, leaf.shape) for leaf, offset in zip(leaves, value.offset, strict=True)]
        parts = [
            require_in_bounds(LeafShard(*part), value.global_shape)
            for part in zip(leaves, boxes, value.replicas(), strict=True)
        ]
    return ShardedLeaf(value, first.kind, value.global_shape, first.dtype, first.itemsize, parts, first.attributes())


def _flat_shards(leaf: ArrayLeaf, value: Shard) -> list[LeafShard]:
    """Return the boxes of a range of the flattened array, each a view of the local memory."""
    from ckpt.state.leaves import as_leaf as leaf_of

    assert value.flat is not None
    flat = value.local.reshape(-1)
    end = value.flat + len(flat)
    if len(flat) and not 0 <= value.flat < end <= math.prod(value.global_shape):
        shape = list(value.global_shape)
        raise TypeError(
            f"a flat shard of elements {value.flat} to {end} does not lie in an array of shape {shape}: correct flat= or "
            "global_shape="
        )
    parts = []
    at = 0
    for box in flat_boxes(value.global_shape, value.flat, end):
        view = flat[at : at + box.size].reshape(box.shape)
        part = leaf_of(view)
        assert part is not None
        parts.append(LeafShard(part, box, value.replica))
        at += box.size
    memory = leaf.memory_layout()
    if parts and memory is not None and (mine := parts[0].leaf.memory_layout()) is not None and mine.start != memory.start:
        raise TypeError("the local array of a flat Shard must be contiguous, so that it can be filled in place")
    return parts


def require_in_bounds(part: LeafShard, shape: tuple[int, ...]) -> LeafShard:
    """Return `part`; raise TypeError if its box is not within an array of `shape` or its memory has another shape."""
    leaf, box, _ = part
    if len(box.offset) != len(shape) or len(leaf.shape) != len(shape):
        raise TypeError(
            f"a shard of shape {list(leaf.shape)} at {list(box.offset)} can't lie in an array of shape {list(shape)}: each "
            f"must have {len(shape)} {'number' if len(shape) == 1 else 'numbers'}"
        )
    if leaf.shape != box.shape or any(
        o < 0 or o + n > length for o, n, length in zip(box.offset, box.shape, shape, strict=True)
    ):
        raise TypeError(
            f"a shard of shape {list(leaf.shape)} at {list(box.offset)} does not lie in an array of shape {list(shape)}: "
            "correct its offset or the global shape"
        )
    return part


def _as_integers(values: Iterable[SupportsIndex], what: str) -> tuple[int, ...]:
    try:
        return tuple(operator.index(v) for v in values)
    except TypeError:
        raise InvalidArgument(f"Shard: {what}={values!r}: use a sequence of whole numbers") from None
