"""Ranks of one job as threads of this process, and the states that they save."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ckpt
from ckpt.groups.base import Group
from ckpt.groups.threads import ThreadGroup
from ckpt.storage.base.store import Reader
from ckpt.storage.local.directory import LocalStore

Work = Callable[[Group], Any]


def on_ranks(count: int, work: Work, groups: list[Group] | None = None) -> list[Any]:
    """Return what `work` returns, or the error it raises, for each rank of a group of threads."""
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
        thread.join(600)
        assert not thread.is_alive(), "a rank hangs"
    return found


def all_well(found: list[Any]) -> list[Any]:
    """Return the results of all ranks, or fail with the first error among them."""
    for rank, result in enumerate(found):
        if isinstance(result, Exception):
            raise AssertionError(f"rank {rank}: {result!r}") from result
    return found


def pack_bytes_by_rank(root: Path) -> dict[int, int]:
    """Return the bytes of the packs that each rank wrote."""
    found: dict[int, int] = {}
    for file in root.rglob("*.pack"):
        rank = int(file.name.split("-")[0])
        found[rank] = found.get(rank, 0) + file.stat().st_size
    return found


def replicated() -> dict[str, Any]:
    """Return a state that is the same on all ranks."""
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


def assert_equal(a: Any, b: Any) -> None:
    """Check that two states have equal values and dtypes."""
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


class CountingStore(LocalStore):
    """A directory store that counts the bytes read from packs."""

    read = 0
    read_ranges: list[tuple[str, int, int]] = []  # pack, begin and end of each read
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
                with CountingStore.lock:
                    CountingStore.read += count
                    CountingStore.read_ranges.append((name, position, position + count))
            return count

        class Counted(Reader):
            def close(self) -> None:
                reader.close()

        made = Counted.__new__(type("Made", (Counted,), {"read_into": staticmethod(read_into)}))
        return made


def union_bytes(byte_ranges: list[tuple[str, int, int]]) -> int:
    """Return the number of bytes in the union of these ranges of files."""
    total, at = 0, ("", 0)
    for name, begin, end in sorted(byte_ranges):
        at = max(at, (name, begin))
        total += max(0, end - at[1])
        at = max(at, (name, end))
    return total


class RemoteStore:
    """A class of which no store is an instance."""


def refused(tmp_path: Path, state: Callable[[int], Any], size: int = 2, **options: Any) -> list[Any]:
    """Return the errors of a save by all ranks, and check that nothing is committed and the next save works."""
    groups = ThreadGroup.make(size)
    good = {"good": np.arange(5)}
    all_well(on_ranks(size, lambda g: ckpt.save(good, tmp_path, 0, group=g), groups))
    found = on_ranks(size, lambda g: ckpt.save(state(g.rank), tmp_path, 1, group=g, **options), groups)
    assert all(isinstance(error, ckpt.CkptError) for error in found), found
    assert ckpt.open(tmp_path).steps() == [0]
    all_well(on_ranks(size, lambda g: ckpt.save(good, tmp_path, 1, group=g), groups))
    assert ckpt.open(tmp_path).steps() == [0, 1]
    return found


def one_array(value: float) -> dict[str, Any]:
    """Return a state of one array with this value."""
    return {"a": np.full(2000, value)}


def lease_owner(root: Path) -> Any:
    """Return the owner of the newest writer lease."""
    return json.loads(sorted((root / "generations").iterdir())[-1].read_bytes())["owner"]
