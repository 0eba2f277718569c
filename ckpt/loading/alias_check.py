"""Checks that no two targets of a load share memory: the leaf that is read last would overwrite the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ckpt.block_io.read_plan import Target
from ckpt.errors import LeafMismatch
from ckpt.format.manifest import Manifest
from ckpt.state.alias_notes import AliasNote
from ckpt.state.boxes import Box, whole_box
from ckpt.state.memory_overlap import AddressRange, address_range_of, overlapping_groups, overlapping_pairs


class _TargetBox(NamedTuple):
    """The leaf and the box of it that an address range receives."""

    name: str
    box: Box


def check_aliasing(
    targets: Sequence[Target], manifest: Manifest, where: str, alias_notes: Mapping[str, AliasNote] | None = None
) -> None:
    """Raise LeafMismatch if two targets share memory but get different bytes, or if elements of one target share memory.

    targets: the arrays to fill.
    where: the name of the step, for messages.
    alias_notes: by leaf name, how the saved array shared memory with others. Views that shared memory in the same way when they
        were saved agree in every byte that they share.

    Arrays that were saved tied are one leaf. Two leaves whose blocks have the same digests get the same bytes.
    """
    alias_notes = alias_notes or {}
    ranges: dict[str, list[tuple[int, int, Target]]] = {}
    for target in targets:
        leaf = target.leaf
        if not leaf.nbytes:
            continue
        if (begin := leaf.address()) is not None:  # the fast path for most leaves, of which there may be many
            ranges.setdefault("cpu", []).append((begin, begin + leaf.nbytes, target))
        elif (span := _span(target)) is not None:
            if span.overlaps_itself() and not _has_saved_layout(span, alias_notes):
                raise LeafMismatch(
                    f"leaf {target.name}: elements of its array in `like` share memory, as in an expanded view; give "
                    "`like` a copy of it (clone() in torch, copy() in numpy)"
                )
            ranges.setdefault(span.memory.device, []).append((span.begin, span.end(), target))
    for of_device in ranges.values():
        for run in overlapping_groups(of_device):
            spans = {(s.key, s.memory): s for s in map(_span, run) if s is not None}
            for a, b in overlapping_pairs([*spans.values()]):
                if not (_has_saved_aliasing(a, b, alias_notes) or _has_equal_blocks(a, b, manifest)):
                    names = " and ".join(dict.fromkeys((a.key.name, b.key.name)))
                    raise LeafMismatch(
                        f"leaf {names} of {where}: `like` has the same memory for two saved arrays; give each its own "
                        "array (untie them), or load one of them with only="
                    )


def _span(target: Target) -> AddressRange[_TargetBox] | None:
    memory = target.leaf.memory_layout()
    return None if memory is None else address_range_of(memory, _TargetBox(target.name, target.box or whole_box(memory.shape)))


def _has_saved_layout(span: AddressRange[_TargetBox], alias_notes: Mapping[str, AliasNote]) -> bool:
    """Return whether a target has the strides of the saved array."""
    note = alias_notes.get(span.key.name)
    return note is not None and note.has_same_layout(span.memory)


def _has_saved_aliasing(a: AddressRange[_TargetBox], b: AddressRange[_TargetBox], alias_notes: Mapping[str, AliasNote]) -> bool:
    """Return whether two targets share memory in the same way as the saved arrays did."""
    if not (_has_saved_layout(a, alias_notes) and _has_saved_layout(b, alias_notes)):
        return False
    first, second = alias_notes[a.key.name], alias_notes[b.key.name]
    return first.group == second.group and _array_address(a, first) - _array_address(b, second) == first.start - second.start


def _array_address(span: AddressRange[_TargetBox], note: AliasNote) -> int:
    """Return the address of the first element of the whole array, of which a target may be a box."""
    return span.memory.start - sum(o * step for o, step in zip(span.key.box.offset, note.strides, strict=True))


def _has_equal_blocks(a: AddressRange[_TargetBox], b: AddressRange[_TargetBox], manifest: Manifest) -> bool:
    """Return whether two leaves write the same bytes to the same memory, by the digests of their blocks."""
    if a.memory != b.memory or a.key.box != b.key.box:
        return False
    mine, other = (
        {(row.dtype, row.global_shape, row.box, row.digest, row.raw, row.start) for row in rows}
        for rows in manifest.find([a.key, b.key])
    )
    return bool(mine) and mine == other
