"""The position of a Trainer in its data: the random numbers of batches that are fetched ahead, and the order of an epoch.

The Trainer finds the next batch by its number, and sets the random generators once the batches of the next update are fetched.
This is not enough for a continuation that is equal bit for bit. accelerate fetches one batch ahead, so a save happens between
the fetch of a batch and its use, and a collator or dataset may draw random numbers for it. A sampler may draw the order of the
epoch from the global generators. Therefore a save stores the generators at three moments, and a resumed epoch sets each in its
place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ckpt.state.stateful import RandomState


class RandomSnapshot(RandomState):
    """The global random generators at one moment, as an entry of a state. A load keeps them until `apply`."""

    def __init__(self) -> None:
        self._state = super().state_dict()

    def take(self) -> None:
        """Read the generators."""
        self._state = super().state_dict()

    def apply(self) -> None:
        """Set the generators."""
        super().load_state_dict(self._state)

    def copy_from(self, other: RandomSnapshot) -> None:
        self._state = other._state

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state


class DataPosition:
    """How many batches of the epoch this rank has taken, and the generators at three moments. An entry of a state."""

    def __init__(self) -> None:
        self._epoch_start = RandomSnapshot()
        self._before_ahead = RandomSnapshot()
        """Before the fetch of the batch that is fetched ahead."""
        self._now = RandomSnapshot()
        self._taken = 0
        self._iterator: Any = None
        self._fetched = 0
        self._resume_at: int | None = None  # the number of batches to skip, while a resumed epoch has not begun
        self._marks_passed = 0
        self._generator: Any = None  # from which the sampler draws the order of each epoch, if it is no global one
        self._order_at_start: Any = None

    def state_dict(self) -> dict[str, Any]:
        self._now.take()
        state: dict[str, Any] = {
            "batches": self._taken, "epoch_start": self._epoch_start, "before_ahead": self._before_ahead, "now": self._now,
        }  # fmt: skip
        if self._generator is not None:
            now = self._generator.get_state()
            state["order"] = {"epoch_start": now.clone() if self._order_at_start is None else self._order_at_start, "now": now}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._taken = self._resume_at = int(state["batches"])
        self._iterator, self._marks_passed = None, 0
        self._epoch_start.load_state_dict(state["epoch_start"])
        self._before_ahead.load_state_dict(state["before_ahead"])
        self._now.load_state_dict(state["now"])
        if "order" in state and self._generator is not None:
            self._order_at_start = state["order"]["epoch_start"]
            self._generator.set_state(state["order"]["now"])

    def continue_random(self) -> None:
        """Set the generators to where the save was, unless the fetches of the resumed epoch have done so.

        The Trainer calls it before an epoch that begins, or after it has fetched the batches of the first resumed update.
        """
        if self._marks_passed < 2:
            self._now.apply()
        self._resume_at = None

    # --- the fetches -------------------------------------------------------------------------------------------

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches of an epoch, and record the generators before each; a new iterator is a new epoch."""
        while True:
            self._before_next(batches)
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._taken += 1
            yield batch

    def _before_next(self, batches: Iterator[Any]) -> None:
        if batches is self._iterator:
            self._before_ahead.take()
            return
        self._iterator, self._fetched = batches, 0
        if self._resume_at is None:
            self._taken = 0
            self._start_new()
        else:
            self._start_resumed()

    def _start_new(self) -> None:
        self._epoch_start.take()
        if self._generator is not None:
            self._order_at_start = self._generator.get_state()

    def _start_resumed(self) -> None:
        self._epoch_start.apply()
        if self._generator is not None and self._order_at_start is not None:
            self._generator.set_state(self._order_at_start)

    def wrap(self, loader: Any) -> Any:
        """Return a training loader of accelerate, changed so that its fetches are seen."""
        inner = getattr(loader, "base_dataloader", None)
        sampler = getattr(inner, "batch_sampler", None)
        if inner is None or sampler is None:
            return loader
        self._generator = getattr(loader, "synchronized_generator", None)
        in_this_process = inner.num_workers == 0
        if in_this_process:
            inner.collate_fn = _WatchedCollate(inner.collate_fn, self._after_fetch)
        # accelerate builds the loader of a resumed epoch from these attributes; DataLoader itself allows no change of them.
        loader.batch_sampler = WatchedBatchSampler(sampler, self._before_fetch if in_this_process else ignore)
        return loader

    def _after_fetch(self) -> None:
        self._fetched += 1
        if self._fetched == 1 and self._resume_at is None:  # the first call of an epoch fetches two batches
            self._before_ahead.take()

    def _before_fetch(self, number: int) -> None:
        """Set the generators for the fetch of a batch of a resumed epoch.

        number: how many batches of the epoch are before it.
        """
        if number == self._resume_at:
            self._before_ahead.apply()
            self._marks_passed += 1
        elif self._resume_at is not None and number == self._resume_at + 1:
            self._now.apply()
            self._before_ahead.copy_from(self._now)
            self._marks_passed += 1


def ignore(number: int) -> None:
    """Do nothing, for a loader whose workers draw the random numbers."""


class _WatchedCollate:
    """A collate function that reports each batch that it has made."""

    def __init__(self, collate: Callable[[Any], Any], report: Callable[[], None]) -> None:
        self._collate, self._report = collate, report

    def __call__(self, samples: Any) -> Any:
        batch = self._collate(samples)
        self._report()
        return batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._collate, name)


class WatchedBatchSampler:
    """A batch sampler that reports each batch before its fetch. It passes the epoch on to the sampler that shuffles.

    accelerate does not do that for a sampler below a shard of a rank and below skipped batches.
    """

    def __init__(self, sampler: Any, report: Callable[[int], None]) -> None:
        self._inner, self._report = sampler, report

    def __iter__(self) -> Iterator[Any]:
        for number, indices in enumerate(self._inner):
            self._report(number)
            yield indices

    def __len__(self) -> int:
        return len(self._inner)

    def set_epoch(self, epoch: int) -> None:
        part = self._inner
        while part is not None:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
            inner = getattr(part, "batch_sampler", None)
            part = getattr(part, "sampler", None) if inner is None else inner

    @property
    def sampler(self) -> Any:
        """This object, which passes on the epoch."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)
