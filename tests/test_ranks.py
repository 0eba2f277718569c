"""Many ranks save one step and load it into other layouts. Here ranks are threads; processes are in test_ranks_processes.py."""

from __future__ import annotations

import base64
import functools
import itertools
import json
import math
import random
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import SOAK, assert_clean, assert_same, bypasses_cache, drop_cache, finish, is_cached, python

import ckpt
from ckpt.groups.base import Group, ranks_text
from ckpt.groups.threads import ThreadGroup
from ckpt.loading.shared_read_schedule import ROUND_BYTES, needs_by_block, schedule_shared_reads
from ckpt.loading.shared_window import SharedWindow
from ckpt.saving.replica_check import agreed_descriptions, describe_leaves, missing_copies_text
from ckpt.state.boxes import Box, flat_boxes
from ckpt.state.tree import encode_tree, flatten
from ckpt.storage.base.failpoints import set_failpoints
from ckpt.storage.base.store import Reader
from ckpt.storage.local.directory import LocalStore
from ckpt.storage.local.writer import O_DIRECT, temporary_name
from ckpt.training.save_schedule import LEAD_SECONDS, next_step

Work = Callable[[Group], Any]


def on_ranks(count: int, work: Work, groups: list[Group] | None = None) -> list[Any]:
    """What `work` returns, or the error it raises, for each rank of a group of threads."""
    groups = groups or ThreadGroup.make(count)
    found: list[Any] = [None] * count

    def run(group: Group) -> None:
        try:
            found[group.rank] = work(group)
        except Exception as error:
            found[group.rank] = error

    threads = [threading.Thread(target=run, args=(g,)) for g in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a rank hangs"
    return found


def all_well(found: list[Any]) -> list[Any]:
    for rank, result in enumerate(found):
        if isinstance(result, Exception):
            raise AssertionError(f"rank {rank}: {result!r}") from result
    return found


def packed(root: Path) -> dict[int, int]:
    """Bytes of the packs that each rank wrote."""
    found: dict[int, int] = {}
    for file in root.rglob("*.pack"):
        rank = int(file.name.split("-")[0])
        found[rank] = found.get(rank, 0) + file.stat().st_size
    return found


# --- replicated states -----------------------------------------------------------------------------------------


def replicated() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    return {
        "embed": draw.standard_normal((5000, 96), dtype=np.float32),
        "layers": [draw.standard_normal((n, 257), dtype=np.float32) for n in (1000, 2500, 61)],
        "norms": {str(i): draw.standard_normal(300) for i in range(40)},
        "odd": draw.standard_normal(999_983),
        "scalar": np.array(3.5),
        "empty": np.zeros((0, 7)),
        "step": 12,
    }


def test_a_replicated_state_is_written_once_and_evenly(tmp_path: Path) -> None:
    state = replicated()
    unique = sum(a.nbytes for a in [state["embed"], state["odd"], *state["layers"], *state["norms"].values()])
    saved = all_well(on_ranks(4, lambda g: ckpt.save(replicated(), tmp_path, 1, group=g, codec="none")))
    assert {c.step for c in saved} == {1}
    written = packed(tmp_path)
    assert unique <= sum(written.values()) <= 1.05 * unique
    assert max(written.values()) <= 1.05 * sum(written.values()) / 4
    assert min(written.values()) >= 0.95 * sum(written.values()) / 4
    commit = saved[0].commit
    assert (commit.world_size, commit.raw_bytes) == (4, unique + 8)
    for loaded in [ckpt.load(tmp_path), *all_well(on_ranks(3, lambda g: ckpt.load(tmp_path, group=g)))]:
        assert_equal(loaded, state)
    assert ckpt.open(tmp_path)[1].verify() > 0


def assert_equal(a: Any, b: Any) -> None:
    if isinstance(b, dict):
        assert list(a) == list(b)
        for key in b:
            assert_equal(a[key], b[key])
    elif isinstance(b, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert np.array_equal(a, b)
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None)


def test_a_four_dimensional_layout_is_written_evenly(tmp_path: Path) -> None:
    """2 data x 2 tensor x 2 pipeline ranks, every copy known only as (i, n)."""
    layers = {f"layers.{i}.{n}": s for i in range(4) for n, s in {"up": (512, 256), "down": (256, 512), "norm": (256,)}.items()}
    full = {name: np.random.default_rng(i).standard_normal(shape) for i, (name, shape) in enumerate(layers.items())}

    def state(rank: int) -> dict[str, Any]:
        data, tensor, stage = np.unravel_index(rank, (2, 2, 2))
        found: dict[str, Any] = {}
        for name, array in full.items():
            if int(name.split(".")[1]) // 2 != stage:
                continue
            if name.endswith("norm"):
                found[name] = ckpt.Shard(array.copy(), array.shape, (0,), replica=(int(data * 2 + tensor), 4))
            else:
                rows = array.shape[0] // 2
                local = array[tensor * rows : (tensor + 1) * rows].copy()
                found[name] = ckpt.Shard(local, array.shape, (tensor * rows, 0), replica=(int(data), 2))
        return found

    all_well(on_ranks(8, lambda g: ckpt.save(state(g.rank), tmp_path, 1, group=g, codec="none")))
    written = packed(tmp_path)
    even = sum(a.nbytes for a in full.values()) / 8
    assert set(written) == set(range(8))
    assert all(0.95 * even <= n <= 1.05 * even + 4096 for n in written.values())
    assert_equal(dict(sorted(ckpt.load(tmp_path).items())), dict(sorted(full.items())))


def test_nothing_is_asked_of_the_group_after_opening(tmp_path: Path) -> None:
    class Silent(ThreadGroup):
        opened = False

        def all_gather(self, data: bytes) -> list[bytes]:
            assert not self.opened, "a collective during a save"
            return super().all_gather(data)

        def _exchange(self, send: Any, receive: Any) -> None:
            raise AssertionError("a message during a save")

    made = ThreadGroup.make(3)
    groups: list[Group] = [Silent(g.rank, 3, g._shared, 60) for g in made]  # type: ignore[attr-defined]

    def work(group: Any) -> list[int]:
        with ckpt.Checkpointer(tmp_path, every=1, keep=2, group=group) as saver:
            group.opened = True
            state = {"a": np.zeros(1000), "own": group.rank}
            for step in range(5):
                state["a"] += 1
                saver.step(step, state)
        return ckpt.open(tmp_path).steps()

    assert all_well(on_ranks(3, work, groups))[0][-1] == 4
    assert ckpt.load(tmp_path)["a"][0] == 5


# --- layouts ---------------------------------------------------------------------------------------------------


@st.composite
def cuts(draw: st.DrawFn, length: int, count: int) -> list[int]:
    inner = sorted(draw(st.lists(st.integers(0, length), min_size=count - 1, max_size=count - 1)))
    return [0, *inner, length]


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], size: int) -> list[list[Any]]:
    """For each rank how it holds an array of `shape`: meshes, uneven grids with copies, several boxes, or flattened ranges."""
    kind = draw(st.sampled_from(["mesh", "mesh", "grid", "flat", "whole", "boxes"]))
    if kind == "whole":
        return [["whole"] for _ in range(size)]
    if kind == "mesh":
        return on_mesh(shape, draw(meshes(size)), draw)
    if kind == "flat":
        edges = draw(cuts(int(np.prod(shape)), size))
        return [["flat", a, b] for a, b in itertools.pairwise(edges)]
    axis = draw(st.integers(0, len(shape) - 1))
    if kind == "boxes":
        edges = draw(cuts(shape[axis], 2 * size))
        spans = list(itertools.pairwise(edges))
        return [["boxes", [box_along(shape, axis, *spans[i]) for i in (r, r + size)]] for r in range(size)]
    copies = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    edges = draw(cuts(shape[axis], size // copies))
    spans = list(itertools.pairwise(edges))
    return [["grid", box_along(shape, axis, *spans[r // copies]), (r % copies, copies)] for r in range(size)]


@st.composite
def meshes(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    """The shape of a mesh of one to three dimensions with `size` places."""
    found = [n for k in (1, 2, 3) for n in itertools.product(range(1, size + 1), repeat=k) if math.prod(n) == size]
    return draw(st.sampled_from(found))


def on_mesh(shape: tuple[int, ...], mesh: tuple[int, ...], draw: st.DrawFn) -> list[list[Any]]:
    """For each place of a mesh the boxes that the placements of a DTensor give it, some dimensions replicating."""
    from ckpt.state.leaves.dtensor import shard_boxes

    cut = st.none() | st.tuples(st.integers(0, len(shape) - 1), st.sampled_from([1, 1, 2]))
    cuts = tuple(draw(cut) for _ in mesh)
    found = []
    for at in itertools.product(*map(range, mesh)):
        boxes = [box for box, _ in shard_boxes(shape, mesh, at, cuts)] or [Box((0,) * len(shape), (0,) * len(shape))]
        number, count = 0, 1
        for n, i, c in zip(mesh, at, cuts, strict=True):
            if c is None:
                number, count = number * n + i, count * n
        found.append(["boxes", boxes, (number, count)])
    return found


def box_along(shape: tuple[int, ...], axis: int, low: int, high: int) -> Box:
    offset = tuple(low if i == axis else 0 for i in range(len(shape)))
    return Box(offset, tuple(high - low if i == axis else n for i, n in enumerate(shape)))


def held(array: np.ndarray, how: list[Any], fill: bool) -> Any:
    """What a rank has of `array`; blank where it is to be loaded."""

    def local(part: np.ndarray) -> np.ndarray:
        return part.copy() if fill else np.full_like(part, 77)

    if how[0] == "whole":
        return local(array)
    if how[0] == "flat":
        return ckpt.Shard(local(array.reshape(-1)[how[1] : how[2]]), array.shape, flat=how[1])
    if how[0] == "boxes":
        replica = how[2] if len(how) > 2 else (0, 1)
        return ckpt.Shard([local(array[b.slices()]) for b in how[1]], array.shape, [b.offset for b in how[1]], replica=replica)
    return ckpt.Shard(local(array[how[1].slices()]), array.shape, how[1].offset, replica=how[2])


def same(a: Any, b: Any) -> bool:
    if isinstance(a, ckpt.Shard):
        return all(map(np.array_equal, a.locals(), b.locals()))
    return bool(np.array_equal(a, b))


@pytest.mark.soak
@settings(max_examples=1000 if SOAK else 40, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])  # fmt: skip
@given(data=st.data())
def test_any_layout_loads_into_any_other(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """numpy is the reference: what a rank loads is the slice of the whole."""
    root = tmp_path_factory.mktemp("any")
    sizes = st.sampled_from([1, 2, 3, 4, 8] if SOAK else [1, 2, 3, 4])
    writers, readers = data.draw(sizes), data.draw(sizes)
    arrays, before, after = {}, {}, {}
    for i in range(data.draw(st.integers(1, 3))):
        shape = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
        kind = data.draw(st.sampled_from(["u1", "f4", "f8"]))
        arrays[f"x{i}"] = np.random.default_rng(i).integers(0, 255, shape).astype(kind)
        before[f"x{i}"] = data.draw(layouts(shape, writers))
        after[f"x{i}"] = data.draw(layouts(shape, readers))

    def state(rank: int, layout: dict[str, Any], fill: bool) -> dict[str, Any]:
        return {name: held(array, layout[name][rank], fill) for name, array in arrays.items()}

    all_well(on_ranks(writers, lambda g: ckpt.save(state(g.rank, before, True), root, 0, group=g)))
    assert_equal(ckpt.load(root, group=None), arrays)

    def load(group: Group) -> bool:
        like, want = state(group.rank, after, False), state(group.rank, after, True)
        loaded = ckpt.load(root, like, group=group)
        return all(same(loaded[name], want[name]) for name in want)

    assert all(all_well(on_ranks(readers, load)))


def test_arrays_without_elements(tmp_path: Path) -> None:
    """Cut over ranks none of which holds anything of them."""

    def state(group: Group) -> dict[str, Any]:
        boxes = ckpt.Shard(np.zeros((0, 5), "f2"), (0, 5), (0, 0))
        return {"flat": ckpt.Shard(np.zeros(0), (3, 0), flat=0), "boxes": boxes, "copies": np.zeros((0, 7), "i4")}

    for step, size in enumerate((3, 1)):
        all_well(on_ranks(size, lambda g, step=step: ckpt.save(state(g), tmp_path, step, group=g)))
        for readers in (1, 2):
            all_well(on_ranks(readers, lambda g: ckpt.load(tmp_path, state(g), group=g)))
        wanted = {"flat": np.zeros((3, 0)), "boxes": np.zeros((0, 5), "f2"), "copies": np.zeros((0, 7), "i4")}
        assert_equal(ckpt.load(tmp_path, group=None), wanted)
        assert ckpt.open(tmp_path)[step].verify() == 0


@given(st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple), st.data())
def test_a_range_of_a_flattened_array_is_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = int(np.prod(shape))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    array = np.arange(size).reshape(shape)
    boxes = flat_boxes(shape, start, stop)
    assert [int(x) for b in boxes for x in array[b.slices()].reshape(-1)] == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


class Counting(LocalStore):
    """Counts the bytes read of packs."""

    read = 0
    stretches: list[tuple[str, int, int]] = []  # what was read, from and to
    lock = threading.Lock()

    def open(self, name: str) -> Any:
        return self.counted(name, super().open(name))

    def open_once(self, name: str) -> Any:
        return self.counted(name, super().open_once(name))

    def counted(self, name: str, reader: Any) -> Any:
        inner = reader.read_into

        def read_into(position: int, buffer: memoryview) -> int:
            count = inner(position, buffer)
            if name.endswith(".pack"):
                with Counting.lock:
                    Counting.read += count
                    Counting.stretches.append((name, position, position + count))
            return count

        class Counted(Reader):
            def close(self) -> None:
                reader.close()

        made = Counted.__new__(type("Made", (Counted,), {"read_into": staticmethod(read_into)}))
        return made


@pytest.fixture(params=["memory", "messages"])
def handed_on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one host hand on through memory, others by messages: each of a store that is not theirs."""
    monkeypatch.setattr("ckpt.loading.shared_read.LocalStore", Remote)
    if request.param == "messages":
        monkeypatch.setattr(SharedWindow, "create", lambda *_: None)


@pytest.mark.usefixtures("handed_on")
@pytest.mark.parametrize("codec", ["none", {"id": "zstd", "level": 1}])
@pytest.mark.parametrize("share", ["auto", True])
def test_reads_are_shared(tmp_path: Path, codec: Any, share: Any) -> None:
    """Columns of a matrix that was saved by rows, and a leaf that all want: the store is read once for all ranks."""
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
            loaded = ckpt.load(Counting(tmp_path), like, group=group, share_reads=share)
            assert np.array_equal(loaded["w"].local, full[:, low:high])
            assert np.array_equal(loaded["c"], copied)

        Counting.read = 0
        all_well(on_ranks(size, load))
        assert stored * 0.9 <= Counting.read <= 1.05 * stored, (Counting.read, stored)


def united(stretches: list[tuple[str, int, int]]) -> int:
    """The bytes in any of these stretches of files."""
    total, at = 0, ("", 0)
    for name, begin, end in sorted(stretches):
        at = max(at, (name, begin))
        total += max(0, end - at[1])
        at = max(at, (name, end))
    return total


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
"""Rows and columns, from and to, that each of four ranks wants of a matrix."""


@pytest.mark.usefixtures("handed_on")
@pytest.mark.parametrize("codec", ["none", {"id": "zstd", "level": 1}])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_auto_shares_where_ranks_have_parts_in_common(tmp_path: Path, codec: Any, layout: str) -> None:
    """The group reads little more than what its ranks would read each for itself, each byte of that counted once."""
    draw = np.random.default_rng(5)
    full = {"big": (4000, 1024), "middle": (1500, 1024), "shared": (700, 1024)} | {f"small{i}": (40, 64) for i in range(9)}
    state = {name: draw.integers(0, 50, shape).astype(np.float32) for name, shape in full.items()}
    ckpt.save(state, tmp_path, 0, codec=codec, group=None)

    def load(group: Group, share: Any) -> None:
        boxes = {name: LAYOUTS[layout](group.rank, *shape) for name, shape in full.items()}
        like = {n: ckpt.Shard(np.zeros((b - a, d - c), np.float32), full[n], (a, c)) for n, (a, b, c, d) in boxes.items()}
        loaded = ckpt.load(Counting(tmp_path), like, group=group, share_reads=share)
        assert all(np.array_equal(loaded[n].local, state[n][a:b, c:d]) for n, (a, b, c, d) in boxes.items())

    def read_with(share: Any) -> list[tuple[str, int, int]]:
        Counting.stretches = []
        all_well(on_ranks(4, functools.partial(load, share=share)))
        return Counting.stretches

    alone = united(read_with(False))
    for share in ("auto", True):
        read = sum(end - begin for _, begin, end in read_with(share))
        assert read <= 1.05 * alone, (read, alone)


def test_four_ranks_become_three(tmp_path: Path) -> None:
    """Each block holds rows of several leaves, of which two ranks need some each: each reads its cells, and no more."""
    draw = np.random.default_rng(7)
    full = {f"w{i}": draw.integers(0, 50, (120, 40_000)).astype(np.uint8) for i in range(12)}

    def rows(rank: int, size: int, fill: bool) -> dict[str, Any]:
        cut = slice(120 * rank // size, 120 * (rank + 1) // size)
        return {n: ckpt.Shard(a[cut].copy() if fill else a[cut] * 0, a.shape, (cut.start, 0)) for n, a in full.items()}

    all_well(on_ranks(4, lambda g: ckpt.save(rows(g.rank, 4, True), tmp_path, 0, group=g, codec="none")))
    unique = sum(a.nbytes for a in full.values())
    for share, most in (("auto", 1.3), (True, 1.05)):  # whole blocks: 1.5

        def load(group: Group, share: Any = share) -> None:
            loaded = ckpt.load(Counting(tmp_path), rows(group.rank, 3, False), group=group, share_reads=share)
            wanted = rows(group.rank, 3, True)
            assert all(np.array_equal(loaded[name].local, wanted[name].local) for name in full)

        Counting.read = 0
        all_well(on_ranks(3, load))
        assert unique <= Counting.read <= most * unique, (share, Counting.read / unique)


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
        wanted = {rank: need[position] for rank, need in enumerate(needs) if position in need}
        every = [("", *run) for runs in wanted.values() for run in runs]
        if turn is None:
            assert united(every) == sum(b - a for _, a, b in every)
            continue
        assert united([("", a, b) for a, b, _ in turn.jobs]) == sum(b - a for a, b, _ in turn.jobs)
        assert sum(b - a for a, b, _ in turn.jobs) == united(every)
        for rank, runs in wanted.items():
            got = [message for run in runs for message in turn.received_by(rank, *run)]
            for peer in wanted:
                assert [m[1:] for m in got if m.rank == peer] == [m[1:] for m in turn.sent_by(peer) if m.rank == rank]
            read = [(a, b) for a, b, reader in turn.jobs if reader == rank]
            assert all(any(first <= a < b <= last for first, last in runs) for a, b in read)
            had = [*read, *(m[1:] for m in got)]
            assert sum(b - a for a, b in had) == united([("", *h) for h in had]) == sum(b - a for a, b in runs)
            assert united([("", *r) for r in [*runs, *had]]) == sum(b - a for a, b in runs)
            rounds[turn.round, rank] = rounds.get((turn.round, rank), 0) + sum(b - a for a, b in runs)
    assert max(rounds.values(), default=0) <= ROUND_BYTES


def test_neighbouring_stretches_of_a_block_are_one_read() -> None:
    """The edges of shards lie within cells: the cell that two need is read with what is beside it."""
    edges = [(i * 9 // 4 * CELL, -(-(i + 1) * 9 // 4) * CELL) for i in range(4)]
    rows = [[(0, 0, 9 * CELL, 9 * CELL, a, b)] for a, b in edges]
    (turn,) = schedule_shared_reads(needs_by_block([np.array(r, np.int64) for r in rows]), 4).values()
    cells = [(job.begin // CELL, job.end // CELL, job.reader) for job in turn.jobs]
    assert cells == [(0, 3, 0), (3, 5, 1), (5, 7, 2), (7, 9, 3)]


def test_a_step_that_is_a_number_of_numpy(tmp_path: Path) -> None:
    def restored(group: Group) -> Any:
        with ckpt.Checkpointer(tmp_path, every=None, group=group) as ck:
            ck.save(np.int64(3), one_array(3), blocking=True)
            return ck.restore(one_array(0), step=np.int64(3))[1]

    assert on_ranks(2, restored) == [4, 4]


class Remote:
    """No store is one."""


@pytest.mark.usefixtures("handed_on")
def test_damage_is_found_by_every_rank_that_shares(tmp_path: Path) -> None:
    array = np.random.default_rng(5).standard_normal(2_000_000)
    all_well(on_ranks(2, lambda g: ckpt.save({"w": array}, tmp_path, 0, group=g, codec="none")))
    pack = next((tmp_path / "steps/0/pack").glob("1-*.pack"))
    data = bytearray(pack.read_bytes())
    data[4_000_000] ^= 4
    pack.write_bytes(data)
    for error in on_ranks(3, lambda g: ckpt.load(tmp_path, {"w": array * 0}, group=g)):
        assert isinstance(error, ckpt.IntegrityError)
        assert pack.name in str(error)


def test_experts_move_to_another_number_of_ranks(tmp_path: Path) -> None:
    """Eight experts on four ranks, then on two, with their moments."""
    full = {f"experts.{e}.{n}": np.random.default_rng(e).standard_normal((16, 8)) for e in range(8) for n in ("w", "exp_avg")}

    def state(group: Group, fill: bool) -> dict[str, Any]:
        each = 8 // group.size
        mine = range(group.rank * each, (group.rank + 1) * each)
        return {
            name: ckpt.Shard(a.copy() if fill else np.zeros_like(a), a.shape, (0, 0))
            for name, a in full.items()
            if int(name.split(".")[1]) in mine
        }

    all_well(on_ranks(4, lambda g: ckpt.save(state(g, True), tmp_path, 0, group=g)))
    for size in (2, 1, 8):
        for loaded in all_well(on_ranks(size, lambda g: ckpt.load(tmp_path, state(g, False), group=g))):
            assert loaded
            assert all(np.array_equal(s.local, full[name]) for name, s in loaded.items())


def test_stages_are_renumbered_by_name(tmp_path: Path) -> None:
    """Two stages of two layers each, every stage counting from 0, become one stage of four; and back."""
    full = [np.random.default_rng(i).standard_normal((6, 4)) for i in range(4)]

    def stage(rank: int, fill: bool) -> dict[str, Any]:
        mine = [a.copy() if fill else a * 0 for a in full[2 * rank : 2 * rank + 2]]
        return {f"stage{rank}": {f"layer{i}": ckpt.Shard(a, a.shape, (0, 0)) for i, a in enumerate(mine)}}

    all_well(on_ranks(2, lambda g: ckpt.save(stage(g.rank, True), tmp_path, 0, group=g)))
    whole = {f"layer{i}": np.zeros((6, 4)) for i in range(4)}
    ckpt.load(tmp_path, whole, rename=lambda n: f"stage{int(n[5:]) // 2}.layer{int(n[5:]) % 2}")
    assert all(np.array_equal(whole[f"layer{i}"], a) for i, a in enumerate(full))
    with_patterns = {"model": {"0": np.zeros((6, 4))}}
    ckpt.load(tmp_path, with_patterns, rename={r"^model\.(\d)$": r"stage1.layer\1"})
    assert np.array_equal(with_patterns["model"]["0"], full[2])
    with pytest.raises(ckpt.LeafNotFound, match=r"leaf layer0 of `like`, renamed to nowhere, is not in step 0"):
        ckpt.load(tmp_path, whole, rename=lambda n: "nowhere")


# --- what each rank has for itself -----------------------------------------------------------------------------


def test_values_of_each_rank_come_back_to_it(tmp_path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        return {
            "w": np.arange(10.0),
            "position": rank * 100,
            "reader": ckpt.PerRank({"buffer": np.full(3, rank), "seed": rank}),
            "same": [1, "x", None],
        }

    all_well(on_ranks(3, lambda g: ckpt.save(state(g.rank), tmp_path, 0, group=g)))

    def load(group: Group) -> tuple[dict[str, Any], dict[str, Any]]:
        reader = ckpt.PerRank({"buffer": np.zeros(3, int), "seed": -1})
        like = {"w": np.zeros(10), "position": -1, "reader": reader, "same": [0, "", 0]}
        return ckpt.load(tmp_path, group=group), ckpt.load(tmp_path, like, group=group)

    for size in (3, 5):
        for rank, (new, filled) in enumerate(all_well(on_ranks(size, load))):
            own = rank % 3
            assert new["position"] == filled["position"] == own * 100
            assert new["reader"]["buffer"].tolist() == filled["reader"].value["buffer"].tolist() == [own] * 3
            assert new["reader"]["seed"] == filled["reader"].value["seed"] == own
            assert new["same"] == filled["same"] == [1, "x", None]
    assert str(state(1)["reader"]) == "PerRank({'buffer': array([1, 1, 1]), 'seed': 1})"
    assert ckpt.load(tmp_path, group=None)["position"] == 0
    assert sorted(ckpt.open(tmp_path)[0]) == ["reader.buffer@0", "reader.buffer@1", "reader.buffer@2", "w"]


def generators(seed: int) -> dict[str, Any]:
    """One of each kind of random generator, some numbers into its stream."""
    torch = pytest.importorskip("torch")
    found: dict[str, Any] = {
        "philox": np.random.Generator(np.random.Philox(seed)), "pcg": np.random.default_rng(seed),
        "bits": np.random.SFC64(seed), "old": np.random.RandomState(seed), "python": random.Random(seed),
        "torch": torch.Generator().manual_seed(seed),
    }  # fmt: skip
    draws(found, 3 + seed)
    return found


def draws(made: dict[str, Any], count: int = 4) -> list[Any]:
    """The next numbers of each generator."""
    torch = pytest.importorskip("torch")
    return [
        made["philox"].random(count).tolist(), made["pcg"].integers(9, size=count).tolist(),
        np.random.Generator(made["bits"]).random(count).tolist(), made["old"].rand(count).tolist(),
        [made["python"].random() for _ in range(count)], torch.rand(count, generator=made["torch"]).tolist(),
    ]  # fmt: skip


def test_random_generators_of_each_rank_go_on_where_they_were(tmp_path: Path) -> None:
    all_well(on_ranks(3, lambda g: ckpt.save({"random": generators(g.rank)}, tmp_path, 0, group=g)))
    for size in (3, 4, 1):
        like = [{"random": generators(77 + rank)} for rank in range(size)]
        loaded = all_well(on_ranks(size, lambda g, like=like: ckpt.load(tmp_path, like[g.rank], group=g)))
        for rank, state in enumerate(loaded):
            assert draws(state["random"]) == draws(generators(rank % 3)), f"rank {rank} of {size}"


@pytest.mark.parametrize("nbytes", [100, (64 << 10) + 1, 300_000, 9 << 20])
def test_bytes_of_each_rank_come_back_to_it(tmp_path: Path, nbytes: int) -> None:
    """However long they are, and whether their lengths are the same."""

    def state(rank: int) -> dict[str, Any]:
        return {"w": np.arange(50_000.0), "same length": bytes([65 + rank]) * nbytes, "other": bytes(rank * nbytes)}

    all_well(on_ranks(3, lambda g: ckpt.save(state(g.rank), tmp_path, 0, group=g)))
    for size in (3, 5):
        like = {"w": np.zeros(50_000), "same length": b"", "other": b""}
        new = all_well(on_ranks(size, lambda g: ckpt.load(tmp_path, group=g)))
        filled = all_well(on_ranks(size, lambda g, like=like: ckpt.load(tmp_path, dict(like), group=g)))
        for rank in range(size):
            assert_equal(new[rank], state(rank % 3))
            assert_equal(filled[rank], state(rank % 3))


def numpy_scalars(rank: int) -> dict[str, Any]:
    return {
        "float": np.float64(rank + 0.5), "flag": np.bool_(rank % 2), "text": np.str_("r" * rank), "none": np.void(b""),
        "time": np.datetime64("2024-01-01") + rank, "half": ml_dtypes.bfloat16(rank), "same": np.int16(-7),
        "record": np.array((rank, b"x"), [("a", "<i4"), ("b", "S3")])[()], "long": np.bytes_(bytes([65 + rank]) * 70_000),
    }  # fmt: skip


def test_numpy_scalars_of_each_rank_come_back_to_it(tmp_path: Path) -> None:
    """They are plain values, like Python's numbers, and no copies of one array."""

    def as_saved(rank: int) -> dict[str, Any]:
        return numpy_scalars(rank) | {"own": ckpt.PerRank(np.float32(rank))}

    all_well(on_ranks(2, lambda g: ckpt.save(as_saved(g.rank), tmp_path, 0, group=g)))
    for rank, loaded in enumerate(all_well(on_ranks(2, lambda g: ckpt.load(tmp_path, group=g)))):
        assert_same(loaded, numpy_scalars(rank) | {"own": np.float32(rank)})
    like = [numpy_scalars(1 - rank) | {"float": np.zeros(()), "text": np.str_("r" * rank)} for rank in range(2)]
    for rank, loaded in enumerate(all_well(on_ranks(2, lambda g: ckpt.load(tmp_path, like[g.rank], group=g)))):
        assert loaded["float"] is like[rank]["float"]  # an array without axes is filled in place
        assert_same(loaded | {"float": loaded["float"][()]}, numpy_scalars(rank))
    sharded = {"float": ckpt.Shard(np.zeros(()), (), ())}
    assert ckpt.load(tmp_path, sharded, group=None)["float"].local == 0.5
    with pytest.raises(ckpt.LeafMismatch, match="leaf float: .* has dtype float64, `like` has float32"):
        ckpt.load(tmp_path, {"float": np.float32(0)}, group=None)
    with pytest.raises(ckpt.LeafMismatch, match=r"leaf float: .* has shape \[\], `like` has \[2\]"):
        ckpt.load(tmp_path, {"float": np.zeros(2)}, group=None)


# --- what is refused -------------------------------------------------------------------------------------------


def refused(tmp_path: Path, state: Callable[[int], Any], size: int = 2, **options: Any) -> list[Any]:
    """The errors of a save by every rank; nothing is committed, and the next save works."""
    groups = ThreadGroup.make(size)
    good = {"good": np.arange(5)}
    all_well(on_ranks(size, lambda g: ckpt.save(good, tmp_path, 0, group=g), groups))
    found = on_ranks(size, lambda g: ckpt.save(state(g.rank), tmp_path, 1, group=g, **options), groups)
    assert all(isinstance(error, ckpt.CkptError) for error in found), found
    assert ckpt.open(tmp_path).steps() == [0]
    all_well(on_ranks(size, lambda g: ckpt.save(good, tmp_path, 1, group=g), groups))
    assert ckpt.open(tmp_path).steps() == [0, 1]
    return found


def test_a_gap_is_refused_with_leaf_and_box(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        return {"w": ckpt.Shard(np.zeros((4, 6)), (10, 6), (6 * rank, 0))}

    for error in refused(tmp_path, state):
        assert isinstance(error, ckpt.StepRefused)
        assert "step 1: leaf w: no rank stored [4:6, 0:6] of shape (10, 6), ranks 0, 1 stored what lies beside it" in str(error)


class Broken:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def state_dict(self) -> Any:
        raise self.error

    def load_state_dict(self, state: Any) -> None:
        raise self.error


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("error", [RuntimeError("out of range"), KeyboardInterrupt()])
def test_the_others_hear_which_rank_failed_at_which_step(tmp_path: Path, broken: int, error: BaseException) -> None:
    def save(group: Group) -> Any:
        try:
            return ckpt.save({"m": Broken(error)} if group.rank == broken else {"m": np.arange(5)}, tmp_path, 7, group=group)
        except BaseException as raised:
            return raised

    found = on_ranks(3, save)
    for rank, heard in enumerate(found):
        if rank != broken:
            assert isinstance(heard, ckpt.StepRefused)
            assert str(heard).startswith(f"step 7 is given up because rank {broken} failed: ")
            assert (str(error) or "KeyboardInterrupt") in str(heard)


def test_a_leaf_on_one_rank_only_must_say_so(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        return {"a": np.zeros(100_000)} | ({"only": np.zeros(100_000)} if rank else {})

    for error in refused(tmp_path, state):
        assert "leaf only is on rank 1 but not on rank 0" in str(error)
        assert "ckpt.Shard" in str(error)


@pytest.mark.parametrize("lost", ["embed", "norm", "z"])
@pytest.mark.parametrize("instead", ["", "another"])
def test_a_copy_that_a_rank_lacks_is_named(tmp_path: Path, lost: str, instead: str) -> None:
    """Ranks divide what they take for copies, so that what is missing is of some other leaf."""

    def state(rank: int) -> Any:
        whole = {"embed": np.ones((500, 70)), "norm": np.ones(90_000), "z": np.ones((3000, 31)), "count": rank}
        if rank == 2:
            renamed = whole.pop(lost)
            if instead:
                whole[instead] = renamed
        return whole

    for error in refused(tmp_path, state, 4):
        assert isinstance(error, ckpt.StepRefused)
        assert f"leaf {lost} is on ranks 0, 1, 3 but not on rank 2, where each should have" in str(error).replace(
            f", leaf {instead} is on rank 2 but not on ranks 0, 1, 3", ""
        )
        assert (f"leaf {instead} is on rank 2 but" in str(error)) == bool(instead)


@pytest.mark.parametrize("lacking_it", [{0}, {1}, {3}, {1, 2, 3}, {0, 1, 2}], ids=str)
@pytest.mark.parametrize("size", [1, 64, 500, 20_000])
def test_a_copy_that_a_rank_lacks_is_refused_whatever_its_size(tmp_path: Path, size: int, lacking_it: set[int]) -> None:
    """A small one is written by one rank: where another lacks it, no part of it is missing."""

    def state(rank: int) -> Any:
        return {"d": np.arange(1000.0)} | ({} if rank in lacking_it else {"x": np.ones(size)})

    for error in refused(tmp_path, state, 4):
        assert isinstance(error, ckpt.StepRefused)
        assert f"step 1: leaf x is on {ranks_text(sorted({*range(4)} - lacking_it))} but not on" in str(error)


def test_a_copy_is_lacked_by_those_that_divide_it() -> None:
    """Two pairs of ranks hold copies, and all of them: a leaf of one pair is none that the other lacks."""

    def text(**leaves: Sequence[str]) -> str:
        return json.dumps(
            {sharer: base64.b64encode(zlib.compress(json.dumps(names).encode())).decode() for sharer, names in leaves.items()}
        )

    first, second = text(pair1="a", all="x"), text(pair2="b", all="x")
    told = {first: [0, 1], second: [2, 3]}
    assert missing_copies_text(told, lambda _: {}) == ""
    told = {first: [0], text(pair1="c", all="x"): [1], second: [2, 3]}
    assert missing_copies_text(told, lambda _: {}).startswith("leaf a is on rank 0 but not on rank 1, leaf c is on rank 1 but")
    assert missing_copies_text(told, lambda names: {name: {0, 1} for name in names}) == "", (
        "a rank's rows tell that it has them"
    )
    told = {text(all=[f"w{i}" for i in range(9)]): [0, 1], text(): [2]}
    assert "leaf w2 is on ranks 0, 1 but not on rank 2 and 6 more leaves, where each" in missing_copies_text(told, lambda _: {})


def test_copies_of_which_there_are_more_than_ranks(tmp_path: Path) -> None:
    """Also where it is so small that one rank writes all of it: a larger one would lack a part."""

    def save(group: Group, of: int) -> Any:
        state = {"w": ckpt.Shard(np.ones((2, 5)), (2, 5), (0, 0), replica=(group.rank, of))}
        return ckpt.save(state, tmp_path, of, group=group)

    for rank, error in enumerate(on_ranks(2, lambda g: save(g, 3))):
        assert isinstance(error, ckpt.UnsupportedLeaf)
        assert f"leaf w: its shard is replica {rank} of 3, but only 2 ranks save" in str(error)
    all_well(on_ranks(2, lambda g: save(g, 2)))
    assert ckpt.open(tmp_path).steps() == [2]


@pytest.mark.parametrize("number", [0, 1])
def test_copies_that_all_take_themselves_for_the_same(tmp_path: Path, number: int) -> None:
    def state(_: int) -> Any:
        return {"w": ckpt.Shard(np.ones((64, 5000)), (64, 5000), (0, 0), replica=(number, 2))}

    for error in refused(tmp_path, state):
        assert "leaf w: no rank stored" in str(error)
        assert "where a Shard has replica=(i, n), a rank must save each i" in str(error)


def test_a_shard_that_a_rank_calls_otherwise_is_named(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        mine = ckpt.Shard(np.ones((2, 5)), (8, 5), (2 * rank, 0))
        return {"a": np.ones(70_000), "other" if rank == 2 else "w": mine}

    for error in refused(tmp_path, state, 4):
        assert "leaf w: no rank stored [4:6, 0:5] of shape (8, 5), ranks 1, 3 stored what lies beside it" in str(error)


def test_an_overlap_is_refused(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        return {"w": ckpt.Shard(np.full((6, 2), rank), (10, 2), (4 * rank, 0))}

    for error in refused(tmp_path, state):
        assert isinstance(error, ckpt.StepRefused)
        assert "step 1: leaf w: [0:6, 0:2] of rank 0 and [4:10, 0:2] of rank 1 overlap" in str(error)


def test_different_shapes_are_refused(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        return {"w": ckpt.Shard(np.zeros(4), (8 + rank,), (4 * rank,))}

    for error in refused(tmp_path, state):
        assert "step 1: leaf w" in str(error)
        assert "(8,) on rank 0" in str(error)
        assert "(9,) on rank 1" in str(error)


CONTRADICTIONS: dict[str, tuple[Callable[[int], Any], str, str]] = {
    # What a rank has as `w`, and the shapes of ranks 0 and 1. One rank writes all of it, so that no row tells.
    "plain": (lambda r: np.full(4 + r, 0.5), "(4,)", "(5,)"),
    "axes": (lambda r: np.full((1,) * r, 3.0), "()", "(1,)"),
    "dtype": (lambda r: np.ones(4, "f4" if r else "f8"), "(4,)", "(4,)"),
    "empty": (lambda r: np.ones((0, 3 + r)), "(0, 3)", "(0, 4)"),
    "copy of a shard": (lambda r: ckpt.Shard(np.ones(4), (4 + r,), (0,), replica=(r, 2)), "(4,)", "(5,)"),
    "no elements here": (lambda r: ckpt.Shard(np.ones(0 if r else 4), (4 + r,), (0,)), "(4,)", "(5,)"),
    "plain and shard": (lambda r: np.ones(5) if r else ckpt.Shard(np.ones(4), (4,), (0,)), "(4,)", "(5,)"),
}


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_copies_that_are_not_one_array_are_refused(tmp_path: Path, kind: str, verify: bool) -> None:
    make, first, second = CONTRADICTIONS[kind]
    both = lambda rank: {"a": np.ones(3), "w": make(rank), "z": [np.ones(2), 5]}  # noqa: E731
    for error in refused(tmp_path, both, verify_replicas=verify):
        assert isinstance(error, ckpt.StepRefused)
        dtype = "float32" if kind == "dtype" else "float64"
        said = f"leaf w is float64 of global shape {first} on rank 0 and {dtype} of global shape {second} on rank 1; give"
        assert str(error).startswith(f"step 1: {said}"), error


def test_a_module_of_another_size_is_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for error in refused(tmp_path, lambda rank: {"m": torch.nn.Linear(3, 3 + rank)}):
        assert "m.weight is float32 of global shape (3, 3) on rank 0 and float32 of global shape (4, 3) on rank 1" in str(error)
        assert "ckpt.PerRank" in str(error)


def test_what_ranks_hold_is_told_shortly(tmp_path: Path) -> None:
    """One text for all ranks of a DDP state, small beside its tree; nothing of what a rank's rows tell, or is its own."""

    def state(rank: int) -> dict[str, Any]:
        layers = {f"layers.{i}.{n}.weight": np.full((8, 8), rank) for i in range(100) for n in ("up", "down", "norm")}
        mine = ckpt.Shard(np.ones(3), (6,), (3 * rank,))
        return {"model": layers, "mine": mine, "own": ckpt.PerRank(np.ones(rank + 1)), "none": np.ones(0)}

    flats = [flatten(state(rank), rank) for rank in range(2)]
    assert describe_leaves(flats[0]) == describe_leaves(flats[1])
    known = agreed_descriptions({describe_leaves(flats[0]): 0})
    assert set(known) == {name for name in flats[0].leaves if name.startswith("model")} | {"none"}
    assert known["model.layers.7.up.weight"] == (0, "int64", (8, 8))
    assert len(describe_leaves(flats[0])) < len(encode_tree(flats[0].node)) / 5


def test_a_rank_that_cannot_store_its_leaf_tells_the_others(tmp_path: Path) -> None:
    errors = refused(tmp_path, lambda rank: {"a": np.zeros(3), "b": (lambda: 0) if rank else 0})
    assert isinstance(errors[1], ckpt.UnsupportedLeaf)
    assert isinstance(errors[0], ckpt.StepRefused)
    assert "rank 1 failed" in str(errors[0])
    assert "leaf b" in str(errors[0])


def test_different_options_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("blake3")
    groups = ThreadGroup.make(2)
    kinds = ["xxh3-128", "blake3"]
    found = on_ranks(2, lambda g: ckpt.save({"a": np.zeros(9000)}, tmp_path, 0, group=g, digest=kinds[g.rank]), groups)
    assert all(isinstance(e, ckpt.StepRefused) and "same options" in str(e) for e in found)


def test_copies_that_differ_are_found(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        array = np.arange(60_000.0).reshape(300, 200)
        if rank == 2:
            array[17, 3] = -1
        half = slice(150 * (rank % 2), 150 * (rank % 2) + 150)
        return {"w": array, "half": ckpt.Shard(np.ones((150, 9)), (300, 9), (half.start, 0), replica=(rank // 2, 2))}

    for error in refused(tmp_path, state, 4, verify_replicas=True):
        assert isinstance(error, ckpt.StepRefused)
        assert "leaf w differs between rank 0 and rank 2" in str(error)
    groups = ThreadGroup.make(4)
    good = lambda rank: {**state(rank), "w": np.ones((300, 200))}  # noqa: E731
    all_well(on_ranks(4, lambda g: ckpt.save(good(g.rank), tmp_path, 5, group=g, verify_replicas=True), groups))


def test_copies_are_verified_by_all_ranks_or_none(tmp_path: Path) -> None:
    groups = ThreadGroup.make(4)
    verify = lambda g: ckpt.save({"w": np.full(90_000, g.rank)}, tmp_path, 0, group=g, verify_replicas=g.rank == 2)  # noqa: E731
    for error in on_ranks(4, verify, groups):
        assert isinstance(error, ckpt.StepRefused)
        assert "verify_replicas=True on rank 2, False on ranks 0, 1, 3" in str(error)
    assert ckpt.open(tmp_path).steps() == []


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    groups = ThreadGroup.make(4)

    def work(group: Group) -> Any:
        ckpt.save({"a": np.arange(50)}, tmp_path, 0, group=group)
        if group.rank in (1, 3):
            return None
        return ckpt.save({"a": np.arange(50)}, tmp_path, 1, group=group, timeout=0.5)

    found = on_ranks(4, work, groups)
    assert isinstance(found[0], ckpt.RanksMissing)
    assert "ranks 1, 3 of 4" in str(found[0])
    assert "step 1" in str(found[0])
    assert isinstance(found[2], ckpt.RanksMissing), "as rank 0, so that all choose the next tier or none"
    assert "ranks 1, 3 of 4" in str(found[2])
    left = [path.name for path in (tmp_path / "steps/1").rglob("*-*")]
    assert all(name.endswith("-failed.json") for name in left), left
    assert ckpt.open(tmp_path).steps() == [0]
    all_well(on_ranks(4, lambda g: ckpt.save({"a": np.arange(50)}, tmp_path, 2, group=g), groups))


def test_a_missing_rank_does_not_block_training(tmp_path: Path) -> None:
    """The committer waits in the background; the loop goes on and is told at the next save."""
    groups = ThreadGroup.make(2)

    def work(group: Group) -> Any:
        saver = ckpt.Checkpointer(tmp_path, every=None, group=group, timeout=0.5)
        saver.save(0, {"a": np.zeros(10)}).result()
        if group.rank == 1:
            return None
        handle = saver.save(1, {"a": np.zeros(10)})
        assert not handle.done()
        handle.wait()
        with pytest.raises(ckpt.SaveFailed, match=r"saving step 1 .* rank 1 of 2 did not bring its part"):
            saver.save(2, {"a": np.zeros(10)})
        with pytest.raises(ckpt.SaveFailed, match="saving step 2"):
            saver.close()
        return "told"

    assert on_ranks(2, work, groups) == ["told", None]


@pytest.mark.parametrize("step", [1, 2])
def test_a_rank_that_has_ended_its_saves_is_not_waited_for(tmp_path: Path, step: int) -> None:
    """What it has brought before counts."""
    groups, closed = ThreadGroup.make(3), threading.Event()

    def work(group: Group) -> Any:
        saver = ckpt.Checkpointer(tmp_path, every=None, group=group, timeout=600)
        saver.save(0, one_array(0)).result()
        last = saver.save(1, one_array(1))
        if group.rank == 1:
            saver.close()
            closed.set()
            return None
        assert closed.wait(60)
        last.result()
        if step == 2:
            with pytest.raises(ckpt.CkptError, match="rank 1 of 3 did not bring its part of step 2 and has ended"):
                saver.save(2, one_array(2)).result()
        saver.close()
        return "told"

    assert on_ranks(3, work, groups) == ["told", None, "told"]
    assert ckpt.open(tmp_path).steps() == [0, 1]
    all_well(on_ranks(3, lambda g: ckpt.save(one_array(3), tmp_path, 3, group=g, timeout=20), groups))
    assert list((tmp_path / "generations").rglob("*-*")) == [], "such words go with the generation"


FORKED = """
import os, sys, threading
import numpy as np
import ckpt
from ckpt.groups.threads import ThreadGroup

def rank(group):
    ck = ckpt.Checkpointer(sys.argv[1], every=None, group=group)
    ck.save(0, {"a": np.zeros(5000)}, blocking=True)
    if group.rank == 1:
        child = os.fork()
        if not child:
            ck.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        left.set()
    assert left.wait(60)
    ck.save(1, {"a": np.zeros(5000)}, blocking=True)
    said.append(sorted(name for name in os.listdir(sys.argv[1] + "/generations") if "left" in name))
    both.wait(60)
    ck.close()

left, both, said, groups = threading.Event(), threading.Barrier(2), [], ThreadGroup.make(2)
threads = [threading.Thread(target=rank, args=(group,)) for group in groups]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(said, ckpt.open(sys.argv[1]).steps())
"""


def test_a_forked_child_does_not_speak_for_its_parent(tmp_path: Path) -> None:
    assert finish(python(FORKED, tmp_path)).strip() == "[[], []] [0, 1]"


def test_parts_of_an_earlier_generation_are_not_taken(tmp_path: Path) -> None:
    """Rank 1 of a killed job left its part; the next job's rank 1 never comes."""

    def stale(group: Group) -> Any:
        return ckpt.save({"a": np.full(2000, 1.0)}, tmp_path, 0, group=group, timeout=0.3)

    set_failpoints("save.commit=error")
    try:
        first = on_ranks(2, stale)
    finally:
        set_failpoints("")
    assert isinstance(first[0], ckpt.StoreError)
    keep = list((tmp_path / "steps/0/part").glob("1-*"))
    part = tmp_path / "steps/0/part" / "1-1-0-0-0123456789abcdef0123456789abcdef.arrow"
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(keep[0].read_bytes() if keep else b"x")
    groups = ThreadGroup.make(2)

    def work(group: Group) -> Any:
        saver = ckpt.Checkpointer(tmp_path, every=None, group=group, timeout=0.3)
        return saver.save(0, {"a": np.full(2000, 2.0)}, blocking=True).result() if group.rank == 0 else None

    found = on_ranks(2, work, groups)
    assert isinstance(found[0], ckpt.RanksMissing), found
    assert ckpt.open(tmp_path).steps() == []


def test_a_second_job_fences_the_first(tmp_path: Path) -> None:
    groups = ThreadGroup.make(2)
    all_well(on_ranks(2, lambda g: ckpt.save({"a": np.zeros(10)}, tmp_path, 0, group=g), groups))
    record = tmp_path / "generations" / "00000009.json"
    record.write_bytes(sorted((tmp_path / "generations").iterdir())[-1].read_bytes())
    found = on_ranks(2, lambda g: ckpt.save({"a": np.zeros(10)}, tmp_path, 1, group=g), groups)
    assert isinstance(found[0], ckpt.Fenced)
    assert isinstance(found[1], (ckpt.Fenced, ckpt.StepRefused))
    assert ckpt.open(tmp_path).steps() == [0]


def test_a_rank_that_wakes_after_a_newer_job_has_its_step_is_told_to_stop(tmp_path: Path) -> None:
    """And not to take another number."""
    groups = ThreadGroup.make(2)
    all_well(on_ranks(2, lambda g: ckpt.save(one_array(0), tmp_path, 0, group=g), groups))
    mine = sorted((tmp_path / "generations").iterdir())[-1]
    mine.with_name("00000009.json").write_bytes(mine.read_bytes())
    for error in on_ranks(2, lambda g: ckpt.save(one_array(1), tmp_path, 0, group=g), groups):
        assert isinstance(error, ckpt.Fenced)


def test_ranks_are_told_why_rank_0_cannot_begin(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    found = on_ranks(3, lambda g: ckpt.save({"a": 1}, tmp_path, 0, group=g))
    assert all(isinstance(error, ckpt.FormatError) and "thesis.txt" in str(error) for error in found)


# --- over time -------------------------------------------------------------------------------------------------


def test_unchanged_blocks_are_referred_to_and_old_steps_go(tmp_path: Path) -> None:
    """Half of the state never changes; with keep=2 nothing but what the last two steps need is left."""
    groups = ThreadGroup.make(3)
    frozen = np.random.default_rng(1).standard_normal((3, 200_000))

    def work(group: Group) -> None:
        with ckpt.Checkpointer(tmp_path, every=1, keep=2, group=group, codec="none") as saver:
            state = {
                "frozen": ckpt.Shard(frozen[group.rank : group.rank + 1].copy(), frozen.shape, (group.rank, 0)),
                "moving": ckpt.Shard(np.zeros((1, 1000), np.float32), (3, 1000), (group.rank, 0)),
            }
            for step in range(6):
                state["moving"].local += 1
                saver.step(step, state)

    all_well(on_ranks(3, work, groups))
    repo = ckpt.open(tmp_path)
    assert repo.steps() == [4, 5]
    assert repo[5].commit.written_bytes < frozen.nbytes / 10
    loaded = ckpt.load(tmp_path)
    assert np.array_equal(loaded["frozen"], frozen)
    assert (loaded["moving"] == 6).all()
    assert_clean(tmp_path, folders=False)


def test_steps_counted_in_seconds_are_the_same_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks whose clocks and speeds differ save the same steps."""
    monkeypatch.setattr("ckpt.training.save_schedule.LEAD_SECONDS", 0.2)

    def work(group: Group) -> list[int]:
        saved = []
        with ckpt.Checkpointer(tmp_path, every=timedelta(seconds=0.05), group=group) as saver:
            for step in range(120):
                time.sleep(0.004 + 0.002 * group.rank)
                if saver.step(step, {"a": np.full(100, float(step))}) is not None:
                    saved.append(step)
        return saved

    saved = all_well(on_ranks(3, work))
    assert saved[0][0] == 0
    assert len(saved[0]) >= 2
    assert saved[0] == saved[1] == saved[2] == ckpt.open(tmp_path).steps()


@given(st.integers(0, 10**6), st.floats(1e-4, 100), st.floats(0.01, 10**5))
def test_the_next_step_lies_ahead(now: int, step_seconds: float, interval: float) -> None:
    step = next_step(now, step_seconds, interval)
    assert (step - now) * step_seconds >= LEAD_SECONDS
    assert abs((step - now) * step_seconds - interval) <= max(step_seconds, LEAD_SECONDS + 4 * step_seconds)


def test_a_rank_whose_loss_is_not_finite_tells_the_others(tmp_path: Path) -> None:
    def work(group: Group) -> Any:
        with ckpt.Checkpointer(tmp_path, every=1, group=group) as saver:
            saver.step(0, {"a": np.zeros(9)}, loss=1.0)
            saver.wait()
            saver.step(1, {"a": np.zeros(9)}, loss=float("nan") if group.rank == 2 else 1.0)
            saver.wait()

    found = on_ranks(3, work)
    assert found[2] is None
    for error in found[:2]:
        assert isinstance(error, ckpt.SaveFailed)
        assert "rank 2 failed: its loss is nan" in str(error)
    assert ckpt.open(tmp_path).steps() == [0]


def test_a_group_falls_back_together(tmp_path: Path) -> None:
    """The newest step is damaged where only rank 1 reads: every rank loads the one before."""
    full = np.random.default_rng(3).integers(0, 1000, (2, 300_000)).astype(float)

    def state(rank: int, fill: bool = True) -> dict[str, Any]:
        local = full[rank : rank + 1].copy() if fill else np.zeros((1, 300_000))
        return {"w": ckpt.Shard(local, full.shape, (rank, 0)), "step": 0}

    for step in (0, 1):
        both = on_ranks(2, lambda g, n=step: ckpt.save(state(g.rank) | {"step": n}, tmp_path, n, group=g, codec="none"))
        all_well(both)
        full += 1
    full -= 2
    pack = next((tmp_path / "steps/1/pack").glob("1-*.pack"))
    data = bytearray(pack.read_bytes())
    data[1000] ^= 1
    pack.write_bytes(data)

    def load(group: Group) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = ckpt.load(tmp_path, state(group.rank, False), group=group)
        assert np.array_equal(loaded["w"].local, full[group.rank : group.rank + 1])
        return int(loaded["step"])

    assert all_well(on_ranks(2, load)) == [0, 0]
    for error in on_ranks(2, lambda g: ckpt.load(tmp_path, state(g.rank, False), group=g, step=1)):
        assert isinstance(error, ckpt.IntegrityError)
    next((tmp_path / "steps/0/pack").glob("0-*.pack")).unlink()
    for error in on_ranks(2, lambda g: ckpt.load(tmp_path, state(g.rank, False), group=g)):
        assert isinstance(error, ckpt.IntegrityError)
        assert "no step of " in str(error)
        assert "is whole, of steps 0, 1; the newest: leaf w of step 1" in str(error)


def test_shards_of_one_process_must_be_whole(tmp_path: Path) -> None:
    array = np.arange(40.0).reshape(8, 5)
    parts = [array[:3].copy(), array[3:].copy()]
    ckpt.save({"w": ckpt.Shard(parts, (8, 5), [(0, 0), (3, 0)])}, tmp_path, 0)
    assert np.array_equal(ckpt.load(tmp_path)["w"], array)
    with pytest.raises(ckpt.StepRefused, match=r"w.*\[3:8, 0:5\]"):
        ckpt.save({"w": ckpt.Shard(parts[0], (8, 5), (0, 0))}, tmp_path, 1)
    with pytest.raises(ckpt.UnsupportedLeaf, match="does not lie in an array of shape"):
        ckpt.save({"w": ckpt.Shard(parts[1], (8, 5), (4, 0))}, tmp_path, 1)
    assert ckpt.open(tmp_path).steps() == [0]
    json.dumps(ckpt.open(tmp_path)[0].commit.world_size)


# --- what a review found ---------------------------------------------------------------------------------------


class Unreliable(LocalStore):
    """Stores a part and then says that it could not."""

    rank_1_fails = True

    def put(self, name: str, data: Any) -> None:
        super().put(name, data)
        if Unreliable.rank_1_fails and "/part/1-" in name and name.endswith(".arrow"):
            raise ckpt.StoreError("no answer came")


def test_a_rank_keeps_what_rank_0_may_commit(tmp_path: Path) -> None:
    """The put of the part arrived, its answer did not: the packs must stay."""
    array = np.random.default_rng(0).standard_normal(40_000)
    found = on_ranks(2, lambda g: ckpt.save({"a": array}, Unreliable(tmp_path), 0, group=g))
    assert isinstance(found[1], ckpt.StoreError)
    for step in ckpt.open(tmp_path).steps():
        assert np.array_equal(ckpt.load(tmp_path, step=step)["a"], array)


def test_ranks_that_learn_of_a_failure_at_different_calls_stay_in_step(tmp_path: Path) -> None:
    """Whatever is committed is of one iteration, though the numbers of the steps are left to the library."""
    groups = ThreadGroup.make(2)
    met = threading.Barrier(2)

    def work(group: Group) -> list[Any]:
        told: list[Any] = []
        for i in range(6):
            met.wait(30)
            state = {"a": ckpt.Shard(np.full(10, float(i)), (20,), (10 * group.rank,))}
            if i == 1 and group.rank == 1:
                state["bad"] = lambda: 0  # type: ignore[assignment]
            try:
                handle = ckpt.save(state, tmp_path, blocking=False, group=group, timeout=1)
                if i == 1 and group.rank == 0 and not handle.wait(20):
                    raise AssertionError("rank 0 was not told")
                told.append(None)
            except ckpt.CkptError as error:
                told.append(type(error).__name__)
        ckpt.save({"a": ckpt.Shard(np.full(10, 9.0), (20,), (10 * group.rank,))}, tmp_path, 99, group=group)
        return told

    told = all_well(on_ranks(2, work, groups))
    assert told[0] == [None, None, "SaveFailed", None, None, None]
    assert told[1] == [None, "UnsupportedLeaf", None, None, None, None]
    assert ckpt.open(tmp_path).steps() == [0, 2, 3, 4, 5, 99]
    for step in ckpt.open(tmp_path).steps():
        assert len(set(ckpt.load(tmp_path, step=step, group=None)["a"].tolist())) == 1, step


def test_a_leaf_that_nobody_holds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ckpt.StepRefused, match="leaf w: no rank stored any of it"):
        ckpt.save({"w": ckpt.Shard(np.zeros((0, 4)), (10, 4), (0, 0))}, tmp_path, 0)
    for error in on_ranks(2, lambda g: ckpt.save({"w": ckpt.Shard(np.zeros((0, 4)), (10, 4), (0, 0))}, tmp_path, 0, group=g)):
        assert isinstance(error, ckpt.StepRefused)
        assert "leaf w" in str(error)


def test_tied_shards_of_which_one_rank_has_none(tmp_path: Path) -> None:
    """Rank 1 cannot see that they are tied."""

    def state(group: Group) -> Any:
        local = np.arange(4.0) if group.rank == 0 else np.zeros(0)
        shard = ckpt.Shard(local, (4,), (4 * group.rank,))
        return {"a": shard, "b": ckpt.Shard(local, (4,), (4 * group.rank,))}

    all_well(on_ranks(2, lambda g: ckpt.save(state(g), tmp_path, 0, group=g)))
    for loaded in all_well(on_ranks(2, lambda g: ckpt.load(tmp_path, group=g))):
        assert loaded["a"].tolist() == loaded["b"].tolist() == [0, 1, 2, 3]


def test_shards_of_scalars_are_not_tied(tmp_path: Path) -> None:
    ckpt.save({"a": ckpt.Shard(np.float64(1), (), ()), "b": ckpt.Shard(np.float64(2), (), ())}, tmp_path, 0)
    loaded = ckpt.load(tmp_path)
    assert (float(loaded["a"]), float(loaded["b"])) == (1, 2)


def test_a_listing_that_fails_fails_on_all_ranks_and_the_next_load_works(tmp_path: Path) -> None:
    class Blind(LocalStore):
        broken = True

        def list_folders(self, prefix: str = "") -> Any:
            if Blind.broken:
                raise ckpt.StoreError("out of reach")
            return super().list_folders(prefix)

    groups = ThreadGroup.make(3)
    all_well(on_ranks(3, lambda g: ckpt.save({"a": np.ones(9)}, tmp_path, 0, group=g), groups))
    for error in on_ranks(3, lambda g: ckpt.load(Blind(tmp_path), group=g), groups):
        assert isinstance(error, ckpt.StoreError)
    Blind.broken = False
    for loaded in all_well(on_ranks(3, lambda g: ckpt.load(Blind(tmp_path), group=g), groups)):
        assert loaded["a"].tolist() == [1] * 9


def test_rank_0_may_save_for_itself_beside_the_group(tmp_path: Path) -> None:
    groups = ThreadGroup.make(2)
    all_well(on_ranks(2, lambda g: ckpt.save({"a": np.ones(9)}, tmp_path, 0, group=g), groups))
    ckpt.save({"mine": 1}, tmp_path, 1, group=None)
    all_well(on_ranks(2, lambda g: ckpt.save({"a": np.ones(9)}, tmp_path, 1, group=g, overwrite=True), groups))
    assert ckpt.load(tmp_path, group=None)["a"].tolist() == [1] * 9


def one_array(value: float) -> dict[str, Any]:
    return {"a": np.full(2000, value)}


def owner(root: Path) -> Any:
    """Who holds the newest generation."""
    return json.loads(sorted((root / "generations").iterdir())[-1].read_bytes())["owner"]


def test_groups_of_one_job_save_to_one_url_by_turns(tmp_path: Path) -> None:
    """torch's default group and a mesh of the same ranks, COMM_WORLD and a duplicate of it; also some of the ranks."""
    one, other, some = ThreadGroup.make(3), ThreadGroup.make(3), ThreadGroup.make(2)
    for step, groups in enumerate([one, other, some, one, some, other, one]):
        for blocking in (True, False):
            handles = all_well(on_ranks(len(groups), lambda g: ckpt.save(
                one_array(step), tmp_path, step, group=g, timeout=20, blocking=blocking, overwrite=not blocking,  # noqa: B023
            ), groups))  # fmt: skip
        for handle in handles:
            handle.result()
        assert ckpt.load(tmp_path, group=None)["a"].tolist() == [step] * 2000
    ckpt.save({"mine": 1}, tmp_path, 50, group=None)
    all_well(on_ranks(3, lambda g: ckpt.save(one_array(9), tmp_path, 51, group=g, keep=2), other))
    assert ckpt.open(tmp_path).steps() == [50, 51]


@pytest.mark.parametrize("written", [False, True])
def test_a_group_saves_beside_what_its_rank_0_saves_alone(tmp_path: Path, written: bool) -> None:
    groups = ThreadGroup.make(2)
    (tmp_path / "steps").mkdir()
    Path(temporary_name(f"{tmp_path}/steps/x")).write_bytes(b"of a killed writer")
    with ckpt.Checkpointer(tmp_path, every=None, group=None) as alone:
        if written:
            alone.save(0, one_array(0))
        for step in range(1, 9, 2):
            handle = alone.save(step, one_array(step))
            all_well(on_ranks(2, lambda g: ckpt.save(one_array(0), tmp_path, step + 1, group=g, timeout=20), groups))  # noqa: B023
            handle.result()
    all_well(on_ranks(2, lambda g: ckpt.save(one_array(9), tmp_path, 9, group=g, timeout=20), groups))
    assert ckpt.open(tmp_path).steps() == list(range(1 - written, 10))
    assert {c.commit.generation for c in ckpt.open(tmp_path)} == {1}
    assert_clean(tmp_path)


def test_what_this_process_saves_through_a_group_is_no_older_run(tmp_path: Path) -> None:
    """Which of the two comes first is chance where both save in the background."""
    groups = ThreadGroup.make(2)
    with ckpt.Checkpointer(tmp_path, every=None, group=None) as alone:
        all_well(on_ranks(2, lambda g: ckpt.save(one_array(0), tmp_path, 2, group=g, timeout=20), groups))
        alone.save(1, one_array(1))
        alone.save(3, one_array(3))
    assert ckpt.open(tmp_path).steps() == [1, 2, 3]
    assert {c.commit.line for c in ckpt.open(tmp_path)} == {0}


def test_a_group_that_comes_before_anything_is_saved_alone(tmp_path: Path) -> None:
    groups = ThreadGroup.make(2)
    (tmp_path / "steps").mkdir()
    Path(temporary_name(f"{tmp_path}/steps/x")).write_bytes(b"of a killed writer")
    with ckpt.Checkpointer(tmp_path, every=None, group=None) as alone:
        all_well(on_ranks(2, lambda g: ckpt.save(one_array(0), tmp_path, 0, group=g, timeout=20), groups))
        assert_clean(tmp_path)
        alone.save(1, one_array(1))
    assert ckpt.open(tmp_path).steps() == [0, 1]


def test_tiers_of_rank_0_alone_share_no_claim_with_a_group(tmp_path: Path) -> None:
    """What they copy keeps its name, which a later claim of the repository of record would use again."""
    groups, url = ThreadGroup.make(2), tmp_path / "record"
    all_well(on_ranks(2, lambda g: ckpt.save(one_array(0), url, 0, group=g), groups))
    with ckpt.Checkpointer(url, every=None, tiers=[ckpt.Tier(tmp_path / "near")], group=None) as alone:
        alone.save(1, one_array(1))
    newest = max(int(file.name.partition(".")[0]) for file in (url / "generations").iterdir())
    assert {c.commit.generation for c in ckpt.open(url)} == {1, newest}


def test_groups_save_to_one_url_at_the_same_time(tmp_path: Path) -> None:
    groups = [ThreadGroup.make(2), ThreadGroup.make(2)]

    def work(group: Group) -> None:
        handles = []
        for step in range(0, 40, 2):
            for which, ranks in enumerate(groups):
                handles.append(ckpt.save(one_array(step + which), tmp_path, step + which, group=ranks[group.rank],
                                         timeout=20, blocking=False))  # fmt: skip
        for handle in handles:
            handle.result()

    all_well(on_ranks(2, work))
    assert ckpt.open(tmp_path).steps() == list(range(40))
    for step in range(40):
        assert ckpt.load(tmp_path, step=step, group=None)["a"].tolist() == [step] * 2000
    assert_clean(tmp_path)


def test_a_step_that_one_group_gave_up_is_saved_by_another(tmp_path: Path) -> None:
    one, other = ThreadGroup.make(2), ThreadGroup.make(2)
    for groups in (one, other):
        all_well(on_ranks(2, lambda g: ckpt.save(one_array(0), tmp_path, 0, group=g, overwrite=True), groups))
    bad = lambda g: ckpt.save({"a": object() if g.rank else 1}, tmp_path, 1, group=g, timeout=20)  # noqa: E731
    for groups in (one, other):
        assert all(isinstance(error, ckpt.CkptError) for error in on_ranks(2, bad, groups))
    for groups in (other, one):
        all_well(on_ranks(2, lambda g: ckpt.save(one_array(1), tmp_path, 1, group=g, overwrite=True), groups))
    assert ckpt.open(tmp_path).steps() == [0, 1]


def test_the_last_group_gives_the_repository_free(tmp_path: Path) -> None:
    one, other = ThreadGroup.make(2), ThreadGroup.make(2)
    savers = [all_well(on_ranks(2, lambda g: ckpt.Checkpointer(tmp_path, every=1, group=g), gs)) for gs in (one, other)]
    on_ranks(2, lambda g: savers[0][g.rank].close())
    assert owner(tmp_path) is not None
    all_well(on_ranks(2, lambda g: savers[1][g.rank].save(0, one_array(0)).result()))
    all_well(on_ranks(2, lambda g: ckpt.Checkpointer(tmp_path, every=1, group=g).close(), one))
    all_well(on_ranks(2, lambda g: savers[1][g.rank].save(1, one_array(1)).result()))
    on_ranks(2, lambda g: savers[1][g.rank].close())
    assert owner(tmp_path) is None


def test_a_group_that_this_process_has_superseded_is_told_so(tmp_path: Path) -> None:
    """Tiers count on with the same numbers, so they share no claim. What the process saves alone goes with the newest."""
    one, other = ThreadGroup.make(2), ThreadGroup.make(2)
    url, tier = tmp_path / "record", tmp_path / "tier"
    all_well(on_ranks(2, lambda g: ckpt.save(one_array(0), url, 0, group=g), one))
    savers = all_well(on_ranks(2, lambda g: ckpt.Checkpointer(url, every=None, tiers=[ckpt.Tier(tier)], group=g), other))
    ckpt.save({"mine": 1}, url, 1, group=None)
    told = on_ranks(2, lambda g: ckpt.save(one_array(2), url, 2, group=g, timeout=20), one)
    assert isinstance(told[0], ckpt.Fenced)
    assert "this process has also begun" in str(told[0])
    assert "one group" in str(told[0])
    on_ranks(2, lambda g: savers[g.rank].close())
    assert ckpt.open(url).steps() == [0, 1]


def test_ranks_that_name_different_steps_load_none(tmp_path: Path) -> None:
    groups = ThreadGroup.make(3)
    for step in (0, 1):
        all_well(on_ranks(3, lambda g: ckpt.save(one_array(step), tmp_path, step, group=g), groups))  # noqa: B023
    like = [one_array(7) for _ in range(3)]
    found = on_ranks(3, lambda g: ckpt.load(tmp_path, like[g.rank], step=int(g.rank == 1), group=g), groups)
    assert isinstance(found[1], ckpt.InvalidArgument)
    assert "rank 1 of 3 was to load step 1, rank 0 step 0" in str(found[1])
    for rank in (0, 2):
        assert isinstance(found[rank], ckpt.GroupError)
        assert str(found[1]) in str(found[rank])
    assert all((state["a"] == 7).all() for state in like)
    all_well(on_ranks(3, lambda g: ckpt.load(tmp_path, like[g.rank], step=1, group=g), groups))


@pytest.mark.parametrize("named", [{0}, {1, 2}])
def test_ranks_of_which_some_name_no_step_load_none(tmp_path: Path, named: set[int]) -> None:
    groups = ThreadGroup.make(3)
    step_of = lambda g: 0 if g.rank in named else None  # noqa: E731
    for empty in (True, False):
        if not empty:
            all_well(on_ranks(3, lambda g: ckpt.save(one_array(0), tmp_path, 0, group=g), groups))
        like = [one_array(7) for _ in range(3)]
        found = on_ranks(3, lambda g: ckpt.load(tmp_path, like[g.rank], step=step_of(g), group=g), groups)  # noqa: B023
        words = ["load the newest one (step=None)", "load step 0"]
        steps = ["rank 0 step 0", "rank 0 the newest one (step=None)"]
        for rank in (1, 2):
            assert isinstance(found[rank], ckpt.InvalidArgument)
            assert f"rank {rank} of 3 was to {words[rank in named]}, {steps[0 not in named]}" in str(found[rank])
        assert isinstance(found[0], ckpt.GroupError)
        assert str(found[1]) in str(found[0])
        assert all((state["a"] == 7).all() for state in like)
    all_well(on_ranks(3, lambda g: ckpt.load(tmp_path, like[g.rank], group=g), groups))


@pytest.mark.parametrize(("steps", "said"), [
    ((5, None, 5), "rank 1 of 3 was to save the next one (step=None), rank 0 step 5; every"),
    ((None, 5, None), "rank 1 of 3 was to save step 5, rank 0 the next one (step=None); every"),
    ((4, 5, 4), "rank 1 of 3 was to save step 5, rank 0 step 4; every"),
])  # fmt: skip
def test_ranks_that_name_different_steps_save_none(tmp_path: Path, steps: tuple[Any, ...], said: str) -> None:
    """Told at once, where the ranks come together for the first time; they count alike from then on."""
    groups = ThreadGroup.make(3)
    found = on_ranks(3, lambda g: ckpt.save(one_array(0), tmp_path, steps[g.rank], group=g), groups)
    assert isinstance(found[1], ckpt.InvalidArgument)
    for rank in range(3):
        assert said in str(found[rank])
        assert rank == 1 or isinstance(found[rank], ckpt.StepRefused)
    assert ckpt.open(tmp_path).steps() == []
    for step in (None, 4, 5, None):
        all_well(on_ranks(3, lambda g: ckpt.save(one_array(1), tmp_path, step, overwrite=True, group=g), groups))  # noqa: B023
    first = {None: 1, 4: 5, 5: 6}[steps[0]]
    assert ckpt.open(tmp_path).steps() == sorted({first, 4, 5, max(first, 5) + 1})


@pytest.mark.parametrize("behind", [False, True])
def test_a_rank_that_leaves_out_a_save(tmp_path: Path, caplog: pytest.LogCaptureFixture, behind: bool) -> None:
    """Where no step is named, only what it says itself tells it from a slow one."""

    def train(group: Group) -> None:
        for i in range(5):
            if behind and group.rank == 1 and i == 2:
                continue
            own = {"seed": 10 * group.rank + i, "reader": ckpt.PerRank(i // 3 * group.rank), "names": [f"r{group.rank}", 1.5]}
            w = ckpt.Shard(np.full(10, i), (20,), (10 * group.rank,))
            with suppress(ckpt.RanksMissing):  # the last, to which that one does not come
                ckpt.save({"w": w, "loop": {"it": i, "epoch": 0}, **own}, tmp_path, group=group, timeout=6)

    all_well(on_ranks(2, train))
    told = [record.getMessage() for record in caplog.records if "was the same on all ranks" in record.getMessage()]
    if not behind:
        assert ckpt.open(tmp_path).steps() == [0, 1, 2, 3, 4]
        assert not told
        return
    assert ckpt.open(tmp_path).steps() == [0, 1, 2, 3]
    assert len(told) == 1
    words = "loop.it was the same on all ranks in step 1 (1), and is not now (2 on rank 0; 3 on rank 1)"
    assert f"step 2: {words}" in told[0]


@pytest.mark.parametrize(
    "states",
    [
        [{"a": [1, 2, 3]}, {"a": {"n": "rank"}}],  # another shape
        [{"it": 0, "skipped": 0}, {"it": 1, "skipped": "rank"}],  # they are in step
        [{"a": "rank"}, {"a": "rank"}], [{}, {"a": "rank"}], [{"a": 1.5}, {"a": "rank"}], [{"a": (1, 2)}, {"a": (1, "rank")}],
    ],
    ids=str,
)  # fmt: skip
def test_numbers_that_differ_for_a_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture, states: list[Any]) -> None:
    """No save fails for what is only looked at, and few are warned about that are well."""

    def of(node: Any, rank: int) -> Any:
        if isinstance(node, dict):
            return {key: of(value, rank) for key, value in node.items()}
        return tuple(of(item, rank) for item in node) if isinstance(node, tuple) else rank + 5 if node == "rank" else node

    for step, state in enumerate(states):
        all_well(on_ranks(2, lambda g, step=step, state=state: ckpt.save(of(state, g.rank), tmp_path, step, group=g)))
    told = [record for record in caplog.records if "was the same on all ranks" in record.getMessage()]
    assert len(told) == ("(1, 2)" in str(states[0]))


def test_ranks_that_come_with_different_steps_later(tmp_path: Path) -> None:
    """Whoever waits in vain is told with which step the other has come."""
    groups = ThreadGroup.make(2)
    all_well(on_ranks(2, lambda g: ckpt.save(one_array(0), tmp_path, group=g), groups))
    with pytest.raises(ckpt.RanksMissing, match=r"has not committed step 9 within .* the same steps; to save"):
        ckpt.save(one_array(0), tmp_path, 9, group=groups[1], timeout=0.1)
    with pytest.raises(ckpt.RanksMissing, match=r"step 1 within .* same steps \(rank 1 has come with step 9\)\. Look"):
        ckpt.save(one_array(0), tmp_path, group=groups[0], timeout=0.1)
    with pytest.raises(ckpt.RanksMissing, match=r"step 10 within .* same steps \(rank 0 has come with step 1\); to"):
        ckpt.save(one_array(0), tmp_path, group=groups[1], timeout=0.1)


def test_names_of_one_rank_are_told_from_paths(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        return {"x": ckpt.PerRank(np.full(2, rank)), "x@0": np.full(2, 9), "x@1": np.full(2, 8)}

    all_well(on_ranks(2, lambda g: ckpt.save(state(g.rank), tmp_path, 0, group=g)))
    for rank, loaded in enumerate(all_well(on_ranks(2, lambda g: ckpt.load(tmp_path, group=g)))):
        assert [loaded[k].tolist() for k in ("x", "x@0", "x@1")] == [[rank] * 2, [9] * 2, [8] * 2]


EXIT = """
import sys, threading
import numpy as np
import ckpt
from ckpt.groups.threads import ThreadGroup

groups = ThreadGroup.make(2)

def work(group):
    ckpt.save({"a": np.ones(3_000_000)}, sys.argv[1], 0, group=group, blocking=False)

threads = [threading.Thread(target=work, args=(g,)) for g in groups]
for t in threads:
    t.start()
for t in threads:
    t.join()
"""


def test_a_save_under_way_when_the_program_ends_is_committed(tmp_path: Path) -> None:
    finish(python(EXIT, tmp_path / "run", env={"CKPT_FAILPOINTS": "ranks.gather=sleep:0.5"}))
    assert ckpt.load(tmp_path / "run")["a"].sum() == 3_000_000


@pytest.mark.skipif(not O_DIRECT, reason="no O_DIRECT on this system")
@pytest.mark.parametrize("share", ["auto", False])
def test_what_one_rank_reads_for_all_passes_the_page_cache_by(tmp_path: Path, share: Any) -> None:
    """As what one rank alone needs; what each reads for itself, as others do, comes through it."""
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
