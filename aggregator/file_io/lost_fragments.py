"""Which fragments of a file are gone, and its layout without them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckpt.aggregator.records.file_record import FileLayout, Fragment


@dataclass(frozen=True, slots=True)
class LostFragments:
    """Fragments of a file that can't be read any more."""

    objects: frozenset[str] = frozenset()
    """Whole objects, by name."""
    fragments: frozenset[tuple[str, int]] = frozenset()
    """Single ones: object and position."""
    is_incomplete: bool = False
    """The layout says itself that some are missing."""

    def __bool__(self) -> bool:
        return bool(self.objects or self.fragments or self.is_incomplete)

    def removed_from(self, layout: FileLayout) -> FileLayout:
        """The layout with these fragments missing."""

        def left(fragment: Fragment | None) -> Fragment | None:
            if fragment is None:
                return None
            name = layout.objects[fragment.object_index].name
            return None if name in self.objects or (name, fragment.position) in self.fragments else fragment

        pieces = (replace(p, fragments=tuple(left(f) for f in p.fragments)) for p in layout.stripes)
        return replace(layout, stripes=tuple(pieces))
