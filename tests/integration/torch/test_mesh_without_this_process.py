"""A process that saves alone a DTensor of a device mesh to which it does not belong: it holds no part of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckpt

torch = pytest.importorskip("torch")
fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.tensor import DTensor, Shard  # noqa: E402


@pytest.fixture
def elsewhere() -> Iterator[Any]:
    """A DTensor that rank 1 of two holds. This process is rank 0."""
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=2)
    try:
        mesh = DeviceMesh("cpu", [1])
        yield lambda shape: DTensor.from_local(torch.ones(0), mesh, [Shard(0)], shape=torch.Size(shape), stride=(1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("beside", [{}, {"plain": torch.ones(3)}], ids=["alone", "beside a plain leaf"])
def test_it_is_refused_before_anything_is_written(
    tmp_path: Path, elsewhere: Any, blocking: bool, beside: dict[str, Any]
) -> None:
    ckpt.save({"w": torch.ones(4)}, tmp_path, 1, group=None)
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"leaf w: a DTensor of shape \[4\] of which this process holds no part"):
        ckpt.save({**beside, "w": elsewhere([4])}, tmp_path, 2, group=None, keep=1, blocking=blocking)
    assert ckpt.open(tmp_path).steps() == [1]
    assert not (tmp_path / "steps/2").exists()


def test_a_checkpointer_keeps_the_good_step(tmp_path: Path, elsewhere: Any) -> None:
    with ckpt.Checkpointer(tmp_path, every=1, keep=1, group=None) as ck:
        ck.save(1, {"w": torch.ones(4)}, blocking=True)
        with pytest.raises(ckpt.UnsupportedLeaf, match="leaf w"):
            ck.step(2, {"w": elsewhere([4])})
    assert ckpt.load(tmp_path, group=None)["w"].tolist() == [1] * 4


def test_one_without_elements_is_saved(tmp_path: Path, elsewhere: Any) -> None:
    """Every process holds all of an array that has no elements."""
    ckpt.save({"w": elsewhere([0])}, tmp_path, 1, group=None)
    assert ckpt.load(tmp_path, group=None)["w"].shape == (0,)
