"""Datasets whose samples are numbers, and loaders over them."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from ckpt import data
from ckpt.training.batch_order import epoch_order

torch = pytest.importorskip("torch")


class Numbers:
    """A dataset whose samples are their own numbers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class RandomlyTransformed(Numbers):
    """A dataset whose samples have random numbers from three libraries."""

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), np.random.rand(), float(torch.rand(()))


def loader(size: int = 20, **options: Any) -> data.Loader:
    """Return a loader of numbers in batches of four on one rank; `options` change this."""
    arguments = {"global_batch": 4, "seed": 3, "rank": 0, "world_size": 1, "collate_fn": list} | options
    dataset = arguments.pop("dataset", None) or Numbers(size)
    return data.Loader(dataset, **arguments)


def uninterrupted(size: int, global_batch: int, seed: int, epochs: int, last: str = "short") -> list[list[int]]:
    """Return the batches of one run on one rank, computed in the simplest way as a reference."""
    found = []
    for epoch in range(epochs):
        samples = epoch_order(size, seed, epoch).tolist()
        cut = [samples[i : i + global_batch] for i in range(0, size, global_batch)]
        if len(cut[-1]) < global_batch:
            if last == "drop":
                cut.pop()
            elif last == "pad":
                fill = itertools.cycle(samples)
                cut[-1] += [next(fill) for _ in range(global_batch - len(cut[-1]))]
        found += cut
    return found
