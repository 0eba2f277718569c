"""The set of lost fragments of a file, and the file's layout without them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckpt.aggregator.records.file_record import FileLayout, Fragment


@dataclass(frozen=True, slots=True)
class LostFragments:
    """Fragments of a file that can't be read any more."""

    objects: frozenset[str] = frozenset()
    """The names of objects of which every fragment is lost."""
    fragments: frozenset[tuple[str, int]] = frozenset()
    """Single fragments, as the name of the object and the position."""
    is_incomplete: bool = False
    """Whether fragments are missing in the layout already."""

    def __bool__(self) -> bool:
        return bool(self.objects or self.fragments or self.is_incomplete)

    def removed_from(self, layout: FileLayout) -> FileLayout:
        """Return the layout with None in place of these fragments."""

        def unless_lost(fragment: Fragment | None) -> Fragment | None:
            if fragment is None:
                return None
            name = layout.objects[fragment.object_index].name
            return None if name in self.objects or (name, fragment.position) in self.fragments else fragment

        stripes = (replace(s, fragments=tuple(unless_lost(f) for f in s.fragments)) for s in layout.stripes)
        return replace(layout, stripes=tuple(stripes))
