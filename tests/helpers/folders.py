"""Paths of the tests, and a fast temporary folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TESTS = Path(__file__).parents[1]
PROGRAMS = TESTS / "programs"
REPOSITORY = TESTS.parent
EXAMPLES = REPOSITORY / "examples"


@contextmanager
def fast_folder(tmp_path: Path) -> Iterator[Path]:
    """Yield a new folder in memory where the system has it, for tests of many saves that need no disk; otherwise `tmp_path`."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="ckpt-test-", dir="/dev/shm") as folder:
        yield Path(folder)
