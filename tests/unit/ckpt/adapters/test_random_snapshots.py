"""Snapshots of random generators, as the adapters of accelerate and transformers save and restore them."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, RandomSampler

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
