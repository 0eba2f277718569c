"""The position of a data loader of accelerate, seen by its fetches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.utils.data import IterableDataset

from ckpt.adapters.epoch_random import PERSISTENT_WORKERS, EpochRandom, RandomSnapshot, WatchedBatchSampler, ignore
from ckpt.support.user_warning import warn_user

T = TypeVar("T")


class LoaderPosition:
    """The position in an epoch of a loader that `prepare` has returned: an entry of a state.

    accelerate fetches one batch ahead, so the loop has taken one batch less than were fetched. After the last batch both
    numbers are equal. A DataLoaderDispatcher ("dispatcher" below) fetches the batches of all ranks on rank 0.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._random = EpochRandom()
        self._random.use_order_of(loader)
        self._running = _Pass(loader, 0, 0)
        self._resume_at: int | None = None  # the number of batches to skip, while a resumed epoch has not begun
        self._has_ended = False  # whether all batches of the resumed epoch were taken
        self._is_resuming = False  # whether the running pass continues a saved epoch, up to the end of its replay
        self._stateful = bool(getattr(loader, "use_stateful_dataloader", False))
        inner = getattr(loader, "base_dataloader", None)
        self._is_stream = isinstance(getattr(inner, "dataset", None), IterableDataset)
        self._watch_sampler(loader)
        self._watch_fetches(loader, 0)

    def state_dict(self) -> dict[str, Any]:
        taken, has_ended, iteration = self._running.progress(self._loader)
        state = self._random.state_dict() | {"batches": taken, "has_ended": has_ended, "iteration": iteration}
        if self._stateful:
            state["loader"] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._random.load_state_dict(state)
        self._resume_at, self._has_ended = int(state["batches"]), bool(state.get("has_ended", False))
        if hasattr(self._loader, "iteration"):
            self._loader.iteration = int(state["iteration"])
        if "loader" in state:
            self._loader.load_state_dict(state["loader"])

    def note_loaded(self, now: RandomSnapshot) -> None:
        """Note the generators of the save; the next iterator may continue the saved epoch."""
        self._random.now.copy_from(now)
        self._random.now.apply_own()
        if getattr(getattr(self._loader, "base_dataloader", None), "persistent_workers", False):
            warn_user(PERSISTENT_WORKERS.format(option="persistent_workers=False"))
        self._running = _Pass(self._loader, 0, 0)
        self._is_resuming = False

    def skip_in_sampler(self, count: int) -> int:
        """Return how many batches accelerate must skip, so that the loop continues after `count` of its batches.

        The sampler of a dispatcher has the batches of all ranks, and accelerate does not take that into account.
        """
        times = _batches_of_fetch(self._loader)
        if self._is_stream or self._resume_at != count or times == 1:
            return count
        inner = self._loader.base_dataloader
        if not self._loader._drop_last and len(inner.dataset) % (times * (inner.batch_sampler.batch_size or 1)):
            warn_user(
                "the last batch of this epoch is not full, and accelerate fills it with the first samples after the resume: "
                "use dispatch_batches=False or drop_last=True to repeat it exactly"
            )
        return count * times

    def watch_rest(self, loader: Any, count: int) -> None:
        """Watch a loader that skips `count` batches; it continues the saved epoch if the save was after this many batches."""
        self._is_resuming = self._resume_at == count and count > 0
        if hasattr(self._loader, "iteration"):
            loader.iteration = self._loader.iteration  # accelerate 1.12 begins at 0, the order of the first epoch
            if hasattr(loader, "_fetch_batches") and isinstance(self._loader.batch_sampler, WatchedBatchSampler):
                self._loader.batch_sampler.set_epoch(loader.iteration)  # accelerate does not set it below skipped batches
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
        before = 0 if getattr(loader, "skip_batches", 0) else skipped
        inner.__iter__ = lambda: self._begin(loader, make, before)
        if hasattr(loader, "_fetch_batches"):
            loader._fetch_batches = self._watched_dispatch(loader, loader._fetch_batches)

    def _begin(self, loader: Any, make: Callable[[], Any], before: int) -> Iterator[Any]:
        self._running = _Pass(loader, before, int(getattr(self._loader, "iteration", 0)))
        if self._is_resuming:
            self._random.start_resumed()
        else:
            self._resume_at, self._has_ended = None, False
            self._random.start_new()
        batches = iter(make())
        return batches if hasattr(loader, "_fetch_batches") else self._fetches(batches)

    def _fetches(self, batches: Iterator[T]) -> Iterator[T]:
        while True:
            self._before_next_fetch()
            try:
                batch = next(batches)
            except StopIteration:
                self._note_end_of_batches()
                return
            self._running.fetched += 1
            yield batch

    def _watched_dispatch(self, loader: Any, fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def fetch_for_all(batches: Any) -> Any:
            self._before_next_fetch()
            batch, description = fetch(batches)
            self._running.fetched += description[0] is not None
            if loader._stop_iteration:
                self._note_end_of_batches()
            return batch, description

        return fetch_for_all

    def _note_end_of_batches(self) -> None:
        running = self._running
        if running.loader is not self._loader and hasattr(self._loader, "iteration"):
            # accelerate counts the epoch only in the loader that skips batches
            self._loader.iteration = running.iteration + (0 if self._has_ended else 1)
        self._has_ended = False  # it holds for the resumed epoch alone
        if self._is_resuming and running.before + running.fetched <= (self._resume_at or 0):  # nothing is left of the epoch
            self._continue_from_save()

    def _continue_from_save(self) -> None:
        self._random.continue_from_save()
        self._is_resuming, self._resume_at = False, None

    def _before_next_fetch(self) -> None:
        """Note the generators before a batch is fetched; in a resumed epoch, set them. It runs in the process of the loop."""
        number = self._running.before + self._running.fetched
        if not self._is_resuming:
            self._random.before_ahead.take()
        elif self._resume_at is not None and number > self._resume_at:
            self._continue_from_save()
        elif self._is_stream:
            self._random.before_replay(number, self._resume_at)

    def _before_fetch(self, number: int) -> None:
        """Set the generators of a resumed epoch before the samples of the batch that was fetched ahead are loaded.

        number: how many batches the sampler has given in this epoch.
        """
        if self._is_resuming and self._resume_at is not None and number == self._resume_at * _batches_of_fetch(self._loader):
            self._random.before_ahead.apply()


@dataclass
class _Pass:
    """One iteration over a loader."""

    loader: Any
    """The loader that `prepare` has returned, or one of accelerate that skips its first batches."""
    before: int
    """How many batches of the epoch are before the first one that is fetched."""
    iteration: int
    """The number of the epoch."""
    fetched: int = 0

    def __post_init__(self) -> None:
        self._iteration_of_loader = getattr(self.loader, "iteration", 0)

    def progress(self, prepared_loader: object) -> tuple[int, bool, int]:
        """Return how many batches the loop has taken, whether these are all of the epoch, and the number of the epoch.

        After the last batch, the number is that of the next epoch.

        prepared_loader: the loader that `prepare` has returned.
        """
        if not self.fetched or getattr(self.loader, "iteration", 0) != self._iteration_of_loader:
            return 0, False, int(getattr(prepared_loader, "iteration", 0))
        if self.loader.end_of_dataloader:
            return self.before + self.fetched, True, self.iteration + 1
        return self.before + self.fetched - 1, False, self.iteration


def _batches_of_fetch(loader: Any) -> int:
    """Return how many batches the sampler gives for one step of all ranks: a dispatcher fetches those of all ranks."""
    if not hasattr(loader, "_fetch_batches") or loader.split_batches or getattr(loader, "submesh_tp", None):
        return 1
    return int(loader.state.num_processes)
