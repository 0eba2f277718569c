"""A job that has restored a step continues from it, also where the record of the step can't be read at its first save."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ckpt
from ckpt.storage.base.errors import CkptError


@pytest.mark.parametrize("restored", [1, 2])
def test_a_restored_step_that_cannot_be_read_now_stays_the_restored_one(tmp_path: Path, restored: int) -> None:
    for step in (1, 2):
        ckpt.save({"a": np.full(3, step)}, tmp_path, step=step)
    record = tmp_path / f"steps/{restored}/commit.json"
    with ckpt.Checkpointer(tmp_path, every=1, scrub=None) as saver:
        state, start = saver.restore({"a": np.zeros(3, int)}, step=restored)
        assert start == restored + 1
        moved = record.rename(tmp_path / "moved")
        record.symlink_to(record.name)  # open(2) fails with ELOOP
        with pytest.raises(CkptError, match="symbolic links"):
            saver.save(2, state).result()
        record.unlink()
        moved.rename(record)
        saver.save(2, {"a": np.full(3, 20)}).result()
    assert ckpt.load(tmp_path)["a"].tolist() == [20, 20, 20]
    assert not ckpt.open(tmp_path).order().set_aside
