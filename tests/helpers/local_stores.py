"""A local directory as a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt.storage.base.failpoints import set_failpoints
from ckpt.storage.local.directory import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """Return a store with one object, so that the folder `a` exists."""
    store = LocalStore(tmp_path / "store")
    store.put("a/kept", b"kept")
    return store


@pytest.fixture
def failpoints() -> Iterator[Callable[[str], None]]:
    """Yield a function that sets fail points, which are cleared after the test."""
    yield set_failpoints
    set_failpoints("")


def files_below(store: LocalStore) -> set[str]:
    """Return every file of a store, including hidden ones."""
    return {str(path.relative_to(store.root)) for path in Path(store.root).rglob("*") if path.is_file()}
