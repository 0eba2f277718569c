"""The position in the training data of a Lightning Trainer, in the middle of an epoch.

Lightning stores how many batches of an epoch are done, but not which. This module stores the random state with which the
iterators of the epoch began. A resumed run makes the iterators again from that state and discards the batches that were done.
Batches of a dataset with an index are not loaded for that if the DataLoader has no workers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from ckpt.adapters import lightning_packages
from ckpt.adapters.data_random import copied_state, own_generator_states, parts_of_loaders, set_own_generators
from ckpt.adapters.epoch_random import OTHER_DRAWS, other_draws
from ckpt.state.stateful import RandomState
from ckpt.storage.base.errors import CkptError


class FetcherPosition:
    """The position of a data fetcher in its epoch.

    check: whether a resumed run compares the sample indices of the discarded batches with those of the saved run.
    """

    def __init__(self, check: bool) -> None:
        self._check = check
        self._at_iterator: dict[str, Any] | None = None
        self._at_first_batch: dict[str, Any] | None = None
        self._ahead: dict[str, Any] | None = None
        """The random state and the states of dataloaders before the fetch of the batch that Lightning fetches ahead."""
        self._counters: dict[int, _IndexCounter] = {}
        """By the number of the dataloader: counts the sample indices of its current iterator."""
        self._later: dict[str, dict[str, Any]] = {}
        """How often the iterator of a dataloader was made in the epoch, and the random state of the last time."""
        self._later_saved: dict[str, dict[str, Any]] = {}
        """The `_later` of the saved run, while batches are discarded."""
        self._skipped: ExitStack | None = None
        """Set while batches are discarded without loading them; its end lets the iterators load again."""

    def iterator_begins(self, combined_loader: Any) -> None:
        """Record the random state with which the iterators of an epoch are made."""
        self._at_iterator = _random_snapshot(combined_loader)

    def epoch_begins(self, fetcher: Any) -> None:
        """Record the random state before the first batch of an epoch, and count the sample indices from here on."""
        self._at_first_batch = _random_snapshot(fetcher.combined_loader)
        self._count_indices(fetcher.combined_loader)
        self.before_fetch(fetcher)

    def before_fetch(self, fetcher: Any) -> None:
        """Record the random state and the states of dataloaders, if the next fetch is that of the batch after the next one."""
        if _fetches_ahead(fetcher):
            loader = fetcher.combined_loader
            self._ahead = {"random": _random_snapshot(loader), "loaders": copied_state(loader._state_dicts())}

    def state_dict(self, fetcher: Any, in_epoch: bool) -> dict[str, Any]:
        """Return the position after the last batch that the loop took.

        in_epoch: False between two epochs, where only the random state of the samplers counts.
        """
        loader = fetcher.combined_loader
        found: dict[str, Any] = {"now": _random_snapshot(loader)}
        if in_epoch and _fetches_ahead(fetcher):
            found["ahead"] = self._ahead
        if in_epoch and not are_stateful(loader):
            found |= {
                "iterator": self._at_iterator,
                "first_batch": self._at_first_batch,
                "batches": fetcher.fetched - len(getattr(fetcher, "batches", ())),
                "indices": self._indices(),
                "later": self._later,
            }
        return found

    def iterator_resumes(self, combined_loader: Any, saved: dict[str, Any]) -> None:
        """Set the random state for an iterator of stateful dataloaders, which fetches the first batch ahead."""
        if loader_states_ahead(saved):
            set_random_snapshot(combined_loader, saved["ahead"]["random"])

    def go_to(self, fetcher: Any, saved: dict[str, Any]) -> None:
        """Make the iterators of `fetcher` again, and continue after the saved number of batches.

        Raises CkptError if the epoch has fewer batches, or the samplers give other samples, than in the saved run.
        """
        loader = fetcher.combined_loader
        if "batches" in saved:
            self._at_iterator, self._at_first_batch = saved["iterator"], saved["first_batch"]
            set_random_snapshot(loader, saved["iterator"])
            iter(fetcher)
            self._count_indices(loader)
            set_random_snapshot(loader, saved["first_batch"])
            self._discard(fetcher, saved)
            if self._check and self._indices() != saved["indices"]:
                raise _other_data_error(f"the first {saved['batches']} batches of the epoch have other samples than before")
        set_random_snapshot(loader, saved["now"])
        self.before_fetch(fetcher)

    def _discard(self, fetcher: Any, saved: dict[str, Any]) -> None:
        loader = fetcher.combined_loader
        batches = getattr(fetcher, "iterator_wrapper", fetcher)  # where training_step takes an iterator
        with ExitStack() as stack:
            self._later_saved = saved.get("later", {})
            if fetcher.length is not None:
                self._skipped = stack
                _skip_loading(_iterators(loader), stack)
            for done in range(saved["batches"]):
                if "ahead" in saved and done == saved["batches"] - 1:
                    _warn_of_other_draws(saved)
                    set_random_snapshot(loader, saved["ahead"]["random"])
                if next(batches, None) is None:
                    raise _other_data_error(f"the epoch has {done} batches, and {saved['batches']} of them were done")
        self._later_saved, self._skipped = {}, None

    # --- the iterators of the dataloaders ----------------------------------------------------------------------

    def _count_indices(self, combined_loader: Any) -> None:
        self._counters, self._later = {}, {}
        for number, iterator in enumerate(_iterators(combined_loader)):
            self._count(number, iterator)
        modes = combined_loader._iterator
        if len(combined_loader.flattened) > 1 and not are_stateful(combined_loader):
            begin = partial(self._begin_later, combined_loader)
            modes.iterables = [_LaterIterable(*each, begin) for each in enumerate(combined_loader.flattened)]

    def _count(self, number: int, iterator: Any) -> None:
        if hasattr(iterator, "_sampler_iter"):
            iterator._sampler_iter = self._counters[number] = _IndexCounter(iterator._sampler_iter)

    def _indices(self) -> list[list[int]]:
        return [[counter.count, counter.checksum] for _, counter in sorted(self._counters.items())]

    def _begin_later(self, combined_loader: Any, number: int, iterable: Iterable[Any]) -> Iterator[Any]:
        """Make the iterator of a dataloader in the middle of an epoch: it begins again, or follows another one.

        A resumed run repeats the random state of the last time. The batches of earlier times are discarded as a whole.
        """
        key = str(number)
        times = self._later.get(key, {}).get("times", 0) + 1
        saved = self._later_saved.get(key, {})
        if saved.get("times") == times:
            set_random_snapshot(combined_loader, saved["random"])
        self._later[key] = {"times": times, "random": _random_snapshot(combined_loader)}
        iterator = iter(iterable)
        self._count(number, iterator)
        if self._skipped is not None:
            _skip_loading([iterator], self._skipped)
        return iterator


@dataclass(frozen=True)
class _LaterIterable:
    """A dataloader of which iterators are made in the middle of an epoch."""

    number: int
    iterable: Any
    begin: Callable[[int, Iterable[Any]], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        return self.begin(self.number, self.iterable)

    def __len__(self) -> int:
        return len(self.iterable)


def are_stateful(combined_loader: Any) -> bool:
    """Return whether all dataloaders have a position of their own, which Lightning stores.

    Raises CkptError if only some have one.
    """
    flags = [callable(getattr(each, "load_state_dict", None)) for each in combined_loader.flattened]
    if any(flags) and not all(flags):
        raise CkptError("some training dataloaders have load_state_dict() and others have not: use one kind for all of them")
    return all(flags)


def _fetches_ahead(fetcher: Any) -> bool:
    """Return whether Lightning fetches one batch ahead, to know which is the last one."""
    return fetcher.length is None and bool(getattr(fetcher, "prefetch_batches", 0))


def loader_states_ahead(saved: dict[str, Any]) -> list[Any]:
    """Return the states of stateful dataloaders before the fetch of the batch that Lightning had fetched ahead, if it did."""
    found: list[Any] = saved.get("ahead", {}).get("loaders", [])
    return found


def _warn_of_other_draws(saved: dict[str, Any]) -> None:
    """Warn if the discarded batches had other random numbers than in the saved run."""
    names = other_draws(saved["first_batch"]["global"], RandomState().state_dict(), saved["ahead"]["random"]["global"])
    if names:
        lightning_packages.warn(OTHER_DRAWS % names)


def _other_data_error(what: str) -> CkptError:
    return CkptError(
        f"the data cannot continue where the saved step was: {what}; use the dataset, batch size, processes and seeded sampler "
        "of the save, or give Checkpoints(check_data=False)"
    )


class _IndexCounter:
    """An iterator over the sample indices of batches, with their number and checksum."""

    def __init__(self, iterator: Iterator[object]) -> None:
        self._iterator = iterator
        self.count = self.checksum = 0

    def __iter__(self) -> _IndexCounter:
        return self

    def __next__(self) -> object:
        index = next(self._iterator)
        self.count += 1
        self.checksum = zlib.crc32(repr(index).encode(), self.checksum)
        return index


# --- loading ---------------------------------------------------------------------------------------------------


def _iterators(combined_loader: Any) -> list[Any]:
    """Return the iterator of each dataloader in the present epoch."""
    return list(getattr(combined_loader._iterator, "iterators", ()))


class _NoFetcher:
    """Takes the place of the part of a DataLoader iterator that loads the samples of a batch."""

    def fetch(self, index: object) -> None:
        return None


def _skip_loading(iterators: list[Any], until: ExitStack) -> None:
    """Let the DataLoaders without workers draw indices only. Workers have random generators of their own, so they load."""
    from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

    for iterator in iterators:
        if isinstance(iterator, _SingleProcessDataLoaderIter) and iterator._dataset_kind == _DatasetKind.Map:
            until.callback(setattr, iterator, "_dataset_fetcher", iterator._dataset_fetcher)
            iterator._dataset_fetcher = _NoFetcher()


# --- random state ----------------------------------------------------------------------------------------------


def _random_snapshot(combined_loader: Any) -> dict[str, Any]:
    """Return the state of the global random generators, and of those that the samplers and datasets have."""
    loaders = combined_loader.flattened
    epochs = {name: part.epoch for name, part in parts_of_loaders(loaders) if isinstance(getattr(part, "epoch", None), int)}
    return {"global": RandomState().state_dict(), "epochs": epochs, "own": own_generator_states(loaders)}


def set_random_snapshot(combined_loader: Any | None, snapshot: dict[str, Any]) -> None:
    """Set all generators as they were at a snapshot."""
    loaders = [] if combined_loader is None else combined_loader.flattened
    for name, part in parts_of_loaders(loaders):
        if name in snapshot["epochs"]:
            part.epoch = snapshot["epochs"][name]
    set_own_generators(loaders, snapshot["own"])
    RandomState().load_state_dict(snapshot["global"])
