"""A state that many ranks have is written once, and each rank writes the same share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from helpers.rank_threads import all_well, assert_equal, on_ranks, pack_bytes_by_rank, replicated

import ckpt
from ckpt.groups.base import Group
from ckpt.groups.threads import ThreadGroup


def test_a_replicated_state_is_written_once_and_evenly(tmp_path: Path) -> None:
    state = replicated()
    unique = sum(a.nbytes for a in [state["embed"], state["odd"], *state["layers"], *state["norms"].values()])
    saved = all_well(on_ranks(4, lambda g: ckpt.save(replicated(), tmp_path, 1, group=g, codec="none")))
    assert {c.step for c in saved} == {1}
    written = pack_bytes_by_rank(tmp_path)
    assert unique <= sum(written.values()) <= 1.05 * unique
    assert max(written.values()) <= 1.05 * sum(written.values()) / 4
    assert min(written.values()) >= 0.95 * sum(written.values()) / 4
    commit = saved[0].commit
    assert (commit.world_size, commit.raw_bytes) == (4, unique + 8)
    for loaded in [ckpt.load(tmp_path), *all_well(on_ranks(3, lambda g: ckpt.load(tmp_path, group=g)))]:
        assert_equal(loaded, state)
    assert ckpt.open(tmp_path)[1].verify() > 0


def test_a_layout_of_data_tensor_and_pipeline_ranks_is_written_evenly(tmp_path: Path) -> None:
    """2 data x 2 tensor x 2 pipeline ranks; every replica is described only as (i, n)."""
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
    written = pack_bytes_by_rank(tmp_path)
    even = sum(a.nbytes for a in full.values()) / 8
    assert set(written) == set(range(8))
    assert all(0.95 * even <= n <= 1.05 * even + 4096 for n in written.values())
    assert_equal(dict(sorted(ckpt.load(tmp_path).items())), dict(sorted(full.items())))


def test_saves_after_opening_use_no_collective(tmp_path: Path) -> None:
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
