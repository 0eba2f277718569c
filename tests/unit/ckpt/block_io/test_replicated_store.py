"""Several tiers as one store: one that can't be read now may have what the others lack."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.failing_store import FailingStore

from ckpt.block_io.replicated_store import ReplicatedStore
from ckpt.storage.base.errors import NotFound, StoreError
from ckpt.storage.local.directory import LocalStore


@pytest.fixture(name="far")
def fixture_far(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "far")


def _failing(tmp_path: Path, method: str) -> FailingStore:
    """Return a near store whose first call of a method fails."""
    return FailingStore(LocalStore(tmp_path / "near"), method, 1)


def test_what_no_store_has_does_not_exist(tmp_path: Path, far: LocalStore) -> None:
    stores = ReplicatedStore([LocalStore(tmp_path / "near"), far])
    assert not stores.exists("a")
    with pytest.raises(NotFound):
        stores.get("a")


def test_what_a_failing_store_may_have_is_not_absent(tmp_path: Path, far: LocalStore) -> None:
    with pytest.raises(StoreError, match="injected"):
        ReplicatedStore([_failing(tmp_path, "exists"), far]).exists("a")
    with pytest.raises(StoreError, match="injected"):
        ReplicatedStore([_failing(tmp_path, "get"), far]).get("a")


def test_a_failing_store_does_not_hide_what_another_one_has(tmp_path: Path, far: LocalStore) -> None:
    far.put("a", b"1")
    assert ReplicatedStore([_failing(tmp_path, "exists"), far]).exists("a")
    assert ReplicatedStore([_failing(tmp_path, "get"), far]).get("a") == b"1"
