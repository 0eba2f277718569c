"""The position of a Trainer in its data, seen by its fetches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from torch.utils.data import IterableDataset

from ckpt.adapters.data_random import WatchedCollate
from ckpt.adapters.epoch_random import EpochRandom, WatchedBatchSampler, ignore
from ckpt.adapters.trl_samples import GeneratedSamples

T = TypeVar("T")


class DataPosition:
    """How many batches of the epoch this rank has taken, and the generators at three moments. An entry of a state.

    samples: those that a trainer has generated from the batches and will use again, if it does so.
    """

    def __init__(self, samples: GeneratedSamples | None = None) -> None:
        self._samples = samples
        self._random = EpochRandom()
        self._taken = 0
        self._iterator: Iterator[object] | None = None  # that of the current epoch
        self._ended: Iterator[object] | None = None  # the last iterator that has reached its end
        self._fetched = 0  # how many fetches of the current epoch this process has made
        self._fetches_of_batch = 1  # how many fetches give one batch of this rank: a dispatcher fetches for all ranks
        self._is_stream = False  # whether a resumed epoch must read its samples again from the start
        self._resume_at: int | None = None  # the number of batches to skip, while a resumed epoch has not begun
        self._marks_passed = 0  # of two moments in the fetches of a resumed epoch: before the one ahead, and at the save

    def state_dict(self) -> dict[str, Any]:
        found = {"batches": self._taken} | self._random.state_dict()
        return found if self._samples is None else found | {"samples": self._samples.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._taken = self._resume_at = int(state["batches"])
        self._iterator, self._marks_passed = None, 0
        self._random.load_state_dict(state)
        if self._samples is not None:
            self._samples.load_state_dict(state.get("samples"))

    @property
    def batches(self) -> int:
        """How many batches of the epoch this rank has taken."""
        return self._taken

    @property
    def is_at_end(self) -> bool:
        """Whether the batches of the epoch have ended, and not only the updates of the training."""
        return self._ended is not None and self._ended is self._iterator

    def continue_random(self) -> None:
        """Set the generators to their states at the save, unless the fetches of the resumed epoch have done so.

        The Trainer calls it before an epoch that begins, or after it has fetched the batches of the first resumed update.
        """
        if self._marks_passed < 2:
            self._random.now.apply()
        self._resume_at = None

    # --- the fetches -------------------------------------------------------------------------------------------

    def watch(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield batches of an epoch, and record the generators before each; a new iterator is a new epoch."""
        while batches is not self._ended:  # the Trainer asks very often for more after the end of a stream
            self._before_next(batches)
            try:
                batch = next(batches)
            except StopIteration:
                self._ended = batches
                if self._resume_at is not None:  # the save was after the last batch
                    self.continue_random()
                return
            self._taken += 1
            yield batch

    def _before_next(self, batches: Iterator[object]) -> None:
        if batches is self._iterator:
            self._random.before_ahead.take()
            return
        self._iterator, self._fetched = batches, 0
        if self._resume_at is None:
            self._taken = 0
            self._random.start_new()
        else:
            self._random.start_resumed()

    def wrap(self, loader: Any) -> Any:
        """Return a training loader of accelerate, changed so that its fetches are seen."""
        inner = getattr(loader, "base_dataloader", None)
        sampler = getattr(inner, "batch_sampler", None)
        if inner is None or sampler is None:
            return loader
        self._random.use_order_of(loader)
        in_this_process = inner.num_workers == 0
        if in_this_process:
            inner.collate_fn = WatchedCollate(inner.collate_fn, self._after_fetch)
        if not getattr(loader, "split_batches", True):  # one rank fetches the batches of all
            self._fetches_of_batch = loader.state.num_processes
        self._is_stream = isinstance(inner.dataset, IterableDataset)
        if self._is_stream:
            return loader
        # accelerate builds the loader of a resumed epoch from these attributes; DataLoader itself allows no change of them.
        loader.batch_sampler = WatchedBatchSampler(sampler, self._before_fetch if in_this_process else ignore)
        return loader

    def _after_fetch(self) -> None:
        self._fetched += 1
        batches, others = divmod(self._fetched, self._fetches_of_batch)
        if others:
            return
        if batches == 1 and self._resume_at is None:  # the first call of an epoch fetches two batches
            self._random.before_ahead.take()
        if self._is_stream:
            self._before_fetch(batches)

    def _before_fetch(self, number: int) -> None:
        """Set the generators for the fetch of a batch of a resumed epoch.

        number: how many batches of the epoch are before it.
        """
        if self._is_stream:
            self._random.before_replay(number, self._resume_at)
        if number == self._resume_at:
            self._random.before_ahead.apply()
            self._marks_passed += 1
        elif self._resume_at is not None and number == self._resume_at + 1:
            self._random.continue_from_save()
            self._marks_passed += 1
