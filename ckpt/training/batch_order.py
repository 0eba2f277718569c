"""Pure functions of the order of training data: the samples of an epoch, its batches, and the share of each rank.

`data_loader.py` saves and restores the position in this order.

A position does not depend on the number of ranks. The samples of an epoch are counted in one global order, and batches are
numbered over the whole run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ckpt.storage.base.errors import InvalidArgument

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LastBatchRule = Literal["short", "drop", "pad"]
"""What happens to the samples at the end of an epoch that fill no batch."""

Ranges = tuple[tuple[int, int], ...]
"""Ranges of numbers, each as (first, last), in ascending order and with gaps between them."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """The position of the next batch, which is the same on all ranks."""

    epoch: int = 0
    sample: int = 0
    """How many samples of the epoch are done; the index of the next one in the order of the epoch."""
    batch: int = 0
    """Number of the next batch, over all epochs, including skipped batches."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A global batch: its range in the order of an epoch, and the position after it."""

    number: int
    epoch: int
    start: int
    stop: int
    """Larger than the epoch if the last batch is padded; positions beyond the end continue at the beginning of the order."""
    after: Cursor

    def share(self, rank: int, world_size: int) -> range:
        """Return the positions of the samples of one rank."""
        mine = rank_share(self.stop - self.start, rank, world_size)
        return range(self.start + mine.start, self.start + mine.stop)


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """How an epoch of `size` samples is split into batches."""

    size: int
    global_batch: int
    last: LastBatchRule = "short"
    skip: Ranges = ()
    """Numbers of the batches to skip."""

    def skip_ahead(self, at: Cursor) -> Cursor:
        """Return the position of the next batch that exists and is not skipped, at `at` or later."""
        while True:
            left = self.size - at.sample
            if left <= 0 or (self.last == "drop" and left < self.global_batch):
                at = Cursor(at.epoch + 1, 0, at.batch)
            elif is_in_ranges(self.skip, at.batch):
                at = Cursor(at.epoch, self._stop(at), at.batch + 1)
            else:
                return at

    def batch(self, at: Cursor) -> Batch:
        """Return the batch at a position that `skip_ahead` returned."""
        stop = self._stop(at)
        return Batch(at.batch, at.epoch, at.sample, stop, self.skip_ahead(Cursor(at.epoch, stop, at.batch + 1)))

    def rest(self, at: Cursor) -> Iterator[Batch]:
        """Yield the batches from a position that `skip_ahead` returned to the end of its epoch."""
        epoch = at.epoch
        while at.epoch == epoch:
            batch = self.batch(at)
            yield batch
            at = batch.after

    def _stop(self, at: Cursor) -> int:
        stop = at.sample + self.global_batch
        return min(stop, self.size) if self.last == "short" else stop


def rank_share(count: int, rank: int, world_size: int) -> range:
    """Return the range of `count` items that one rank takes. Ranges are in rank order and differ by at most one item."""
    return range(count * rank // world_size, count * (rank + 1) // world_size)


def epoch_order(size: int, seed: int, epoch: int, shuffle: bool = True) -> NDArray[np.int64]:
    """Return the indices of all samples in the order of an epoch, shape (size,). The result depends only on the arguments.

    numpy guarantees that RandomState returns the same numbers in all versions (NEP 19); the newer Generator may change.
    """
    import numpy as np  # not at the top: ckpt-run, which imports this module for its ranges, starts without numpy

    if not shuffle:
        return np.arange(size)
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence((seed, epoch)))).permutation(size)


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Return a 64-bit seed for one sample in one epoch, mixed as in splitmix64."""
    mixed = 0
    for value in (seed, epoch, index):
        mixed = (mixed + value + 0x9E3779B97F4A7C15) & _MASK_64
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK_64
        mixed ^= mixed >> 31
    return mixed


_MASK_64 = (1 << 64) - 1


# --- batches to skip -------------------------------------------------------------------------------------------

SKIP_VARIABLE = "CKPT_SKIP"
"""The environment variable with the batches to skip, as "120-121,340". `ckpt-run` sets it after a roll-back."""


def skipped_batches_from_env(environ: Mapping[str, str]) -> Ranges:
    """Return the batches to skip that the environment names."""
    return parse_ranges(environ.get(SKIP_VARIABLE, ""))


def parse_ranges(text: str) -> Ranges:
    """Return ((120, 121), (340, 340)) for "120-121,340"; raise InvalidArgument for other text."""
    found = []
    for part in filter(None, map(str.strip, text.split(","))):
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else True)) or (dash and int(last) < int(first)):
            raise InvalidArgument(f"{part!r} names no batches; write numbers and ranges, as in {SKIP_VARIABLE}=120-121,340")
        found.append((int(first), int(last or first)))
    return merge_ranges(found)


def format_ranges(ranges: Ranges) -> str:
    """Return "120-121,340" for ((120, 121), (340, 340))."""
    return ",".join(f"{first}-{last}" if first < last else str(first) for first, last in ranges)


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the union of some ranges, with overlapping and adjacent ones merged."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return tuple(joined)


def is_in_ranges(ranges: Ranges, number: int) -> bool:
    """Return whether a number lies in one of these ranges, whose first and last numbers both belong to them."""
    return any(first <= number <= last for first, last in ranges)
