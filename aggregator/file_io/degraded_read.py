"""The degraded read of an erasure-coded stripe: ranges of unreadable fragments are rebuilt from any k other fragments."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ckpt.aggregator.file_io.fragment_reader import FragmentReader
from ckpt.aggregator.placement import erasure
from ckpt.aggregator.records.file_record import Stripe
from ckpt.storage.base.checksums import CELL_BYTES
from ckpt.storage.base.errors import StoreError, Unavailable


def rebuild_ranges(
    fragments: FragmentReader, stripe: Stripe, length: int, ranges: dict[int, tuple[int, int, memoryview]],
    read_ranges: Mapping[int, tuple[int, np.ndarray]], failed: dict[int, StoreError],
) -> None:  # fmt: skip
    """Rebuild ranges of fragments that could not be read, from the same range of any k other fragments.

    ranges: begin, end and target by fragment number. read_ranges: what was already read of other fragments, as begin and
    data. failed: the errors so far.
    """
    k = fragments.layout.redundancy.data_fragments
    begin = min(b for b, _, _ in ranges.values()) // CELL_BYTES * CELL_BYTES
    end = min(length, -(-max(e for _, e, _ in ranges.values()) // CELL_BYTES) * CELL_BYTES)
    usable = {i: data[begin - b : end - b] for i, (b, data) in read_ranges.items() if b <= begin and b + len(data) >= end}
    scratch: list[np.ndarray] = []
    untried = [i for i in fragments.reading_order(stripe) if i not in failed and i not in usable]
    last = False
    while len(usable) < k:
        timed_out = [i for i in failed if isinstance(failed[i], Unavailable) and stripe.fragments[i] is not None]
        if not untried and not last:
            untried, last = timed_out, True  # no other fragments are left: wait for the slow ones
        batch, untried = untried[: k - len(usable)], untried[k - len(usable) :]
        if not batch:
            raise fragments.unreadable_error(stripe, failed)
        hedge = not last and bool(untried or timed_out)
        got, errors = fragments.read_many(stripe, dict.fromkeys(batch, (begin, end)), length, hedge)
        usable.update(got)
        scratch += got.values()
        failed = {i: error for i, error in failed.items() if i not in got} | errors
    rebuilt: dict[int, np.ndarray] = {}
    for number, (b, e, target) in ranges.items():
        if (b, e) == (begin, end):
            rebuilt[number] = np.frombuffer(target, np.uint8)
        else:
            rebuilt[number] = fragments.member_io.scratch.take(end - begin)
            scratch.append(rebuilt[number])
    erasure.erasure_code(k, fragments.layout.redundancy.parity_fragments).reconstruct(usable, rebuilt)
    for number, (b, e, target) in ranges.items():
        if (b, e) != (begin, end):
            np.copyto(np.frombuffer(target, np.uint8), rebuilt[number][b - begin : e - begin])
    for data in scratch:
        fragments.member_io.scratch.give_back(data)
