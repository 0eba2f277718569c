"""Paths of the tests, and a fast temporary folder."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TESTS = Path(__file__).parents[1]
PROGRAMS = TESTS / "programs"
REPOSITORY = TESTS.parent
EXAMPLES = REPOSITORY / "examples"


@contextmanager
def temporary_folder(prefix: str, parent: str | None) -> Iterator[Path]:
    """Yield a new folder, and remove it after the body.

    The removal is repeated while the folder gets new files: a slow member of a closed namespace may still receive a record.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield folder
    finally:
        deadline = time.monotonic() + 600
        while folder.exists():
            assert time.monotonic() < deadline, f"{folder} can't be removed"
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def fast_folder(tmp_path: Path) -> Iterator[Path]:
    """Yield a new folder in memory where the system has it, for tests of many saves that need no disk; otherwise `tmp_path`."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with temporary_folder("ckpt-test-", "/dev/shm") as folder:
        yield folder
