"""The random numbers of an epoch whose batches are fetched ahead, so that a resumed epoch repeats them.

accelerate and the Trainer of transformers find the next batch by its number. This is not enough for a continuation that is
equal bit for bit. accelerate fetches one batch ahead, so a save happens between the fetch of a batch and its use, and a
collator or dataset may draw random numbers for it. A sampler may draw the order of the epoch from the global generators.
Therefore a save stores the generators at three moments, and a resumed epoch sets each in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ckpt.adapters.data_random import own_generator_states, set_own_generators
from ckpt.state.stateful import RandomState
from ckpt.support.user_warning import warn_user

OTHER_DRAWS = (
    "the stream of samples draws from the global generator of %s, as the training does. The resumed epoch draws other "
    "numbers for it: if they choose samples, give the stream a generator of its own"
)
"""The warning about the names that `other_draws` has returned, which replace the `%s`."""

PERSISTENT_WORKERS = (
    "persistent workers of the data loader continue their random numbers from epoch to epoch, which a resumed run does not "
    "repeat: if the dataset or collator draws there, use {option}"
)
"""The warning to a resumed run whose loader has persistent workers; `option` is the setting that turns them off."""

_OWN = "of_loaders"
_HOST_GENERATORS = ("python", "numpy", "torch")


def other_draws(start: dict[str, Any], end: dict[str, Any], saved: dict[str, Any]) -> str:
    """Return the names of the global generators that gave the discarded batches of a resumed epoch other numbers than before.

    A stream of samples is read again from its beginning, and the training between two fetches is not repeated. A stream that
    draws in each fetch from a generator from which the training draws, too, gets other numbers.

    start, end: the states of the generators before and after the discarded batches are fetched again.
    saved: their states after the same batches in the saved run.
    """

    def differ(name: str, one: dict[str, Any], other: dict[str, Any]) -> bool:
        return name in one and name in other and _plain(one[name]) != _plain(other[name])

    return " and ".join(name for name in _HOST_GENERATORS if differ(name, start, end) and differ(name, end, saved))


def _plain(value: Any) -> Any:
    """Return the state of a generator as values that compare with ==."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return np.asarray(value).tolist() if hasattr(value, "__array__") else value


class RandomSnapshot(RandomState):
    """The random generators at one moment, as an entry of a state. A load keeps them until `apply`.

    These are the global ones, and those that are attributes of `loaders` and of their parts: see `data_random`.
    """

    def __init__(self) -> None:
        self.loaders: tuple[object, ...] = ()
        self._state = super().state_dict()

    def take(self) -> None:
        """Read the generators."""
        self._state = super().state_dict() | {_OWN: own_generator_states(self.loaders)}

    def apply(self) -> None:
        """Set the generators."""
        super().load_state_dict(self._state)
        self.apply_own()

    def apply_own(self) -> None:
        """Set the generators of the loaders."""
        set_own_generators(self.loaders, self._state.get(_OWN, {}))

    def copy_from(self, other: RandomSnapshot) -> None:
        """Take the generators of another snapshot. One without loaders leaves the generators of the own loaders as they are."""
        if other.loaders:
            self._state = other._state
        else:
            self._state = self._state | {name: state for name, state in other._state.items() if name != _OWN}

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state


class EpochRandom:
    """The random generators at three moments: the start of the epoch, before the fetch ahead, and now."""

    def __init__(self) -> None:
        self.now = RandomSnapshot()
        """At the last call of `state_dict`, or at the save that was loaded."""
        self.before_ahead = RandomSnapshot()
        """Before the fetch of the batch that is fetched ahead."""
        self._epoch_start = RandomSnapshot()
        self._generator: Any = None  # the one that accelerate synchronizes over the ranks for the order of an epoch
        self._order_at_start: Any = None  # its state at the start of the epoch
        self._replay_start: dict[str, Any] = {}  # the global generators after the first batch of a stream that is read again

    def use_order_of(self, loader: object) -> None:
        """Also keep the generators of a loader and of its parts, such as the one that draws the order of each epoch."""
        for snapshot in (self.now, self.before_ahead, self._epoch_start):
            snapshot.loaders = (getattr(loader, "base_dataloader", loader),)
            snapshot.take()
        self._generator = getattr(loader, "synchronized_generator", None)

    def state_dict(self) -> dict[str, Any]:
        """Return the generators at the three moments, of which the last is this call."""
        self.now.take()
        state: dict[str, Any] = {"epoch_start": self._epoch_start, "before_ahead": self.before_ahead, "now": self.now}
        if self._generator is not None:
            now = self._generator.get_state()
            state["order"] = {"epoch_start": now.clone() if self._order_at_start is None else self._order_at_start, "now": now}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the generators of a save, for the epoch that is resumed. A load has filled the snapshots of `state_dict`."""
        if "order" in state and self._generator is not None:
            self._order_at_start = state["order"]["epoch_start"]
            self._generator.set_state(state["order"]["now"])

    def start_new(self) -> None:
        """Note the generators at the start of an epoch."""
        self._epoch_start.take()
        if self._generator is not None:
            self._order_at_start = self._generator.get_state()

    def start_resumed(self) -> None:
        """Set the generators to the start of the epoch that was saved, so that it has its order again."""
        self._epoch_start.apply()
        if self._generator is not None and self._order_at_start is not None:
            self._generator.set_state(self._order_at_start)

    def before_replay(self, number: int, saved: int | None) -> None:
        """Set the generators for a batch of a stream that is resumed, and so is read again from its beginning.

        number: how many batches of the epoch are before it.
        saved: after how many batches the epoch continues.
        """
        if number == 1:
            self._replay_start = RandomState().state_dict()
        if number and number == saved:
            names = other_draws(self._replay_start, RandomState().state_dict(), self.before_ahead.state_dict())
            if names:
                warn_user(OTHER_DRAWS % names)
            self.before_ahead.apply()

    def continue_from_save(self) -> None:
        """Set the generators to their states at the save, from which the next batch is fetched."""
        self.now.apply()
        self.before_ahead.copy_from(self.now)


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
        for part in self._parts():
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def _parts(self) -> Iterator[Any]:
        """Yield the batch samplers and the sampler below this object."""
        part = self._inner
        while part is not None:
            yield part
            inner = getattr(part, "batch_sampler", None)
            part = getattr(part, "sampler", None) if inner is None else inner

    @property
    def sampler(self) -> Any:
        """This object, which passes on the epoch; the sampler itself if that has no epoch, so that the dataset gets it."""
        return self if any(hasattr(part, "set_epoch") for part in self._parts()) else self._inner.sampler

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)


def ignore(number: int) -> None:
    """Do nothing, for a loader whose workers draw the random numbers."""
