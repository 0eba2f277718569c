"""Which bytes of an array are digested, so that ranks detect replicas that differ."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt.groups.threads import ThreadGroup
from ckpt.saving.replica_samples import FULL_DIGEST_BYTES, sampled_elements, samples_of
from ckpt.state.tree import flatten

SIZES = [1, 7, 64, 1023, 1024, 1025, 5000, 300_000]


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 12, 16, 100, 5000])
def test_sampled_elements_span_the_whole_array(count: int, itemsize: int) -> None:
    index = sampled_elements(count * itemsize, itemsize).indices()
    assert index[0] == 0
    assert count - len(index) <= index[-1] < count
    if count * itemsize <= FULL_DIGEST_BYTES:
        assert index.tolist() == list(range(count))


@pytest.mark.parametrize("dtype", ["u1", "f2", "f4", "c16", "S5", [("a", "f4"), ("b", "f8")]])
@pytest.mark.parametrize("shape", [(), (3, 5), (60, 70), (300, 400)])
def test_a_transposed_array_has_the_digest_of_its_copy(shape: tuple[int, ...], dtype: Any) -> None:
    values = np.frombuffer(np.random.default_rng(1).bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).reshape(shape)
    strided = np.asfortranarray(values)
    assert samples_of(flatten({"a": values}, 0)) == samples_of(flatten({"a": strided}, 0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "bool", "float8_e4m3fn", "int64"])
@pytest.mark.parametrize("shape", [(), (3, 5), (60, 70), (300, 400)])
def test_a_device_tensor_has_the_digest_of_its_host_copy(shape: tuple[int, ...], dtype: str) -> None:
    torch = pytest.importorskip("torch")
    from ckpt.state.leaves.torch import TorchDeviceLeaf
    from ckpt.state.tree import FlatState

    value = torch.randn(shape).to(getattr(torch, dtype))
    turned = value.t().contiguous().t() if len(shape) == 2 else value
    expected = samples_of(flatten({"a": value}, 0))["a"]
    other = (torch.randn(shape) * 9 + 50).to(value.dtype)
    devices = FlatState(None, {"a": TorchDeviceLeaf(value), "b": TorchDeviceLeaf(turned), "c": TorchDeviceLeaf(other)})
    found = samples_of(devices)
    assert found["a"] == found["b"] == expected
    assert found["c"] != expected or dtype == "bool"


def leaves_of_rank(rank: int) -> dict[str, tuple[Any, str | None]]:
    """Return leaves of a rank, each with the ranks that the error names, or None where the leaf is accepted."""
    odd = "on ranks 1, 3 than on ranks 0, 2"
    numbers = np.arange(100_000.0)
    last = numbers.copy()
    last[-64:] += rank == 2
    return {
        "small": (np.full(5, rank % 2), odd),
        "large": (np.full((300, 500), rank % 2).T, odd),
        "last": (last, "on rank 2 than on ranks 0, 1, 3"),
        "equal": (numbers.reshape(-1, 10), None),
        "strided": (np.asfortranarray(numbers.reshape(-1, 10)) if rank else numbers.reshape(-1, 10), None),
        "own": (ckpt.PerRank(np.full(5, rank)), None),
        "cut": (ckpt.Shard(np.full((1, 3), rank), (4, 3), (rank, 0)), None),
        "copy": (ckpt.Shard(np.full(3, rank % 2), (3,), (0,), replica=(rank, 4)), odd),
        "scalar": (np.float32(rank), None),
        "generator": (np.random.default_rng(rank), None),
        "empty": (np.ones((0, 3)), None),
    }


@pytest.mark.parametrize("name", leaves_of_rank(0))
def test_arrays_that_differ_between_ranks_are_refused_by_name(tmp_path: Path, name: str) -> None:
    groups = ThreadGroup.make(4)
    expected = leaves_of_rank(0)[name][1]

    def save(group: Any) -> str | None:
        state = {"before": np.ones(3), "it": leaves_of_rank(group.rank)[name][0]}
        try:
            ckpt.save(state, tmp_path, 1, group=group)
        except ckpt.StepRefused as error:
            return str(error)
        return None

    with ThreadPoolExecutor(4) as pool:
        messages = list(pool.map(save, groups))
    for message in messages:
        if expected is None:
            assert message is None
        else:
            assert message is not None
            assert message.startswith(f"step 1: leaf it has other bytes {expected}; use"), message
    assert ckpt.open(tmp_path).steps() == ([] if expected else [1])


def test_replicas_that_differ_are_saved_with_verify_replicas_false(tmp_path: Path) -> None:
    save = lambda g: ckpt.save({"a": np.full(5, g.rank)}, tmp_path, 1, group=g, verify_replicas=False)  # noqa: E731
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save, ThreadGroup.make(4)))
    assert ckpt.open(tmp_path).steps() == [1]


def test_only_leaves_that_ranks_share_are_compared(tmp_path: Path) -> None:
    """Two stages have leaves of their own, and one common leaf of which the stages have different values."""

    def save(group: Any) -> str:
        stage, copy = divmod(group.rank, 2)
        own = ckpt.Shard(np.full(9, stage), (9,), (0,), replica=(copy, 2))
        state = {f"stage{stage}": own, "tied": np.full(3, stage)}
        with pytest.raises(ckpt.StepRefused) as caught:
            ckpt.save(state, tmp_path, 1, group=group)
        return str(caught.value)

    with ThreadPoolExecutor(4) as pool:
        for message in pool.map(save, ThreadGroup.make(4)):
            assert "leaf tied has other bytes on ranks 2, 3 than on ranks 0, 1;" in message
            assert "stage" not in message


def test_a_replica_that_is_not_two_numbers_is_refused() -> None:
    for replica in [(0, 2, (0, 1), True), (0, 2, None), (0,), "01", 3]:
        with pytest.raises(ckpt.InvalidArgument, match=r"use \(i, n\)"):
            ckpt.Shard(np.ones(3), (3,), (0,), replica=replica)  # type: ignore[arg-type]
    assert ckpt.Shard(np.ones(3), (3,), (0,), replica=(1, 2)).replica[:2] == (1, 2)
