"""A writer leaves folders alone that do not belong to its repository, such as that of another repository inside of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ckpt
from ckpt.storage.local.shared_memory import MemoryStore

STORES = ["", "file://"]
"""A path uses the local store; a file URL uses fsspec."""


@pytest.mark.parametrize("scheme", STORES)
def test_a_new_writer_sweeps_only_its_own_folders(scheme: str, tmp_path: Path) -> None:
    url = f"{scheme}{tmp_path}/run"
    ckpt.save({"a": np.zeros(4)}, url, step=1)
    run = tmp_path / "run"
    kept = [run / "best" / "steps" / "1" / ".commit.json.1.ckpt-tmp", run / "notes" / ".x.0.ckpt-tmp"]
    swept = [run / "steps" / "1" / "pack" / ".x.0.ckpt-tmp", run / ".ckpt.json.0.ckpt-tmp"]
    for file in [*kept, *swept]:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"")
    (run / "empty").mkdir()
    with ckpt.Checkpointer(url, every=None) as saver:  # a new writer session
        saver.save(2, {"a": np.zeros(4)}, blocking=True)
    assert all(file.exists() for file in kept)
    assert not any(file.exists() for file in swept)
    assert (run / "empty").is_dir()
    assert ckpt.open(url).steps() == [1, 2]


def test_a_new_writer_sweeps_the_spare_memory_of_a_killed_one(tmp_path: Path) -> None:
    store = MemoryStore(tmp_path)
    store.put("steps/1/pack/x.pack", b"x")
    store.delete(["steps/1/pack/x.pack"])
    assert list(tmp_path.rglob("*.ckpt-tmp"))
    MemoryStore(tmp_path).sweep_temporaries("", folders=False)
    assert list(tmp_path.rglob("*.ckpt-tmp")) == []
