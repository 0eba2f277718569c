"""A check that wrong input is refused and the repository is unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ckpt
from helpers.messages import one_line
from helpers.repositories import snapshot
from helpers.states import state_of


@contextmanager
def refused(kind: type[BaseException], *words: str, root: Path | None = None) -> Iterator[None]:
    """Check that the body raises `kind` with a message of one line that contains all `words`, and changes no file of `root`."""
    before = snapshot(root) if root else None
    with pytest.raises(kind) as raised:
        yield
    one_line(raised, *words)
    assert root is None or snapshot(root) == before


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a repository with step 3 and step 4."""
    for step in (3, 4):
        ckpt.save(state_of(step), tmp_path / "run", step)
    return tmp_path / "run"
