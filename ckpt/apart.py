"""Whether the places that a load is to fill lie apart: of two leaves in one memory, the one read last would win."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ckpt.alias_notes import AliasNote
from ckpt.manifest import Manifest
from ckpt.memory_overlap import Span, adjacent, overlapping, span_of
from ckpt.shard import Box, whole
from ckpt.storage.errors import LeafMismatch
from ckpt.wanted import Target


class _Place(NamedTuple):
    """What of which leaf a span is for."""

    name: str
    box: Box


def check_apart(
    targets: Sequence[Target], manifest: Manifest, where: str, noted: Mapping[str, AliasNote] | None = None
) -> None:
    """Raise LeafMismatch where two targets share memory, unless both get the same bytes; or where one does with itself.

    Tied arrays that were saved tied are one leaf, and so are two whose blocks have the same digests. Views that shared
    memory in the same way when they were saved agree in every byte that they share: `noted` has these by leaf name.
    """
    noted = noted or {}
    places: dict[str, list[tuple[int, int, Target]]] = {}
    for target in targets:
        leaf = target.leaf
        if not leaf.nbytes:
            continue
        if (begin := leaf.address()) is not None:  # the most by far, and there may be many
            places.setdefault("cpu", []).append((begin, begin + leaf.nbytes, target))
        elif (span := _span(target)) is not None:
            if span.overlaps_itself() and not _as_saved(span, noted):
                raise LeafMismatch(
                    f"leaf {target.name}: elements of its array in `like` share memory, as in an expanded view; give "
                    "`like` a copy of it (clone() in torch, copy() in numpy)"
                )
            places.setdefault(span.memory.device, []).append((span.begin, span.end(), target))
    for of_device in places.values():
        for run in adjacent(of_device):
            spans = {(s.key, s.memory): s for s in map(_span, run) if s is not None}
            for a, b in overlapping([*spans.values()]):
                if not (_as_saved_together(a, b, noted) or _equal(a, b, manifest)):
                    names = " and ".join(dict.fromkeys((a.key.name, b.key.name)))
                    raise LeafMismatch(
                        f"leaf {names} of {where}: `like` has the same memory for what was saved apart; give each its own "
                        "array (untie them), or load one of them with only="
                    )


def _span(target: Target) -> Span[_Place] | None:
    memory = target.leaf.memory()
    return None if memory is None else span_of(memory, _Place(target.name, target.box or whole(memory.shape)))


def _as_saved(span: Span[_Place], noted: Mapping[str, AliasNote]) -> bool:
    """Whether a target steps through its memory as the saved array did."""
    note = noted.get(span.key.name)
    return note is not None and note.steps_as(span.memory)


def _as_saved_together(a: Span[_Place], b: Span[_Place], noted: Mapping[str, AliasNote]) -> bool:
    """Whether two targets share memory in the way in which the saved arrays did."""
    if not (_as_saved(a, noted) and _as_saved(b, noted)):
        return False
    first, second = noted[a.key.name], noted[b.key.name]
    return first.group == second.group and _origin(a, first) - _origin(b, second) == first.start - second.start


def _origin(span: Span[_Place], note: AliasNote) -> int:
    """The address that the first element of the whole array has or would have, where a target is a box of it."""
    return span.memory.start - sum(o * step for o, step in zip(span.key.box.offset, note.strides, strict=True))


def _equal(a: Span[_Place], b: Span[_Place], manifest: Manifest) -> bool:
    """Whether two leaves put the same bytes to the same place, as far as the digests of their blocks tell."""
    if a.memory != b.memory or a.key.box != b.key.box:
        return False
    mine, other = (
        {(row.dtype, row.global_shape, row.box, row.digest, row.raw, row.start) for row in rows}
        for rows in manifest.find([a.key, b.key])
    )
    return bool(mine) and mine == other
