"""A folder with a requirements.txt has the tests of one framework, in an environment of its own (make test-frameworks)."""

from __future__ import annotations

import os
from pathlib import Path

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the folders of all frameworks but the one that CKPT_TEST_FRAMEWORK names."""
    if collection_path.parent == HERE and (collection_path / "requirements.txt").is_file():
        return True if collection_path.name != os.environ.get("CKPT_TEST_FRAMEWORK") else None
    return None
