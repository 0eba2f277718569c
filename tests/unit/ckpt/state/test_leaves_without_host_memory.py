"""Leaves without host memory, as those on an accelerator, are read and written in pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.state import leaves
from ckpt.state.leaves.base import LAUNCH_BYTES, is_limited_by_launches
from ckpt.state.leaves.numpy import NumpyLeaf

torch = pytest.importorskip("torch")
from ckpt.state.leaves import torch as torch_leaves  # noqa: E402  imports torch


@pytest.fixture
def leaves_without_host_memory(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Tensors are handled as those of an accelerator that is not CUDA. Returns their leaves."""
    made: list[Any] = []

    def as_leaf(value: Any) -> Any:
        made.append(torch_leaves.TorchDeviceLeaf(value))
        return made[-1]

    monkeypatch.setitem(leaves._leaf_makers, torch.Tensor, as_leaf)
    return made


def test_tensors_without_host_memory_are_saved_and_loaded(tmp_path: Path, leaves_without_host_memory: list[Any]) -> None:
    state = {f"x{i}": torch.randn(40 + i, 30).to(torch.bfloat16) for i in range(60)}
    state |= {
        "t": torch.randn(300, 200).t(),
        "large": torch.randn(3 << 20),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
    }
    with ckpt.Checkpointer(tmp_path / "r", every=None) as ck:
        ck.save(0, state).result()
    like = {name: torch.zeros_like(value) for name, value in state.items()}
    ckpt.load(tmp_path / "r", like)
    assert [name for name, value in state.items() if not value.equal(like[name])] == []
    assert len(leaves_without_host_memory) == 2 * len(state)


def test_parts_of_tensors_without_host_memory_are_loaded(tmp_path: Path, leaves_without_host_memory: list[Any]) -> None:
    state = {f"x{i}": torch.randn(40 + i, 30) for i in range(60)}
    ckpt.save(state, tmp_path / "r")
    like = {name: ckpt.Shard(torch.zeros(20, 7), tuple(value.shape), (11, 5)) for name, value in state.items()}
    ckpt.load(tmp_path / "r", like)
    assert len(leaves_without_host_memory) == 2 * len(state)
    for name, value in state.items():
        assert like[name].local.equal(value[11:31, 5:12]), name


def test_copies_of_small_leaves_on_an_accelerator_are_limited_by_their_launches() -> None:
    tensor = torch.zeros(1000)
    on_device, on_host = torch_leaves.TorchDeviceLeaf(tensor), torch_leaves.TorchLeaf(tensor)
    assert is_limited_by_launches(on_device, 100 * LAUNCH_BYTES, 101)
    assert not is_limited_by_launches(on_device, 100 * LAUNCH_BYTES, 100)
    assert not is_limited_by_launches(on_host, 100, 100)
    assert not is_limited_by_launches(NumpyLeaf(tensor.numpy()), 100, 100)
