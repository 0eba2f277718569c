"""Snapshots of random generators, as the adapters of accelerate and transformers save and restore them."""

from __future__ import annotations

import random
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, RandomSampler, Subset

from ckpt.adapters.data_random import WatchedCollate, own_generator_states, set_own_generators
from ckpt.adapters.epoch_random import RandomSnapshot


def test_the_generators_of_loaders_outlive_a_snapshot_without_loaders() -> None:
    """A load sets the global generators from one without loaders. The next epoch has the order that it had after the save."""
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(range(20), sampler=RandomSampler(range(20), generator=generator), generator=generator)  # type: ignore[arg-type]
    of_loader, of_process = RandomSnapshot(), RandomSnapshot()
    of_loader.loaders = (loader,)
    list(loader)  # an epoch
    of_loader.take()
    torch.manual_seed(3)
    of_process.take()
    next_epoch, number = [int(each) for each in loader], torch.rand(1)
    of_loader.copy_from(of_process)
    of_loader.apply()
    assert [int(each) for each in loader] == next_epoch
    of_loader.apply()
    assert torch.equal(torch.rand(1), number)


class Draws:
    """A dataset, transform or collate function with a generator of its own."""

    def __init__(self, kind: str, below: Any = None) -> None:
        self.kind, self.transform = kind, below
        self.random = {"python": random.Random, "numpy": np.random.default_rng}.get(kind, torch.Generator)()

    def draw(self) -> float:
        number = torch.rand((), generator=self.random).item() if self.kind == "torch" else self.random.random()  # type: ignore[attr-defined, call-overload]
        return float(number) + (0 if self.transform is None else self.transform(0.0))

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> float:
        return self.draw()

    def __call__(self, value: Any, scale: float = 1.0) -> Any:
        return [*value, self.draw()] if isinstance(value, list) else value + scale * self.draw()

    def collate(self, values: list[float]) -> list[float]:
        return [*values, self.draw()]


class Composed:
    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)

    def __call__(self, value: Any) -> Any:
        for transform in self.transforms:
            value = transform(value)
        return value


def check_repeated(dataset: Any, collate: Any = None) -> None:
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=2, collate_fn=collate or (lambda values: list(values)))
    snapshot = RandomSnapshot()
    snapshot.loaders = (loader,)
    list(loader)
    snapshot.take()
    expected = list(loader)
    snapshot.apply()
    assert list(loader) == expected


def test_generators_of_the_parts_of_a_concatenation_are_repeated() -> None:
    parts: list[Dataset[float]] = [Draws("python"), Subset(Draws("numpy"), [0, 2])]  # type: ignore[list-item, arg-type]
    check_repeated(ConcatDataset([*parts, ConcatDataset([Draws("torch")])]))  # type: ignore[list-item]


def test_generators_of_transforms_are_repeated() -> None:
    check_repeated(Draws("python", Composed(Draws("numpy"), partial(Draws("torch"), scale=0.5))))


def test_generators_of_collate_functions_are_repeated() -> None:
    for kind in ("python", "numpy", "torch"):
        check_repeated(range(4), Draws(kind))
        check_repeated(range(4), Draws(kind).collate)
        check_repeated(range(4), partial(Draws(kind), scale=2.0))
        check_repeated(range(4), WatchedCollate(Draws(kind), lambda: None))


def test_a_list_of_samples_is_not_searched() -> None:
    sample = Draws("python")
    assert own_generator_states([DataLoader([sample])]) == {}  # type: ignore[arg-type]


class LateDraws(Dataset[float]):
    """A dataset that makes its generator at the first use."""

    random: np.random.Generator

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        if not hasattr(self, "random"):
            self.random = np.random.default_rng(3)
        return float(self.random.random())


def test_generator_that_does_not_exist_yet_is_named() -> None:
    """Another process can't set it: the dataset will make it anew, and its numbers repeat those of the start."""
    saved, resumed = DataLoader(LateDraws()), DataLoader(LateDraws())
    list(saved)
    states = own_generator_states([saved])
    with pytest.warns(UserWarning, match=r"generators of the loaders \(0.dataset.random\) are not made yet"):
        set_own_generators([resumed], states)
    list(resumed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_own_generators([resumed], states)
        set_own_generators([DataLoader(range(4))], {"1.dataset.random": states["0.dataset.random"]})  # type: ignore[arg-type]
    assert [float(each) for each in saved] == [float(each) for each in resumed]
