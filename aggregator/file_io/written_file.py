"""Publishes a written file: fragments on lost or removed members move first, and in a new era its objects get second names."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from ckpt.aggregator.file_io.lost_fragments import LostFragments
from ckpt.aggregator.file_io.member_choice import MemberChoice
from ckpt.aggregator.file_io.member_io import MemberIO
from ckpt.aggregator.file_io.publication import Condition, MembersRemoved, Publication, Publisher
from ckpt.aggregator.file_io.rebuild import rebuild_fragments
from ckpt.aggregator.file_io.relink import relink_objects
from ckpt.aggregator.records import file_record
from ckpt.aggregator.records.file_record import FileLayout, FileRecord
from ckpt.storage.base.errors import Unavailable

_TRIES = 3
"""How often a file is published. Each further try follows a removal of members that have fragments of it."""


class WrittenFile:
    """The publication of a file, once all of its bytes are written. Used by one thread.

    It is created before the first object of the file, because the fence number of that moment protects the objects.

    version: that of the file. condition: what must be at the path; its `base` is the file to which this one was appended.
    choice: the members that get its fragments, shared with the writer.
    """

    def __init__(
        self, member_io: MemberIO, publisher: Publisher, path: str, version: str, condition: Condition, choice: MemberChoice
    ) -> None:
        self._member_io = member_io
        self._publisher = publisher
        self._path = path
        self._version = version
        self._condition = condition
        self._choice = choice
        self._fence_number = publisher.fence_number
        self._previous_layouts: list[FileLayout] = []  # the same objects under the names that they had before a new era

    def publish(self, file: FileRecord) -> FileRecord:
        """Publish the file, and return its record. Fragments on members that were removed meanwhile move to others first.

        Raises AlreadyExists or Changed if the condition does not hold: then nothing was published. After any other error it may
        have been published.
        """
        unsettled_number = None  # the fence number of an earlier try, which a member may have accepted
        removed: MembersRemoved | None = None
        for _ in range(_TRIES):
            number = None if file.layout is None else self._fence_number
            publication = Publication(self._path, file, self._condition, number, unsettled_number)
            outcome = self._publisher.publish(publication, self._relink_after_fence)
            if isinstance(outcome, FileRecord):
                for layout in self._previous_layouts:
                    self._member_io.discard_layouts([self._own_objects(layout)], _object_names(outcome.layout))
                return outcome
            removed, rest = outcome, outcome.publication
            file, self._condition, unsettled_number = rest.file, rest.condition, rest.unsettled_number
            assert file.layout is not None
            lost = LostFragments(frozenset(o.name for o in file.layout.objects if o.member in outcome.members))
            file = replace(file, layout=self.rebuild_lost(file.layout, lost))
        assert removed is not None
        raise removed.error()

    def _relink_after_fence(self, file: FileRecord) -> FileRecord | None:
        """Return the file after a new era: with second names for its objects, and with lost fragments rebuilt.

        Returns None if a repair has deleted too many objects.
        """
        if file.layout is None:
            return file
        number = self._publisher.fence_number
        layout, unlinked = relink_objects(self._member_io, file.layout, _object_names(self._own_objects(file.layout)))
        self._previous_layouts.append(file.layout)
        remaining = LostFragments(unlinked).removed_from(layout)
        needed = layout.redundancy.data_fragments
        if file_record.min_fragments(remaining) < needed <= file_record.min_fragments(file.layout):
            return None
        self._fence_number = number
        return replace(file, layout=self.rebuild_lost(layout, LostFragments(unlinked)) if unlinked else layout)

    def _own_objects(self, layout: FileLayout) -> FileLayout:
        """Return a layout of only the objects that this writer made, without those of the file that it appends to."""
        base = self._condition.base
        base_names = _object_names(base.layout if base is not None else None)
        return replace(layout, objects=tuple(o for o in layout.objects if o.name not in base_names), stripes=())

    def rebuild_lost(self, layout: FileLayout, lost: LostFragments) -> FileLayout:
        """Return the layout without the lost fragments, and with rebuilt ones as far as other members accept them.

        A later repair rebuilds the rest. Raises Unavailable or NoSpace if a stripe has fewer fragments than a write needs.
        """
        remaining, redundancy = lost.removed_from(layout), layout.redundancy
        base = self._condition.base
        base_count = len(base.layout.stripes) if base is not None and base.layout is not None else 0
        touched = [i for i, stripe in enumerate(remaining.stripes) if i >= base_count or stripe != layout.stripes[i]]

        def fewest_fragments() -> int:
            return file_record.min_fragments(remaining, [remaining.stripes[i] for i in touched])

        is_too_few = fewest_fragments() < redundancy.min_write_fragments
        if is_too_few or fewest_fragments() < redundancy.total_fragments <= len(self._choice.responsive_candidates()):
            with suppress(Unavailable):
                self._member_io.update_domains()
                remaining = lost.removed_from(
                    rebuild_fragments(self._member_io, self._path, self._version, layout, lost, allow_partial=True)
                )
        if fewest_fragments() < redundancy.min_write_fragments:
            raise self._choice.too_few_error()
        if fewest_fragments() < redundancy.total_fragments:
            self._member_io.warn_under_replicated(self._path, fewest_fragments(), redundancy)
        return file_record.drop_unused_objects(remaining)


def _object_names(layout: FileLayout | None) -> set[str]:
    """Return the names of the objects of a layout."""
    return set() if layout is None else {o.name for o in layout.objects}
