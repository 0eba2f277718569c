"""What save and load do with the entries of a sharded state dict, in one process."""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import ckpt
from ckpt.adapters import megatron
from ckpt.errors import LeafMismatch, LeafNotFound, StepNotFound, UnsupportedLeaf
from ckpt.saving.handle import SaveHandle
from ckpt.storage.base.errors import InvalidArgument


@pytest.fixture(autouse=True, scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(values: torch.Tensor, key: str = "w", *offsets: tuple[int, int, int], **options: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, values, *offsets, **options)


def test_layers_of_one_tensor(tmp_path: Path) -> None:
    layers = [torch.randn(3, 2) for _ in range(4)]
    megatron.save(
        {i: sharded(t, "layers", (0, i, 4), prepend_axis_num=1) for i, t in enumerate(layers)}, tmp_path / "iter_0000007"
    )
    assert ckpt.open(tmp_path / "ckpt").steps() == [7]
    whole = ckpt.load(tmp_path / "ckpt")["tensors"]["layers"]
    assert torch.equal(whole, torch.stack(layers))
    target = torch.zeros(3, 2)
    state = {"third": sharded(target, "layers", (0, 2, 4), prepend_axis_num=1)}
    loaded = megatron.load(state, tmp_path / "iter_0000007")
    assert loaded["third"] is target
    assert torch.equal(target, layers[2])


def test_all_kinds_of_entries(tmp_path: Path) -> None:
    def build(key: str, values: torch.Tensor, replica_id: Any, flattened: Any) -> dict[str, Any]:
        return {"a": sharded(values[:2], key, (0, 0, 2)), "b": sharded(values[2:], key, (0, 1, 2))}

    def state(fill: float) -> dict[str, Any]:
        return {
            "gate": ShardedTensorFactory(
                "gate", torch.full((4,), fill), build, lambda parts: torch.cat([parts["a"], parts["b"]])
            ),
            "extra": ShardedObject("extra", io.BytesIO(b"scales"), (1,), (0,)),
            "local": LocalNonpersistentObject([fill]),
            "plain": {"dtype": torch.bfloat16, 3: [1, (2, 3)], "t": torch.full((2,), fill)},
        }

    megatron.save(state(1), tmp_path, content_metadata={"format": 5})
    loaded = megatron.load(state(2), tmp_path)
    assert loaded["gate"].tolist() == [1] * 4
    assert loaded["extra"].getvalue() == b"scales"
    assert loaded["local"] == [2]
    assert loaded["plain"]["dtype"] is torch.bfloat16
    assert loaded["plain"][3] == [1, (2, 3)]
    assert loaded["plain"]["t"].tolist() == [1, 1]
    assert megatron.load_content_metadata(tmp_path) == {"format": 5}


def test_an_asynchronous_save_has_the_values_of_its_call(tmp_path: Path) -> None:
    values = torch.ones(5)
    request = megatron.save({"w": sharded(values)}, tmp_path / "iter_1", async_sharded_save=True)
    values.zero_()
    request.execute_sync()
    assert ckpt.load(tmp_path / "ckpt")["tensors"]["w"].tolist() == [1] * 5


def test_queue_does_not_wait_for_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training run asks it at each step, so a save of ckpt must not block there as in the queue of Megatron-Core."""
    committed = threading.Event()
    done = SaveHandle.done
    monkeypatch.setattr(SaveHandle, "done", lambda handle: committed.is_set() and done(handle))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    queue, ended = megatron.AsyncCallsQueue(), []
    request = megatron.save({"w": sharded(torch.ones(5))}, tmp_path / "iter_1", async_sharded_save=True)
    request.add_finalize_fn(lambda: ended.append(ckpt.open(tmp_path / "ckpt").steps()))
    assert queue.schedule_async_request(request) == 0
    assert queue.maybe_finalize_async_calls(blocking=False) == []
    assert (queue.get_num_unfinalized_calls(), ended) == (1, [])
    committed.set()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert ended == [[1]]
    own = AsyncRequest(None, (), [lambda: ended.append([])])
    assert queue.schedule_async_request(own) == 1
    queue.close()
    assert ended == [[1], []]


def test_the_queue_keeps_the_writer_lease_between_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    queue = megatron.AsyncCallsQueue()
    for step in (1, 2):
        queue.schedule_async_request(
            megatron.save({"w": sharded(torch.ones(5))}, tmp_path / f"iter_{step}", async_sharded_save=True)
        )
        queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    megatron.save({"w": sharded(torch.ones(5))}, tmp_path / "iter_3")
    first, second, third = [ckpt.open(tmp_path / "ckpt").commit(step).generation for step in (1, 2, 3)]
    assert first == second < third


def test_failed_asynchronous_save_is_raised_by_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    queue, ended = megatron.AsyncCallsQueue(), []
    request = megatron.save({"w": sharded(torch.ones(5))}, tmp_path / "iter_1", async_sharded_save=True)
    request.execute_sync()
    monkeypatch.setattr(SaveHandle, "result", Mock(side_effect=OSError("disk full")))
    request.add_finalize_fn(lambda: ended.append(1))
    queue.schedule_async_request(request)
    with pytest.raises(OSError, match="disk full"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert ended == []


def test_tensors_that_share_memory(tmp_path: Path) -> None:
    """As the weights of a model in float32 and the parts of them that a distributed optimizer has."""

    def state(weights: torch.Tensor) -> dict[str, Any]:
        return {
            "w": sharded(weights), "main": sharded(weights.view(-1)[2:5], "main"),
            "again": sharded(weights.view(-1)[4:], "again"),
        }  # fmt: skip

    weights, target = torch.arange(8.0).reshape(2, 4), torch.zeros(2, 4)
    megatron.save(state(weights), tmp_path)
    loaded = ckpt.load(tmp_path)["tensors"]
    assert {name: tensor.flatten().tolist() for name, tensor in loaded.items()} == {
        "w": [0, 1, 2, 3, 4, 5, 6, 7], "main": [2, 3, 4], "again": [4, 5, 6, 7]
    }  # fmt: skip
    megatron.load(state(target), tmp_path)
    assert torch.equal(target, weights)


def test_two_tensors_with_one_key_are_both_filled(tmp_path: Path) -> None:
    megatron.save({"w": sharded(torch.ones(3))}, tmp_path)
    first, second = torch.zeros(3), torch.zeros(3, dtype=torch.float64)
    megatron.load({"a": sharded(first), "b": sharded(second)}, tmp_path)
    assert (first.tolist(), second.tolist()) == ([1] * 3, [1] * 3)


def test_values_of_a_distributed_optimizer(tmp_path: Path) -> None:
    """Its buffers are listed by types; memory between its parameters is not initialised by Megatron-Core."""
    numbers = [{(torch.bfloat16, torch.float32): [64]}]
    pad = {"param": sharded(torch.full((2,), math.nan)), "padding": LocalNonpersistentObject(True)}
    megatron.save({"numel": ShardedObject("numel", numbers, (1,), (0,)), "buckets": [pad]}, tmp_path)
    assert ckpt.load(tmp_path)["tensors"]["w"].tolist() == [0, 0]
    assert megatron.load({"numel": ShardedObject("numel", None, (1,), (0,))}, tmp_path)["numel"] == numbers


def test_padded_vocabulary_and_other_type(tmp_path: Path) -> None:
    megatron.save({"w": sharded(torch.arange(8.0).reshape(4, 2), allow_shape_mismatch=True)}, tmp_path)
    for rows in (3, 6):
        target = torch.full((rows, 2), -1, dtype=torch.bfloat16)
        megatron.load({"w": sharded(target, allow_shape_mismatch=True)}, tmp_path)
        expected = [[2.0 * i, 2.0 * i + 1] for i in range(min(rows, 4))] + [[-1, -1]] * (rows - 4)
        assert target.tolist() == expected


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    megatron.save({"w": sharded(torch.ones(4))}, tmp_path / "iter_3")
    target = torch.zeros(4)
    with pytest.raises(LeafNotFound, match="leaf tensors.v of `like` is not in step 3"):
        megatron.load({"w": sharded(target), "v": sharded(torch.zeros(4), "v")}, tmp_path / "iter_3")
    with pytest.raises(LeafMismatch, match=r"leaf tensors.w: step 3 of .* has shape \[4\], `like` has \[5\]"):
        megatron.load({"w": sharded(torch.zeros(5))}, tmp_path / "iter_3")
    with pytest.raises(StepNotFound):
        megatron.load({"w": sharded(target)}, tmp_path / "iter_4")
    with pytest.raises(InvalidArgument, match="use 'assume_ok_unexpected'"):
        megatron.load({"w": sharded(target)}, tmp_path / "iter_3", strict="return_all")
    with pytest.raises(UnsupportedLeaf, match=r"leaf common.model"):
        megatron.save({"w": sharded(torch.ones(4)), "model": object()}, tmp_path / "iter_4")
    part = DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (1,)))
    with pytest.raises(UnsupportedLeaf, match=r"leaf common.optimizer: a DTensor is not stored by megatron.save"):
        megatron.save({"w": sharded(torch.ones(4)), "optimizer": part}, tmp_path / "iter_4")
    assert target.tolist() == [0] * 4
    assert ckpt.open(tmp_path / "ckpt").steps() == [3]
