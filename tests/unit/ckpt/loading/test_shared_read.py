"""Ranks of one host share the blocks that they read from the store."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.page_cache import bypasses_cache, drop_cache, is_cached
from helpers.rank_threads import CountingStore, RemoteStore, all_well, on_ranks, one_array, union_bytes
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt.groups.base import Group
from ckpt.loading.shared_read_schedule import ROUND_BYTES, needs_by_block, schedule_shared_reads
from ckpt.loading.shared_window import SharedWindow
from ckpt.storage.local.writer import O_DIRECT


@pytest.fixture(params=["memory", "messages"])
def sharing_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that share reads of a remote store: through memory, as on one host, or by messages, as on several."""
    monkeypatch.setattr("ckpt.loading.shared_read.LocalStore", RemoteStore)
    if request.param == "messages":
        monkeypatch.setattr(SharedWindow, "create", lambda *_: None)


@pytest.mark.usefixtures("sharing_ranks")
@pytest.mark.parametrize("codec", ["none", {"id": "zstd", "level": 1}])
@pytest.mark.parametrize("share", ["auto", True])
def test_the_store_is_read_once_for_all_ranks(tmp_path: Path, codec: Any, share: Any) -> None:
    """Ranks need columns of a matrix that was saved by rows, and a leaf that all of them need."""
    full = np.random.default_rng(5).integers(0, 50, (4096, 2048)).astype(np.float32)
    copied = np.random.default_rng(6).standard_normal(500_000)

    def rows(rank: int) -> Any:
        return {"w": ckpt.Shard(full[1024 * rank : 1024 * rank + 1024].copy(), full.shape, (1024 * rank, 0)), "c": copied}

    all_well(on_ranks(4, lambda g: ckpt.save(rows(g.rank), tmp_path, 0, group=g, codec=codec)))
    stored = sum(file.stat().st_size for file in tmp_path.rglob("*.pack"))
    for size in (4, 3):
        edges = [2048 * r // size for r in range(size + 1)]

        def load(group: Group, edges: list[int] = edges) -> None:
            low, high = edges[group.rank], edges[group.rank + 1]
            like = {"w": ckpt.Shard(np.zeros((4096, high - low), np.float32), full.shape, (0, low)), "c": copied * 0}
            loaded = ckpt.load(CountingStore(tmp_path), like, group=group, share_reads=share)
            assert np.array_equal(loaded["w"].local, full[:, low:high])
            assert np.array_equal(loaded["c"], copied)

        CountingStore.read = 0
        all_well(on_ranks(size, load))
        assert stored * 0.9 <= CountingStore.read <= 1.05 * stored, (CountingStore.read, stored)


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


CELL = 1 << 18


@given(st.data())
def test_a_schedule_gives_each_rank_what_it_needs(data: st.DataObject) -> None:
    """Ranks need some runs of cells of blocks, or all: each cell is read once, by a rank that can verify it."""
    size = data.draw(st.integers(2, 5))
    cells = data.draw(st.lists(st.integers(1, 32), min_size=1, max_size=40))
    needs: list[dict[int, list[tuple[int, int]]]] = [{} for _ in range(size)]
    for position, count in enumerate(cells):
        for need in needs:
            edges = sorted(data.draw(st.sets(st.integers(0, count), max_size=6)))
            if runs := [(a * CELL, b * CELL) for a, b in zip(edges[::2], edges[1::2], strict=False)]:
                need[position] = runs
    raw = {position: count * CELL for position, count in enumerate(cells)}
    rows = [[(0, at, raw[at], raw[at], *run) for at, runs in need.items() for run in runs] for need in needs]
    turns = schedule_shared_reads(needs_by_block([np.array(r, np.int64).reshape(-1, 6) for r in rows]), size)
    rounds: dict[tuple[int, int], int] = {}
    for position in raw:
        turn = turns.get((0, position))
        needed = {rank: need[position] for rank, need in enumerate(needs) if position in need}
        all_runs = [("", *run) for runs in needed.values() for run in runs]
        if turn is None:
            assert union_bytes(all_runs) == sum(b - a for _, a, b in all_runs)
            continue
        assert union_bytes([("", a, b) for a, b, _ in turn.jobs]) == sum(b - a for a, b, _ in turn.jobs)
        assert sum(b - a for a, b, _ in turn.jobs) == union_bytes(all_runs)
        for rank, runs in needed.items():
            received = [message for run in runs for message in turn.received_by(rank, *run)]
            for peer in needed:
                assert [m[1:] for m in received if m.rank == peer] == [m[1:] for m in turn.sent_by(peer) if m.rank == rank]
            read = [(a, b) for a, b, reader in turn.jobs if reader == rank]
            assert all(any(first <= a < b <= last for first, last in runs) for a, b in read)
            obtained = [*read, *(m[1:] for m in received)]
            assert sum(b - a for a, b in obtained) == union_bytes([("", *h) for h in obtained]) == sum(b - a for a, b in runs)
            assert union_bytes([("", *r) for r in [*runs, *obtained]]) == sum(b - a for a, b in runs)
            rounds[turn.round, rank] = rounds.get((turn.round, rank), 0) + sum(b - a for a, b in runs)
    assert max(rounds.values(), default=0) <= ROUND_BYTES


def test_adjacent_ranges_of_a_block_are_one_read() -> None:
    """The edges of shards are within cells: a cell that two ranks need is read together with the adjacent range."""
    edges = [(i * 9 // 4 * CELL, -(-(i + 1) * 9 // 4) * CELL) for i in range(4)]
    rows = [[(0, 0, 9 * CELL, 9 * CELL, a, b)] for a, b in edges]
    (turn,) = schedule_shared_reads(needs_by_block([np.array(r, np.int64) for r in rows]), 4).values()
    cells = [(job.begin // CELL, job.end // CELL, job.reader) for job in turn.jobs]
    assert cells == [(0, 3, 0), (3, 5, 1), (5, 7, 2), (7, 9, 3)]


def test_a_numpy_number_names_a_step_of_a_group(tmp_path: Path) -> None:
    def restored(group: Group) -> Any:
        with ckpt.Checkpointer(tmp_path, every=None, group=group) as ck:
            ck.save(np.int64(3), one_array(3), blocking=True)
            return ck.restore(one_array(0), step=np.int64(3))[1]

    assert on_ranks(2, restored) == [4, 4]


@pytest.mark.usefixtures("sharing_ranks")
def test_all_ranks_that_share_a_read_get_its_damage(tmp_path: Path) -> None:
    array = np.random.default_rng(5).standard_normal(2_000_000)
    all_well(on_ranks(2, lambda g: ckpt.save({"w": array}, tmp_path, 0, group=g, codec="none")))
    pack = next((tmp_path / "steps/0/pack").glob("1-*.pack"))
    data = bytearray(pack.read_bytes())
    data[4_000_000] ^= 4
    pack.write_bytes(data)
    for error in on_ranks(3, lambda g: ckpt.load(tmp_path, {"w": array * 0}, group=g)):
        assert isinstance(error, ckpt.IntegrityError)
        assert pack.name in str(error)


@pytest.mark.skipif(not O_DIRECT, reason="no O_DIRECT on this system")
@pytest.mark.parametrize("share", ["auto", False])
def test_a_shared_read_bypasses_the_page_cache(tmp_path: Path, share: Any) -> None:
    """So do bytes that only one rank needs; without sharing, bytes that several ranks need go through it."""
    own = np.random.default_rng(7).standard_normal((2, 2 << 20))
    copied = np.random.default_rng(8).standard_normal(2 << 20)

    def state(rank: int, factor: int) -> Any:
        return {"own": ckpt.Shard(own[rank : rank + 1] * factor, own.shape, (rank, 0)), "copied": copied * factor}

    all_well(on_ranks(2, lambda g: ckpt.save(state(g.rank, 1), tmp_path, 0, group=g, codec="none")))

    def load(group: Group) -> None:
        loaded = ckpt.load(tmp_path, state(group.rank, 0), group=group, share_reads=share)
        assert np.array_equal(loaded["own"].local, own[group.rank : group.rank + 1])
        assert np.array_equal(loaded["copied"], copied)

    rows = ckpt.open(tmp_path)[0].manifest().rows
    packs = list(tmp_path.rglob("*.pack"))

    def cached() -> dict[str, bool]:
        return {row.leaf: is_cached(tmp_path / row.pack, row.position + row.stored // 2) for row in rows}

    def read() -> None:
        all_well(on_ranks(2, load))

    if share is False:
        drop_cache(*packs)
        read()
        assert cached() == {"own": True, "copied": True}
    else:
        assert bypasses_cache(packs, read, lambda: cached() != {"own": False, "copied": False})
