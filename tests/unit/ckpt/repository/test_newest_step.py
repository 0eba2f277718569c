"""The newest step of a repository in which a run has gone back to an older step, so that the records order the steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ckpt
from ckpt.repository.repository import Repository, open_repository
from ckpt.storage.base.errors import StoreError

RECORD = Path("steps/3/commit.json")


@pytest.fixture(name="repo")
def fixture_repo(tmp_path: Path) -> Repository:
    ckpt.save({"a": np.full(3, 5)}, tmp_path, step=5)
    with pytest.warns(UserWarning, match="step 3 is saved without a restore"):
        ckpt.save({"a": np.full(3, 3)}, tmp_path, step=3)
    repo = open_repository(tmp_path)
    assert repo.newest() == (2, 3)
    return repo


def test_a_step_that_cannot_be_read_now_may_be_the_newest(repo: Repository, tmp_path: Path) -> None:
    data = (tmp_path / RECORD).read_bytes()
    (tmp_path / RECORD).unlink()
    (tmp_path / RECORD).symlink_to(RECORD.name)  # open(2) fails with ELOOP
    with pytest.raises(StoreError):
        repo.newest()
    (tmp_path / RECORD).unlink()
    (tmp_path / RECORD).write_bytes(data)
    assert repo.newest() == (2, 3)


def test_a_damaged_step_is_not_the_newest(repo: Repository, tmp_path: Path) -> None:
    (tmp_path / RECORD).write_bytes(b"damaged")
    assert repo.newest() == (0, 5)
