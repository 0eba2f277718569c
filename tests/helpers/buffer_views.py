"""The contract of arrays and buffers that are views of one memory, also where they differ by rank, for any framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from helpers.rank_threads import all_well, on_ranks

VIEWS: dict[str, Callable[[Any], Any]] = {
    "the first row": lambda x: x[0],
    "the last row": lambda x: x[2],
    "rows": lambda x: x[1:],
    "a column": lambda x: x[:, 1],
    "transposed": lambda x: x.T,
    "every second column": lambda x: x[:, ::2],
    "flat": lambda x: x.reshape((12,)),
    "one element": lambda x: x[1:2, 2:3],
}
"""Views of a tensor, and of a numpy array alike."""


def numbers() -> Any:
    """Return a different number for each element."""
    return np.arange(12, dtype=np.float32).reshape(3, 4)


class BufferViewContract(ABC):
    """Views of one memory are filled in that memory, and each rank gets its own values of them back."""

    @abstractmethod
    def tensor(self, values: Any, dtype: str = "float32") -> Any:
        """Return a tensor with these values, whose type has this name."""

    @abstractmethod
    def values(self, tensor: Any) -> Any:
        """Return the values of a tensor as a numpy array of float32."""

    @abstractmethod
    def module(self, buffers: dict[str, Any]) -> Any:
        """Return a module with a parameter and with these buffers, which it has in `_buffers`."""

    def views(self, rank: int, base: bool = True) -> Any:
        """Return a module with buffers that are views of one memory.

        Only `moving` differs between ranks, so `still` equals that of rank 0. base: whether the whole memory is a buffer, too.
        """
        rows = self.tensor(np.array([[rank + 1] * 4, [0] * 4], np.float32))
        views = {"moving": rows[0], "still": rows[1], "second_name": rows[0], "column": rows[:, 1]}
        return self.module(({"rows": rows} if base else {}) | views)

    def row_values(self, module: Any) -> list[float]:
        """Return the values of both rows; fail where views of one memory differ."""
        found = {name: self.values(buffer) for name, buffer in module._buffers.items()}
        rows = np.stack([found["moving"], found["still"]])
        assert np.array_equal(found["second_name"], rows[0])
        assert np.array_equal(found["column"], rows[:, 1])
        assert np.array_equal(found.get("rows", rows), rows)
        return [*np.unique(rows[0]).tolist(), *np.unique(rows[1]).tolist()]

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
    @pytest.mark.parametrize("base", ["with", "without"])
    @pytest.mark.parametrize("name", VIEWS)
    def test_a_view_is_filled_in_the_memory_that_it_shares(self, tmp_path: Path, name: str, base: str, dtype: str) -> None:
        def state(values: Any) -> tuple[Any, dict[str, Any]]:
            whole = self.tensor(values, dtype)
            found = {"view": VIEWS[name](whole)}
            return whole, found | ({"whole": whole} if base == "with" else {})

        ckpt.save(state(numbers())[1], tmp_path, 0)
        whole, like = state(np.full((3, 4), -1, np.float32))
        assert ckpt.load(tmp_path, like=like)["view"] is like["view"]
        expected = numbers() if base == "with" else np.full((3, 4), -1, np.float32)
        VIEWS[name](expected)[...] = VIEWS[name](numbers())
        assert np.array_equal(self.values(whole), expected)
        assert np.array_equal(self.values(like["view"]), VIEWS[name](expected))

    @pytest.mark.parametrize("base", [True, False])
    def test_each_rank_gets_its_own_views_of_one_memory_back(self, tmp_path: Path, base: bool) -> None:
        save_on_ranks([{"net": self.views(rank, base)} for rank in range(2)], tmp_path)
        assert "net.moving@1" in ckpt.open(tmp_path)[1]
        for size, expected in ((2, [[1, 0], [2, 0]]), (3, [[1, 0]] * 3)):
            nets = [self.views(9, base) for _ in range(size)]
            load_on_ranks([{"net": net} for net in nets], tmp_path)
            assert [self.row_values(net) for net in nets] == expected

    @pytest.mark.parametrize("name", ["moving", "column", "rows"])
    def test_a_wrapped_view_of_a_buffer_comes_back_to_its_rank(self, tmp_path: Path, name: str) -> None:
        def state(rank: int) -> dict[str, Any]:
            net = self.views(rank)
            return {"net": net, "mine": ckpt.PerRank(net._buffers[name])}

        save_on_ranks([state(rank) for rank in range(2)], tmp_path)
        for size in (2, 3):
            states = [state(9) for _ in range(size)]
            load_on_ranks(states, tmp_path)
            for rank, found in enumerate(states):
                assert self.values(found["mine"].value).reshape(-1)[0] == rank % 2 + 1
                if size == 2 or name != "column":  # another number of ranks gets the other columns of rank 0
                    assert self.row_values(found["net"]) == [rank % 2 + 1, 0]

    def test_two_saved_arrays_that_share_memory_in_like_are_refused(self, tmp_path: Path) -> None:
        ckpt.save({"a": self.tensor(numbers()), "b": self.tensor(numbers()[:, 1] + 1)}, tmp_path, 0)
        a = self.tensor(numbers())
        with pytest.raises(ckpt.LeafMismatch, match="`like` has the same memory for two saved arrays"):
            ckpt.load(tmp_path, like={"a": a, "b": a[:, 1]})


def save_on_ranks(states: list[Any], url: Path) -> None:
    """Save step 1 by as many ranks as there are states."""
    all_well(on_ranks(len(states), lambda group: ckpt.save(states[group.rank], url, 1, group=group)))


def load_on_ranks(states: list[Any], url: Path) -> None:
    """Load into these states, one for each rank."""
    all_well(on_ranks(len(states), lambda group: ckpt.load(url, like=states[group.rank], group=group)))
