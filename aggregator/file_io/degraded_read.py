"""The degraded read of an erasure-coded stripe: ranges of unreadable fragments are rebuilt from any k other fragments."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ckpt.aggregator.file_io.fragment_reader import FragmentRange, FragmentReader
from ckpt.aggregator.file_io.verified_reconstruction import VerifiedReconstruction
from ckpt.aggregator.records.file_record import Stripe
from ckpt.storage.base.checksums import CELL_BYTES
from ckpt.storage.base.errors import StoreError, Unavailable


def rebuild_ranges(
    fragments: FragmentReader, stripe: Stripe, length: int, ranges: Mapping[int, FragmentRange],
    got: Mapping[int, np.ndarray], failed: dict[int, StoreError],
) -> None:  # fmt: skip
    """Rebuild ranges of fragments that could not be read, from the same range of any k other fragments, and verify them.

    length: of each fragment in bytes. ranges: all ranges that were to be read, by fragment number. got: the bytes of those
    that were read. failed: the error of each of the others.

    Raises Unavailable, and IntegrityError if all fragments that can't be read are damaged, or the rebuilt bytes are wrong.
    """
    k = fragments.layout.redundancy.data_fragments
    missing = {number: ranges[number] for number in failed}
    begin = min(each.begin for each in missing.values()) // CELL_BYTES * CELL_BYTES
    end = min(length, -(-max(each.end for each in missing.values()) // CELL_BYTES) * CELL_BYTES)
    usable = {
        i: data[begin - ranges[i].begin : end - ranges[i].begin]
        for i, data in got.items()
        if ranges[i].begin <= begin and ranges[i].end >= end
    }
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
        more, errors = fragments.read_many(stripe, dict.fromkeys(batch, (begin, end)), length, hedge)
        usable.update(more)
        scratch += more.values()
        failed = {i: error for i, error in failed.items() if i not in more} | errors
    rebuilt: dict[int, np.ndarray] = {}
    for number, each in missing.items():
        if (each.begin, each.end) == (begin, end):
            rebuilt[number] = np.frombuffer(each.target, np.uint8)
        else:
            rebuilt[number] = fragments.member_io.scratch.take(end - begin)
            scratch.append(rebuilt[number])

    def read_one_more() -> dict[int, np.ndarray]:
        more, _ = fragments.read_many(stripe, dict.fromkeys(untried[:1], (begin, end)), length, False)
        scratch.extend(more.values())
        return more

    VerifiedReconstruction(fragments.file_name, fragments.layout, stripe, begin).fill(rebuilt, usable, read_one_more)
    for number, each in missing.items():
        if (each.begin, each.end) != (begin, end):
            np.copyto(np.frombuffer(each.target, np.uint8), rebuilt[number][each.begin - begin : each.end - begin])
    for data in scratch:
        fragments.member_io.scratch.give_back(data)
