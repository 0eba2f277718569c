"""Where a job is in its data, whatever the number of ranks that share it. Pure.

Samples of an epoch are counted by all ranks together, in one global order; batches are numbered over the whole run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ckpt.storage.base.errors import InvalidArgument

LastBatchRule = Literal["short", "drop", "pad"]
"""What becomes of the samples that are left at the end of an epoch and fill no batch."""

Ranges = tuple[tuple[int, int], ...]
"""Numbers as first and last, ascending, apart."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """What comes next. The same on all ranks."""

    epoch: int = 0
    sample: int = 0
    """Position in the order of the epoch; so many samples of it are done."""
    batch: int = 0
    """Number of the next batch, over all epochs, those that are passed over counted."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A global batch: which positions of an epoch's order it takes, and where the job is after it."""

    number: int
    epoch: int
    start: int
    stop: int
    """Beyond the size where the last one is filled up: counted on from the beginning of the same order."""
    after: Cursor

    def share(self, rank: int, world_size: int) -> range:
        """The positions that one rank takes."""
        mine = rank_share(self.stop - self.start, rank, world_size)
        return range(self.start + mine.start, self.start + mine.stop)


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """How epochs of `size` samples are cut into batches."""

    size: int
    global_batch: int
    last: LastBatchRule = "short"
    skip: Ranges = ()
    """Numbers of batches to pass over."""

    def skip_ahead(self, at: Cursor) -> Cursor:
        """The same place, past all that is passed over and past the end of an epoch."""
        while True:
            left = self.size - at.sample
            if left <= 0 or (self.last == "drop" and left < self.global_batch):
                at = Cursor(at.epoch + 1, 0, at.batch)
            elif is_in_ranges(self.skip, at.batch):
                at = Cursor(at.epoch, self._stop(at), at.batch + 1)
            else:
                return at

    def batch(self, at: Cursor) -> Batch:
        """The next batch of a settled place."""
        stop = self._stop(at)
        return Batch(at.batch, at.epoch, at.sample, stop, self.skip_ahead(Cursor(at.epoch, stop, at.batch + 1)))

    def rest(self, at: Cursor) -> Iterator[Batch]:
        """From a settled place to the end of its epoch."""
        epoch = at.epoch
        while at.epoch == epoch:
            batch = self.batch(at)
            yield batch
            at = batch.after

    def _stop(self, at: Cursor) -> int:
        stop = at.sample + self.global_batch
        return min(stop, self.size) if self.last == "short" else stop


def rank_share(count: int, rank: int, world_size: int) -> range:
    """The part of `count` things that one rank takes: in the order of the ranks, and as equal as can be."""
    return range(count * rank // world_size, count * (rank + 1) // world_size)


def epoch_order(size: int, seed: int, epoch: int, shuffle: bool = True) -> NDArray[np.int64]:
    """The samples of an epoch in the order in which they come. Depends on nothing but the arguments.

    numpy promises that RandomState gives the same numbers for ever (NEP 19); the newer Generator may change.
    """
    if not shuffle:
        return np.arange(size)
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence((seed, epoch)))).permutation(size)


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """64 bits for the randomness of one sample in one epoch (splitmix64's mixing)."""
    mixed = 0
    for value in (seed, epoch, index):
        mixed = (mixed + value + 0x9E3779B97F4A7C15) & _MASK_64
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK_64
        mixed ^= mixed >> 31
    return mixed


_MASK_64 = (1 << 64) - 1


# --- batches to pass over --------------------------------------------------------------------------------------

SKIP_VARIABLE = "CKPT_SKIP"
"""The environment variable that names batches to pass over, as "120-121,340". Set by `ckpt-run` after a roll-back."""


def skipped_batches_from_env(environ: Mapping[str, str]) -> Ranges:
    """What the environment says."""
    return parse_ranges(environ.get(SKIP_VARIABLE, ""))


def parse_ranges(text: str) -> Ranges:
    """ "120-121,340" as ((120, 121), (340, 340)); raises InvalidArgument."""
    found = []
    for word in filter(None, map(str.strip, text.split(","))):
        first, dash, last = word.partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else True)) or (dash and int(last) < int(first)):
            raise InvalidArgument(f"{word!r} names no batches; write numbers and ranges, as in {SKIP_VARIABLE}=120-121,340")
        found.append((int(first), int(last or first)))
    return merge_ranges(found)


def format_ranges(ranges: Ranges) -> str:
    """The other way."""
    return ",".join(f"{first}-{last}" if first < last else str(first) for first, last in ranges)


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """All numbers of some ranges, those that touch joined."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return tuple(joined)


def is_in_ranges(ranges: Ranges, number: int) -> bool:
    return any(first <= number <= last for first, last in ranges)
