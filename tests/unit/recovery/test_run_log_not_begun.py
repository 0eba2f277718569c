"""A refused reader leaves the file of the run log closed, so that the agent can remove the write-ahead log at its end."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from ckpt.recovery.run_log.sqlite import RUN_LOG_FILE, SqliteRunLog
from ckpt.storage.base.errors import CkptError


def open_files() -> set[str]:
    """Return what the descriptors of this process refer to."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # that of the listing itself
            continue
    return found


def test_a_refused_reader_leaves_no_file_open(tmp_path: Path) -> None:
    file = tmp_path / RUN_LOG_FILE
    made = sqlite3.connect(file)
    made.execute("CREATE TABLE other (x)")
    made.close()
    with pytest.raises(CkptError, match="has not begun") as caught:  # it keeps the frames of the error
        SqliteRunLog(tmp_path, read_only=True)
    assert caught.value
    assert str(file) not in open_files()
