"""The heartbeat page of a rank, and the record of a process."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ckpt.recovery.run_log.sqlite import SqliteRunLog
from ckpt.storage.base.errors import CkptError
from ckpt.training.heartbeat_page import HeartbeatPage


def test_a_page(tmp_path: Path) -> None:
    mine, theirs = HeartbeatPage(tmp_path / "p", new=True), HeartbeatPage(tmp_path / "p")
    assert (theirs.read().beats, theirs.read().step, theirs.read().phase, theirs.read().committed) == (0, -1, "start", -1)
    mine.beat(2, 7)
    mine.publish_committed(5)
    mine.publish_committed(3)
    mine.publish_loss(float("nan"))
    beat = theirs.read()
    assert (beat.beats, beat.step, beat.phase, beat.committed) == (1, 7, "step", 5)
    assert beat.loss != beat.loss
    assert abs(time.monotonic() - beat.since) < 60


def test_only_a_record_that_is_none_is_to_be_removed(tmp_path: Path) -> None:
    """It holds what was decided: a disk that is full, or can't be read now, is no reason to delete it."""
    (tmp_path / "run.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(CkptError, match="remove it, or give another --run-dir"):
        SqliteRunLog(tmp_path)
    (tmp_path / "other" / "run.sqlite").mkdir(parents=True)
    with pytest.raises(CkptError, match="free space on this disk, and check it, or give another --run-dir"):
        SqliteRunLog(tmp_path / "other")
