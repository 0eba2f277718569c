"""The reconstruction of fragments of an erasure code, which verifies the computed bytes by the checksums of the record."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ckpt.aggregator.placement import erasure
from ckpt.aggregator.records.file_record import FileLayout, Stripe
from ckpt.storage.base.checksums import CELL_BYTES, find_bad_cells
from ckpt.storage.base.errors import IntegrityError

log = logging.getLogger("ckpt")

Arrays = Mapping[int, np.ndarray]
"""Bytes of fragments by the number of the fragment, each the same range."""


@dataclass(frozen=True, slots=True)
class VerifiedReconstruction:
    """The reconstruction of one range of the fragments of a stripe."""

    file_name: str
    """The path and its namespace, for messages."""
    layout: FileLayout
    """A layout of the file with the checksums of the fragments to compute, as far as the record has them."""
    stripe: Stripe
    """The stripe of this layout."""
    begin: int
    """The first byte of the range in each fragment. The range consists of whole cells."""

    def fill(self, targets: Arrays, sources: Arrays, read_more: Callable[[], Arrays]) -> None:
        """Compute the fragments of `targets` from any k others, and verify them.

        If the result is wrong, it is computed once more, and then without each of the sources in turn: a bit may have changed
        in memory, in the processor, or in the parity when it was written.

        sources: verified fragments. read_more: returns further ones; called at most once.

        Raises IntegrityError if every result is wrong, and StoreError if there are fewer than k sources.
        """
        k, m = self.layout.redundancy.data_fragments, self.layout.redundancy.parity_fragments
        code = erasure.erasure_code(k, m)
        wrong: list[int] = []
        for chosen in _source_sets(k, sources, read_more):
            code.reconstruct(chosen, targets)
            previous, wrong = wrong, [i for i, data in targets.items() if not self._is_right(code, i, data, chosen)]
            if not wrong:
                return
            if not previous:
                log.warning("%s; computing it again", self._problem(wrong))
        raise IntegrityError(
            f"{self._problem(wrong)}; the memory of this host may be faulty: try again on another host, and if that fails "
            "write the file again, from a copy if it can't be read"
        )

    def _is_right(self, code: erasure.ErasureCode, number: int, data: np.ndarray, sources: Arrays) -> bool:
        """Return whether a computed fragment has the checksums of the record, or if that has none, gives a source back."""
        fragment = self.stripe.fragments[number]
        if fragment is not None:
            first = self.begin // CELL_BYTES
            return not find_bad_cells(data.data, fragment.cell_checksums[8 * first : 8 * (first - (-len(data) // CELL_BYTES))])
        omitted, *others = sources
        again = np.empty_like(data)
        code.reconstruct({number: data, **{i: sources[i] for i in others}}, {omitted: again})
        return np.array_equal(again, sources[omitted])

    def _problem(self, numbers: list[int]) -> str:
        names = " and ".join(map(self._name_of, numbers))
        start, end = self.stripe.start, self.stripe.start + self.stripe.nbytes
        return f"{self.file_name}: {names} of bytes {start} to {end}, computed from the others, does not match its checksums"

    def _name_of(self, number: int) -> str:
        fragment = self.stripe.fragments[number]
        if fragment is None:
            return f"the missing fragment {number}"
        return f"fragment {number} of {self.layout.objects[fragment.object_index].member}"


def _source_sets(k: int, sources: Arrays, read_more: Callable[[], Arrays]) -> Iterator[dict[int, np.ndarray]]:
    """Return sets of k sources, in the order in which to use them."""
    first = dict(sorted(sources.items())[:k])
    yield first
    yield first
    for number, data in {**sources, **read_more()}.items():
        if number not in first:
            for omitted in first:
                yield {i: each for i, each in first.items() if i != omitted} | {number: data}
