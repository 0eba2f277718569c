"""A process outside of a device mesh saves a DTensor of that mesh alone: it has no part of it."""

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
def dtensor_of_rank_1() -> Iterator[Any]:
    """Return a DTensor of which rank 1 of two has all. This process is rank 0."""
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=2)
    try:
        mesh = DeviceMesh("cpu", [1])
        yield lambda shape: DTensor.from_local(torch.ones(0), mesh, [Shard(0)], shape=torch.Size(shape), stride=(1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("beside", [{}, {"plain": torch.ones(3)}], ids=["alone", "beside a plain leaf"])
def test_a_dtensor_of_other_processes_is_refused_before_any_write(
    tmp_path: Path, dtensor_of_rank_1: Any, blocking: bool, beside: dict[str, Any]
) -> None:
    ckpt.save({"w": torch.ones(4)}, tmp_path, 1, group=None)
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"leaf w: this process has no part of this DTensor of shape \[4\]"):
        ckpt.save({**beside, "w": dtensor_of_rank_1([4])}, tmp_path, 2, group=None, keep=1, blocking=blocking)
    assert ckpt.open(tmp_path).steps() == [1]
    assert not (tmp_path / "steps/2").exists()


def test_a_refused_dtensor_leaves_the_earlier_step(tmp_path: Path, dtensor_of_rank_1: Any) -> None:
    with ckpt.Checkpointer(tmp_path, every=1, keep=1, group=None) as ck:
        ck.save(1, {"w": torch.ones(4)}, blocking=True)
        with pytest.raises(ckpt.UnsupportedLeaf, match="leaf w"):
            ck.step(2, {"w": dtensor_of_rank_1([4])})
    assert ckpt.load(tmp_path, group=None)["w"].tolist() == [1] * 4


def test_a_dtensor_without_elements_is_saved(tmp_path: Path, dtensor_of_rank_1: Any) -> None:
    """Every process has all of an array without elements."""
    ckpt.save({"w": dtensor_of_rank_1([0])}, tmp_path, 1, group=None)
    assert ckpt.load(tmp_path, group=None)["w"].shape == (0,)
