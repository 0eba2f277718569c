"""Tensors and buffers of MindSpore that are views of one memory, also where they differ by rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from helpers.rank_threads import all_well, on_ranks
from mindspore import nn

import ckpt
from ckpt.state.leaves.mindspore import views_have_addresses

pytestmark = pytest.mark.skipif(
    not views_have_addresses(),
    reason="MindSpore 2.7 gives no access to the memory of a view",
)

VIEWS = {
    "the first row": lambda x: x[0],
    "the last row": lambda x: x[2],
    "rows": lambda x: x[1:],
    "a column": lambda x: x[:, 1],
    "transposed": lambda x: x.T,
    "every second column": lambda x: x[:, ::2],
    "flat": lambda x: x.reshape(12),
    "one element": lambda x: x[1:2, 2:3],
}
"""Views of a tensor, and of a numpy array alike."""


def numbers() -> Any:
    return np.arange(12, dtype=np.float32).reshape(3, 4)


def values_of(tensor: Any) -> Any:
    return tensor.astype(ms.float32).asnumpy()


@pytest.mark.parametrize("dtype", [ms.float32, ms.bfloat16, ms.int8], ids=str)
@pytest.mark.parametrize("base", ["with", "without"])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_filled_in_the_memory_that_it_shares(tmp_path: Path, name: str, base: str, dtype: Any) -> None:
    """Not in the copy that `asnumpy()` returns of a view."""

    def state(values: Any) -> tuple[Any, dict[str, Any]]:
        whole = ms.Tensor(values).astype(dtype)
        found = {"view": VIEWS[name](whole)}
        return whole, found | ({"whole": whole} if base == "with" else {})

    ckpt.save(state(numbers())[1], tmp_path, 0)
    whole, like = state(np.full((3, 4), -1, np.float32))
    assert ckpt.load(tmp_path, like=like)["view"] is like["view"]
    expected = numbers() if base == "with" else np.full((3, 4), -1, np.float32)
    VIEWS[name](expected)[...] = VIEWS[name](numbers())
    assert np.array_equal(values_of(whole), expected)
    assert np.array_equal(values_of(like["view"]), VIEWS[name](expected))


class Views(nn.Cell):
    """Buffers that are views of one memory. Only `moving` differs between ranks, so `still` equals that of rank 0."""

    def __init__(self, rank: int, base: bool = True) -> None:
        super().__init__()
        self.train_me = ms.Parameter(ms.Tensor(np.ones(3, np.float32)), name="train_me")
        rows = ms.Tensor(np.array([[rank + 1] * 4, [0] * 4], np.float32))  # `moving[...] = 1` would give it memory of its own
        if base:
            self.register_buffer("rows", rows)
        for name, view in (("moving", rows[0]), ("still", rows[1]), ("second_name", rows[0]), ("column", rows[:, 1])):
            self.register_buffer(name, view)

    def values(self) -> list[float]:
        """Return the values of both rows; fail where views of one memory differ."""
        found = {name: buffer.asnumpy() for name, buffer in self._buffers.items()}
        rows = np.stack([found["moving"], found["still"]])
        assert np.array_equal(found["second_name"], rows[0])
        assert np.array_equal(found["column"], rows[:, 1])
        assert np.array_equal(found.get("rows", rows), rows)
        return [*np.unique(rows[0]).tolist(), *np.unique(rows[1]).tolist()]


def save_on_ranks(states: list[Any], url: Path) -> None:
    all_well(on_ranks(len(states), lambda group: ckpt.save(states[group.rank], url, 1, group=group)))


def load_on_ranks(states: list[Any], url: Path) -> None:
    all_well(on_ranks(len(states), lambda group: ckpt.load(url, like=states[group.rank], group=group)))


@pytest.mark.parametrize("base", [True, False])
def test_each_rank_gets_its_own_views_of_one_memory_back(tmp_path: Path, base: bool) -> None:
    save_on_ranks([{"net": Views(rank, base)} for rank in range(2)], tmp_path)
    assert "net.moving@1" in ckpt.open(tmp_path)[1]
    for size, expected in ((2, [[1, 0], [2, 0]]), (3, [[1, 0]] * 3)):
        nets = [Views(9, base) for _ in range(size)]
        load_on_ranks([{"net": net} for net in nets], tmp_path)
        assert [net.values() for net in nets] == expected


@pytest.mark.parametrize("name", ["moving", "column", "rows"])
def test_a_wrapped_view_beside_its_cell_comes_back_to_its_rank(tmp_path: Path, name: str) -> None:
    def state(rank: int) -> dict[str, Any]:
        net = Views(rank)
        return {"net": net, "mine": ckpt.PerRank(net._buffers[name])}

    save_on_ranks([state(rank) for rank in range(2)], tmp_path)
    for size in (2, 3):
        states = [state(9) for _ in range(size)]
        load_on_ranks(states, tmp_path)
        for rank, found in enumerate(states):
            assert found["mine"].value.asnumpy().reshape(-1)[0] == rank % 2 + 1
            if size == 2 or name != "column":  # another number of ranks gets the other columns of rank 0
                assert found["net"].values() == [rank % 2 + 1, 0]


def test_two_saved_arrays_that_share_memory_in_like_are_refused(tmp_path: Path) -> None:
    ckpt.save({"a": ms.Tensor(numbers()), "b": ms.Tensor(numbers()[:, 1] + 1)}, tmp_path, 0)
    a = ms.Tensor(numbers())
    with pytest.raises(ckpt.LeafMismatch, match="`like` has the same memory for two saved arrays"):
        ckpt.load(tmp_path, like={"a": a, "b": a[:, 1]})
