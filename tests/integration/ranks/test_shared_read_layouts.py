"""Ranks of one host that load parts of a large step read each part once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.rank_threads import CountingStore, all_well, on_ranks, union_bytes
from helpers.sharing_ranks import sharing_ranks as sharing_ranks

import ckpt
from ckpt.groups.base import Group

LAYOUTS: dict[str, Callable[[int, int, int], tuple[int, int, int, int]]] = {
    "halves, twice": lambda rank, n, m: (rank % 2 * n // 2, (rank % 2 + 1) * n // 2, 0, m),
    "columns, twice": lambda rank, n, m: (0, n, rank % 2 * m // 2, (rank % 2 + 1) * m // 2),
    "one slice for all": lambda rank, n, m: (n // 3, n // 3 + n // 10, 0, m),
    "a corner for all": lambda rank, n, m: (0, n // 2, 0, m // 4),
    "two slices, twice": lambda rank, n, m: (rank % 2 * n // 3, rank % 2 * n // 3 + n // 8, 0, m),
    "halves that overlap": lambda rank, n, m: (rank * n // 6, (rank + 3) * n // 6, 0, m),
    "one needs all": lambda rank, n, m: (0, n if rank == 2 else n // 10, 0, m),
    "all": lambda rank, n, m: (0, n, 0, m),
    "a quarter each": lambda rank, n, m: (rank * n // 4, (rank + 1) * n // 4, 0, m),
}
"""The range of rows and of columns that each of four ranks needs of a matrix."""


SHAPES = {"big": (4000, 1024), "middle": (1500, 1024), "shared": (700, 1024)} | {f"small{i}": (40, 64) for i in range(9)}


@pytest.fixture(scope="module", params=["none", {"id": "zstd", "level": 1}])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A repository with one step, stored with a codec, and the state of that step."""
    draw = np.random.default_rng(5)
    state = {name: draw.integers(0, 50, shape).astype(np.float32) for name, shape in SHAPES.items()}
    folder = tmp_path_factory.mktemp("saved")
    ckpt.save(state, folder, 0, codec=request.param, group=None)
    return folder, state


@pytest.mark.usefixtures("sharing_ranks")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_auto_shares_reads_where_ranks_need_the_same_parts(saved: tuple[Path, dict[str, np.ndarray]], layout: str) -> None:
    """The group reads little more than the union of the bytes that its ranks would read without sharing."""
    folder, state = saved

    def load(group: Group, share: Any) -> None:
        boxes = {name: LAYOUTS[layout](group.rank, *shape) for name, shape in SHAPES.items()}
        like = {n: ckpt.Shard(np.zeros((b - a, d - c), np.float32), SHAPES[n], (a, c)) for n, (a, b, c, d) in boxes.items()}
        loaded = ckpt.load(CountingStore(folder), like, group=group, share_reads=share)
        assert all(np.array_equal(loaded[n].local, state[n][a:b, c:d]) for n, (a, b, c, d) in boxes.items())

    def read_with(share: Any) -> list[tuple[str, int, int]]:
        CountingStore.read_ranges = []
        all_well(on_ranks(4, functools.partial(load, share=share)))
        return CountingStore.read_ranges

    alone = union_bytes(read_with(False))
    for share in ("auto", True):
        read = sum(end - begin for _, begin, end in read_with(share))
        assert read <= 1.05 * alone, (read, alone)
