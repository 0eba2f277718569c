"""Ranks of one host share the blocks that they read from the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.page_cache import bypasses_cache, drop_cache, is_cached
from helpers.rank_threads import CountingStore, all_well, on_ranks, one_array, union_bytes
from helpers.sharing_ranks import sharing_ranks as sharing_ranks
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt.groups.base import Group
from ckpt.loading.shared_read_schedule import ROUND_BYTES, needs_by_block, schedule_shared_reads
from ckpt.storage.local.directory import LocalStore
from ckpt.storage.local.durable_writer import O_DIRECT
from ckpt.storage.tuning.measured_reads import Request, Tuner


@pytest.mark.slow
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


CELL = 1 << 18


@pytest.mark.slow
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
    schedule = schedule_shared_reads(needs_by_block([np.array(r, np.int64).reshape(-1, 6) for r in rows]), size)
    rounds: dict[tuple[int, int], int] = {}
    for position in raw:
        shared_read = schedule.get((0, position))
        needed = {rank: need[position] for rank, need in enumerate(needs) if position in need}
        all_runs = [("", *run) for runs in needed.values() for run in runs]
        if shared_read is None:
            assert union_bytes(all_runs) == sum(b - a for _, a, b in all_runs)
            continue
        assert union_bytes([("", a, b) for a, b, _ in shared_read.jobs]) == sum(b - a for a, b, _ in shared_read.jobs)
        assert sum(b - a for a, b, _ in shared_read.jobs) == union_bytes(all_runs)
        for rank, runs in needed.items():
            received = [message for run in runs for message in shared_read.received_by(rank, *run)]
            for peer in needed:
                assert [m[1:] for m in received if m.rank == peer] == [
                    m[1:] for m in shared_read.sent_by(peer) if m.rank == rank
                ]
            read = [(a, b) for a, b, reader in shared_read.jobs if reader == rank]
            assert all(any(first <= a < b <= last for first, last in runs) for a, b in read)
            obtained = [*read, *(m[1:] for m in received)]
            assert sum(b - a for a, b in obtained) == union_bytes([("", *h) for h in obtained]) == sum(b - a for a, b in runs)
            assert union_bytes([("", *r) for r in [*runs, *obtained]]) == sum(b - a for a, b in runs)
            rounds[shared_read.round, rank] = rounds.get((shared_read.round, rank), 0) + sum(b - a for a, b in runs)
    assert max(rounds.values(), default=0) <= ROUND_BYTES


def test_adjacent_ranges_of_a_block_are_one_read() -> None:
    """The edges of shards are within cells: a cell that two ranks need is read together with the adjacent range."""
    edges = [(i * 9 // 4 * CELL, -(-(i + 1) * 9 // 4) * CELL) for i in range(4)]
    rows = [[(0, 0, 9 * CELL, 9 * CELL, a, b)] for a, b in edges]
    (shared_read,) = schedule_shared_reads(needs_by_block([np.array(r, np.int64) for r in rows]), 4).values()
    cells = [(job.begin // CELL, job.end // CELL, job.reader) for job in shared_read.jobs]
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


class NetworkFolder(LocalStore):
    """A local directory whose reads a tuner controls, as those of a remote store."""

    is_remote, device = True, "a network of this test"

    def __init__(self, path: Path) -> None:
        super().__init__(path, direct=False)


@pytest.mark.usefixtures("sharing_ranks")
@pytest.mark.parametrize("codec", ["none", {"id": "zstd", "level": 1}])
def test_a_tuner_controls_the_reads_that_ranks_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: Any) -> None:
    """Otherwise the store gets more requests at a time than it can answer fast."""
    array = np.random.default_rng(5).integers(0, 50, 8_000_000).astype(np.float32)
    all_well(on_ranks(2, lambda g: ckpt.save({"w": array}, tmp_path, 0, group=g, codec=codec)))
    stored = sum(file.stat().st_size for file in tmp_path.rglob("*.pack"))
    requests: list[Request] = []
    request = Tuner.request

    @contextmanager
    def noted_request(tuner: Tuner) -> Iterator[Request]:
        with request(tuner) as noted:
            yield noted
        requests.append(noted)

    monkeypatch.setattr(Tuner, "request", noted_request)
    tuners: set[Tuner] = set()
    worker = Tuner.worker
    monkeypatch.setattr(Tuner, "worker", lambda tuner: tuners.add(tuner) or worker(tuner))

    def load(group: Group) -> None:
        loaded = ckpt.load(NetworkFolder(tmp_path), {"w": array * 0}, group=group, share_reads=True)
        assert np.array_equal(loaded["w"], array)

    all_well(on_ranks(2, load))
    assert 0.9 * stored <= sum(each.nbytes for each in requests) <= 1.05 * stored
    assert [tuner._workers for tuner in tuners] == [0] * len(tuners)
