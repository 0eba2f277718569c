"""The position of a data loader of accelerate, seen by its fetches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpt.adapters.epoch_random import EpochRandom, RandomSnapshot, WatchedBatchSampler, ignore


class LoaderPosition:
    """The position in an epoch of a loader that `prepare` has returned: an entry of a state.

    accelerate fetches one batch ahead, so the loop has taken one batch less than were fetched.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._random = EpochRandom()
        self._random.use_order_of(loader)
        self._fetched = 0
        self._resume_at: int | None = None  # the number of batches to skip, while a resumed epoch has not begun
        self._before = 0  # batches of the epoch before the first fetch of the current iterator
        self._is_exhausted = True
        self._is_resuming = False
        self._stateful = bool(getattr(loader, "use_stateful_dataloader", False))
        self._watch_sampler(loader)
        self._watch_fetches(loader, 0)

    def state_dict(self) -> dict[str, Any]:
        taken = 0 if self._is_exhausted else self._before + self._fetched - 1
        state = self._random.state_dict() | {"batches": max(0, taken), "iteration": int(getattr(self._loader, "iteration", 0))}
        if self._stateful:
            state["loader"] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._random.load_state_dict(state)
        self._resume_at = int(state["batches"])
        if hasattr(self._loader, "iteration"):
            self._loader.iteration = int(state["iteration"])
        if "loader" in state:
            self._loader.load_state_dict(state["loader"])

    def note_loaded(self, now: RandomSnapshot) -> None:
        """Note the generators of the save; the next iterator may continue the saved epoch."""
        self._random.now.copy_from(now)
        self._is_resuming = False

    def watch_rest(self, loader: Any, count: int) -> None:
        """Watch a loader that skips `count` batches; it continues the saved epoch if the save was after this many."""
        self._is_resuming = self._resume_at == count and count > 0
        if hasattr(self._loader, "iteration"):
            loader.iteration = self._loader.iteration  # accelerate 1.12 begins at 0, the order of the first epoch
        self._watch_fetches(loader, count)

    # --- the fetches -------------------------------------------------------------------------------------------

    def _watch_sampler(self, loader: Any) -> None:
        sampler = getattr(getattr(loader, "base_dataloader", None), "batch_sampler", None)
        if sampler is not None:
            here = loader.base_dataloader.num_workers == 0
            loader.batch_sampler = WatchedBatchSampler(sampler, self._before_fetch if here else ignore)

    def _watch_fetches(self, loader: Any, skipped: int) -> None:
        inner = getattr(loader, "base_dataloader", None)
        if inner is None:
            return
        make = inner.__iter__
        inner.__iter__ = lambda: self._begin(make, 0 if getattr(loader, "skip_batches", 0) else skipped)

    def _begin(self, make: Any, before: int) -> Iterator[Any]:
        self._fetched, self._before, self._is_exhausted = 0, before, False
        if self._is_resuming:
            self._random.start_resumed()
        else:
            self._resume_at = None
            self._random.start_new()
        return self._fetches(iter(make()))

    def _fetches(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            self._before_next_fetch()
            try:
                batch = next(batches)
            except StopIteration:
                self._is_exhausted = True
                if self._before and hasattr(self._loader, "iteration"):
                    self._loader.iteration += 1  # the loader of the rest has counted the epoch, this one has not
                return
            self._fetched += 1
            yield batch

    def _before_next_fetch(self) -> None:
        if not self._is_resuming:
            self._random.before_ahead.take()
        elif self._resume_at is not None and self._before + self._fetched > self._resume_at:
            self._random.continue_from_save()
            self._is_resuming, self._resume_at = False, None

    def _before_fetch(self, number: int) -> None:
        if self._is_resuming and number == self._resume_at:
            self._random.before_ahead.apply()
