"""Tiers in folders: near tiers, and the repository of record."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt.storage.base.errors import NoSpace
from ckpt.storage.base.store import Store, Writer
from ckpt.tiers.tier_spec import memory_folder_name
from helpers.failing_store import FailingStore
from helpers.folders import fast_folder
from helpers.repositories import assert_all_load
from helpers.states import state_of


@dataclasses.dataclass(frozen=True)
class TierFolders:
    """The folders of the tiers of a test."""

    base: Path

    @property
    def run(self) -> Path:
        return self.base / "run"

    @property
    def nvme(self) -> Path:
        return self.base / "nvme"

    @property
    def memory(self) -> Path:
        return self.base / "memory" / memory_folder_name(self.run.as_uri())

    def all(self) -> list[Path]:
        return [self.memory, self.nvme, self.run]

    def open(self, run: Any = None, near: Any = None, **options: Any) -> ckpt.Checkpointer:
        """Open with every step saved to memory, every second to the disk, every fourth to the repository of record."""
        tiers = [ckpt.Tier("memory", keep=2), ckpt.Tier(near or self.nvme, every=2, keep=2)]
        return ckpt.Checkpointer(run or self.run, **{"every": 4, "keep": 2, "tiers": tiers, "group": None, **options})

    def steps(self) -> list[list[int]]:
        """Return the steps of each tier."""
        return [ckpt.open(tier).steps() for tier in self.all()]

    def check(self) -> None:
        """Check that every step that a tier lists loads from that tier alone."""
        for tier in self.all():
            if (tier / "ckpt.json").exists():
                assert_all_load(tier)


@pytest.fixture
def tier_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TierFolders]:
    """Yield the folders of the tiers, with the memory tier in one of them."""
    with fast_folder(tmp_path) as folder:
        (folder / "memory").mkdir()
        monkeypatch.setenv("CKPT_MEMORY", str(folder / "memory"))
        yield TierFolders(folder)


def train(ck: ckpt.Checkpointer, steps: range) -> None:
    """Make these training steps."""
    for step in steps:
        ck.step(step, state_of(step))


def train_and_wait(ck: ckpt.Checkpointer, steps: range) -> None:
    """Make these training steps; wait for all copies after each, so that no step is kept because it is being copied."""
    for step in steps:
        ck.step(step, state_of(step))
        ck.wait()


def close_as_if_failed(ck: ckpt.Checkpointer) -> None:
    """End like a failing program: steps of near tiers are not promoted, except one whose copy has begun."""
    threads = [] if ck._tiers is None else [copier._thread for copier in ck._tiers._copiers]
    ck._close(False)
    for thread in filter(None, threads):  # a failing program would end it; here, it would write while a test changes the files
        thread.join(300)
        assert not thread.is_alive()


def switch_memory_folder(tier_folders: TierFolders, monkeypatch: pytest.MonkeyPatch, *gone: str) -> Path:
    """Give the next job another memory folder; the former one is only read. Return the new folder of the tier."""
    before = os.environ["CKPT_MEMORY"]
    after = Path(f"{before}-after")
    after.mkdir()
    monkeypatch.setenv("CKPT_MEMORY", str(after))
    monkeypatch.setenv("CKPT_MEMORY_BEFORE", " ".join([*gone, before]))
    return after / tier_folders.memory.name


class FullStore(FailingStore):
    """A store whose packs get a full disk while `full` is set; creations of packs wait for `gate`."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.full = True
        self.gate = threading.Event()
        self.gate.set()
        self.began: list[str] = []

    def create(self, name: str, size_hint: int = 0) -> Writer:
        self.began.append(name)
        self.gate.wait(600)
        if self.full:
            raise NoSpace(f"creating {self.url}/{name} failed: the disk is full: free space or keep fewer steps")
        return super().create(name, size_hint)


def saved_everywhere(tier_folders: TierFolders) -> None:
    """Save steps 3 and 7 to all tiers."""
    ck = tier_folders.open(every=1)
    for step in (3, 7):
        ck.step(step, state_of(step))
        ck.wait()
    close_as_if_failed(ck)
    assert tier_folders.steps() == [[3, 7], [3, 7], [3, 7]]


def shard_of(rank: int, size: int, step: int) -> dict[str, Any]:
    """Return the state of a rank: its rows of an array whose values show the step."""
    full = np.arange(64 * 100, dtype=np.float64).reshape(64, 100) * (step + 1)
    rows = 64 // size
    return {"w": ckpt.Shard(full[rank * rows : (rank + 1) * rows].copy(), full.shape, (rank * rows, 0)), "step": step}
