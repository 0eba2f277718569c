"""A folder with a requirements.txt has the tests of one framework, in an environment of its own (make test-frameworks)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LAUNCHER_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "LOCAL_WORLD_SIZE")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the folders of all frameworks but the one that CKPT_TEST_FRAMEWORK names."""
    if collection_path.parent == HERE and (collection_path / "requirements.txt").is_file():
        return True if collection_path.name != os.environ.get("CKPT_TEST_FRAMEWORK") else None
    return None


@pytest.fixture(autouse=True)
def _launcher_variables_restored() -> Iterator[None]:
    """Restore the variables that a launcher sets. Frameworks such as Lightning set them when they make a process group.

    Ranks that a later test starts would inherit the port, where this process listens.
    """
    before = {name: os.environ.get(name) for name in LAUNCHER_VARIABLES}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
