"""Loaders of training data with a saved position: no sample is missed or repeated on any number of ranks.

Usage:

    data = ckpt.data.Loader(dataset, global_batch=256, num_workers=4)
    state = {"model": model, "optimizer": optimizer, "data": data}
    with ckpt.Checkpointer(url) as ck:
        state, start = ck.restore(state)
        for step, batch in zip(range(start, total), data.forever()):
            ck.step(step, state, loss=train_step(batch))
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import numpy as np

from ckpt.groups import as_group
from ckpt.storage.base.errors import CkptError, InvalidArgument
from ckpt.storage.base.plural import format_count
from ckpt.support.validation import check_choice, check_function, check_switch, checked_not_negative, checked_positive
from ckpt.training import heartbeat_page
from ckpt.training.batch_order import (
    Cursor,
    EpochPlan,
    LastBatchRule,
    epoch_order,
    is_in_ranges,
    rank_share,
    sample_seed,
    skipped_batches_from_env,
)

T = TypeVar("T")


class _ResumableBatches:
    """Base of Loader and Stream: their position in the data, as an entry of a state."""

    def __init__(self, global_batch: int, rank: int | None, world_size: int | None) -> None:
        if (rank is None) != (world_size is None):
            raise InvalidArgument("give both rank= and world_size=, or neither to take them from the environment")
        if rank is None or world_size is None:
            group = as_group("auto")
            rank, world_size = group.rank, group.size
        global_batch = checked_positive("global_batch", global_batch, "the number of samples of all ranks, at least 1")
        world_size = checked_positive("world_size", world_size, "the number of ranks, at least 1")
        rank = checked_not_negative("rank", rank, f"a rank from 0 to {world_size - 1}")
        if rank >= world_size:
            raise InvalidArgument(f"rank={rank}: with world_size={world_size}, give a rank from 0 to {world_size - 1}")
        if global_batch < world_size:
            raise InvalidArgument(
                f"global_batch={global_batch} leaves some of {world_size} ranks without a sample: give a larger one"
            )
        self._rank, self._world_size, self._global_batch = rank, world_size, global_batch
        self._skipped_batches = skipped_batches_from_env(os.environ)
        self._heartbeat_page = heartbeat_page.own_page()
        self._cursor = Cursor()
        self._last_batch = -1
        self._load_count = 0

    @property
    def epoch(self) -> int:
        """The number of the epoch of the next batch."""
        return self._cursor.epoch

    @property
    def batch(self) -> int:
        """The number of the batch that the loop took last, over all epochs; -1 before the first batch of this object."""
        return self._last_batch

    def _record_batch(self, number: int, after: Cursor) -> None:
        self._cursor, self._last_batch = after, number
        if self._heartbeat_page is not None:
            self._heartbeat_page.publish_batch(number)

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining batches of this epoch."""
        raise NotImplementedError

    def forever(self) -> Iterator[Any]:
        """Yield the remaining batches of this epoch, then those of the next epochs without an end.

            for step, batch in zip(range(start, total), data.forever()):
                ...

        The loader must be the second argument of zip, which then takes no batch that the loop does not get.

        Raises:
            CkptError: An epoch has no batch.
        """
        while True:
            before = self._cursor
            yield from self
            if before == self._cursor:
                raise CkptError(
                    f"epoch {before.epoch} has no batch: give more samples, or with last='drop' a smaller global_batch"
                )

    def state_dict(self) -> dict[str, int]:
        """Return the position after the last batch that the loop took. It is small, and the same on all ranks."""
        return {"epoch": self._cursor.epoch, "sample": self._cursor.sample, "batch": self._cursor.batch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a saved position; existing iterators continue from there, too."""
        self._continue_from(_saved_cursor(state))

    def _continue_from(self, at: Cursor) -> None:
        self._cursor = at
        self._load_count += 1


def _saved_cursor(state: Mapping[str, int]) -> Cursor:
    return Cursor(int(state["epoch"]), int(state["sample"]), int(state["batch"]))


class Loader(_ResumableBatches):
    """Loads global batches of a map-style dataset, each split over the ranks, with a torch DataLoader and its workers.

        data = ckpt.data.Loader(dataset, global_batch=256, num_workers=4)
        state = {"model": model, "optimizer": optimizer, "data": data}
        for batch in data:  # the rest of this epoch; data.forever() continues with the next
            ...

    dataset: has `__len__` and `__getitem__`, and may have `__getitems__`.
    global_batch: the number of samples of all ranks together. It may change between two runs.
    seed: determines the order of each epoch and the randomness of each sample.
    shuffle: whether an epoch has a random order.
    last: what happens to samples at the end of an epoch that fill no batch. "short" makes a smaller batch of them, "drop"
        leaves them out, and "pad" fills the batch from the beginning of the same order, so that some samples appear twice.
    rank, world_size: this rank and the number of ranks that share the data, if these are not all ranks of the job (tensor or
        pipeline parallel). Without them, those of the job.
    collate_fn: makes a batch from a list of samples, as for DataLoader.
    options: all other arguments of DataLoader, such as num_workers and pin_memory.

    A batch counts as done when the loop has taken it, not when a worker has fetched it. The order of an epoch depends only on
    `seed` and the number of the epoch, and the ranks split a global batch in rank order. So another number of ranks trains on
    the same samples at the same step. If the number of ranks does not divide `global_batch`, shares differ by one sample;
    weight the mean of a rank by its samples then.

    Before each sample, the global random generators of Python, numpy and torch are seeded from `seed`, the epoch and the index
    of the sample, in workers and in the main process. A dataset with `__getitems__` is seeded once for a share, by its first
    sample. `collate_fn` continues with the same generators. So random transforms depend neither on a restart nor on the number
    of workers or ranks. The generators of the loop are unchanged: save those with `ckpt.RandomState()`.

    Batches whose numbers are in CKPT_SKIP, which `ckpt-run` sets, are skipped and not read.

    Raises:
        InvalidArgument: An argument has a value that makes no sense, the dataset has no length, or it has too few samples.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        last: LastBatchRule = "short",
        rank: int | None = None,
        world_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> None:
        from torch import Generator
        from torch.utils.data import DataLoader, default_collate

        super().__init__(global_batch, rank, world_size)
        if ours := _RESERVED_OPTIONS & options.keys():
            raise InvalidArgument(f"{', '.join(sorted(ours))}: leave this out, because Loader sets order and size of batches")
        check_choice("last", last, "short", "drop", "pad")
        check_switch("shuffle", shuffle)
        if collate_fn is not None:
            check_function("collate_fn", collate_fn, "the list of the samples of this rank that returns a batch")
        self._seed = checked_not_negative("seed", seed, "a whole number of at least 0")
        self._shuffle = bool(shuffle)
        self._plan = EpochPlan(_sample_count(dataset), self._global_batch, last, self._skipped_batches)
        if last == "drop" and self._plan.size < self._global_batch:
            few = format_count(self._plan.size, "sample")
            raise InvalidArgument(f"{few} make no batch of {self._global_batch}: give a smaller global_batch")
        self._generator = Generator()
        try:
            self._loader = DataLoader(
                _ShareDataset(dataset, collate_fn or default_collate),
                batch_size=None,
                sampler=_ShareSampler(self),
                collate_fn=_return_unchanged,
                generator=self._generator,
                **options,
            )
        except (TypeError, ValueError) as error:
            raise InvalidArgument(
                f"correct {', '.join(sorted(options))}, which DataLoader of torch refuses: {error}"
            ) from error
        self._cursor = self._first_batch(Cursor())

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        whole, left = divmod(self._plan.size, self._global_batch)
        return whole + (left > 0 and self._plan.last != "drop")

    def __iter__(self) -> Iterator[Any]:
        while True:
            loads = self._load_count
            # The workers take their first seed from this generator, so that nothing is drawn from that of the loop.
            self._generator.manual_seed(sample_seed(self._seed, self.epoch, self._cursor.sample) >> 1)
            for data, batch in zip(self._loader, self._plan.rest(self._cursor), strict=True):
                self._record_batch(batch.number, batch.after)
                yield data
                if self._load_count != loads:  # the loop has restored another position
                    break
            else:
                return

    def keys(self) -> Iterator[tuple[int, int, list[int]]]:
        """Yield seed, epoch and sample indices of each share of this rank in the rest of the epoch."""
        at = self._cursor
        samples = epoch_order(self._plan.size, self._seed, at.epoch, self._shuffle)
        for batch in self._plan.rest(at):
            positions = np.asarray(batch.share(self._rank, self._world_size)) % self._plan.size
            yield self._seed, at.epoch, samples[positions].tolist()

    def state_dict(self) -> dict[str, int]:
        return super().state_dict() | {"seed": self._seed, "shuffle": int(self._shuffle), "size": self._plan.size}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a saved position, with the saved seed and shuffling.

        Raises InvalidArgument if the dataset has another number of samples, or a last short batch leaves a rank without one.
        """
        if state["size"] != self._plan.size:
            raise InvalidArgument(
                f"the dataset has {self._plan.size} samples, and had {state['size']} when its position was saved; use that "
                "dataset, or leave the loader out of the state to start from the first sample"
            )
        at = self._first_batch(_saved_cursor(state))
        self._seed, self._shuffle = int(state["seed"]), bool(state["shuffle"])
        self._continue_from(at)

    def _first_batch(self, at: Cursor) -> Cursor:
        """Return the position of the first batch at `at` or later. Raises InvalidArgument if a rank would get no sample."""
        for done in (0, at.sample):
            left = (self._plan.size - done) % self._global_batch
            if self._plan.last == "short" and 0 < left < self._world_size:
                few = f"{format_count(left, 'sample')} for {format_count(self._world_size, 'rank')}"
                raise InvalidArgument(f"the last batch of an epoch has {few}; use last='drop' or 'pad'")
        return self._plan.skip_ahead(at)


def _sample_count(dataset: Any) -> int:
    """Return the number of samples. Raises InvalidArgument for an empty dataset, and for one without a length or an index."""
    kind = type(dataset).__name__
    try:
        size = len(dataset)
    except TypeError as error:
        raise InvalidArgument(f"{kind} has no length; use ckpt.data.Stream for data without an index") from error
    if not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")):
        raise InvalidArgument(f"{kind} has no __getitem__; use ckpt.data.Stream for data without an index")
    if not size:
        raise InvalidArgument("the dataset has no samples: look whether its path and its filters are right")
    return size


_RESERVED_OPTIONS = frozenset({"batch_size", "sampler", "batch_sampler", "drop_last", "generator", "in_order"})


class Stream(_ResumableBatches):
    """Loads global batches from an iterable for each epoch, each batch split over the ranks.

        data = ckpt.data.Stream(lambda epoch: file_names(epoch), global_batch=64, collate=read_files)
        for step, batch in zip(range(start, total), data.forever()):
            ...

    make: a function of the number of an epoch that returns an iterable of its items. The order must be the same on all ranks
        and in every call.
    global_batch: the number of items of all ranks together.
    collate: makes a batch from the list of the items of this rank.
    seek: a function of epoch and n that returns the items from item n on. Without it, a restored Stream reads and discards the
        items before its position.
    last: what happens to items at the end of an epoch that fill no batch. "short" makes a smaller batch of them, in which the
        share of a rank may be empty. "drop" leaves them out.
    rank, world_size: as for `Loader`.

    Every rank iterates over all items and keeps its share of each global batch. So items should be cheap, such as file names or
    offsets, and `collate` should do the reading.

    Batches whose numbers are in CKPT_SKIP, which `ckpt-run` sets, are skipped.

    Raises:
        InvalidArgument: An argument has a value that makes no sense.
    """

    def __init__(
        self,
        make: Callable[[int], Iterable[Any]],
        *,
        global_batch: int,
        collate: Callable[[list[Any]], Any] = list,
        seek: Callable[[int, int], Iterable[Any]] | None = None,
        last: Literal["short", "drop"] = "short",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__(global_batch, rank, world_size)
        check_function("make", make, "the number of an epoch that returns the items, such as lambda epoch: names")
        if seek is not None:
            check_function("seek", seek, "an epoch and an item that returns the items, such as lambda epoch, n: names[n:]")
        check_function("collate", collate, "the list of the items of this rank that returns a batch")
        check_choice("last", last, "short", "drop")
        self._make, self._seek, self._collate, self._last = make, seek, collate, last

    def __iter__(self) -> Iterator[Any]:
        while True:
            loads, at = self._load_count, self._cursor
            items = self._items_from(at)
            while chunk := list(itertools.islice(items, self._global_batch)):
                if len(chunk) < self._global_batch and self._last == "drop":
                    break
                at = Cursor(at.epoch, at.sample + len(chunk), at.batch + 1)
                if is_in_ranges(self._skipped_batches, at.batch - 1):
                    self._cursor = at
                    continue
                mine = rank_share(len(chunk), self._rank, self._world_size)
                data = self._collate(chunk[mine.start : mine.stop])
                self._record_batch(at.batch - 1, at)
                yield data
                if self._load_count != loads:  # the loop has restored another position
                    break
            if self._load_count == loads:
                if at.sample:  # otherwise the epoch has no batch, and `forever` raises
                    self._cursor = Cursor(at.epoch + 1, 0, at.batch)
                return

    def _items_from(self, at: Cursor) -> Iterator[Any]:
        if self._seek is not None:
            return iter(self._seek(at.epoch, at.sample))
        return itertools.islice(iter(self._make(at.epoch)), at.sample, None)


# --- what the DataLoader runs in its workers -------------------------------------------------------------------


class _ShareSampler:
    """The sampler of the DataLoader, which starts at the position of the Loader."""

    def __init__(self, owner: Loader) -> None:
        self._loader = owner

    def __iter__(self) -> Iterator[tuple[int, int, list[int]]]:
        return self._loader.keys()


class _ShareDataset:
    """The dataset of the DataLoader. One entry is the share of this rank in a global batch."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset = dataset
        self._collate = collate

    def __getitem__(self, key: tuple[int, int, list[int]]) -> Any:
        seed, epoch, indices = key
        with _preserve_random_state():
            if callable(several := getattr(self._dataset, "__getitems__", None)):
                _seed_generators(sample_seed(seed, epoch, indices[0]))
                return self._collate(several(indices))
            samples = []
            for index in indices:
                _seed_generators(sample_seed(seed, epoch, index))
                samples.append(self._dataset[index])
            return self._collate(samples)


def _return_unchanged(data: T) -> T:
    return data


@contextlib.contextmanager
def _preserve_random_state() -> Iterator[None]:
    """Restore the global random generators at the end, without those of devices, which a dataset should not use."""
    torch = sys.modules["torch"]
    python, numpy, of_torch = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(of_torch)


def _seed_generators(number: int) -> None:
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    sys.modules["torch"].default_generator.manual_seed(number >> 1)
