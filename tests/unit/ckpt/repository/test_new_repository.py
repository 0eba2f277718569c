"""A reader that polls for a repository while another process creates it sees either nothing or the repository."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ckpt
from ckpt.repository.repository import MARKER, Repository
from ckpt.storage.base.errors import NotFound
from ckpt.storage.base.store import Entry
from ckpt.storage.local.directory import LocalStore


class LateStore(LocalStore):
    """A store in which the first look for the marker is too early."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._looked = False

    def get_up_to(self, name: str, limit: int) -> bytes:
        if name == MARKER and not self._looked:
            self._looked = True
            raise NotFound(f"{name} is missing")
        return super().get_up_to(name, limit)

    def get(self, name: str) -> bytes:
        return self.get_up_to(name, 1 << 30)


def test_a_repository_that_is_created_during_the_check(tmp_path: Path) -> None:
    ckpt.save({"a": np.zeros(4)}, tmp_path, step=1)
    repository = Repository(LateStore(tmp_path))
    repository.check()
    assert repository.store._looked


def test_steps_without_a_marker_are_an_error(tmp_path: Path) -> None:
    ckpt.save({"a": np.zeros(4)}, tmp_path, step=1)
    (tmp_path / MARKER).unlink()
    with pytest.raises(ckpt.FormatError, match="has steps, and its ckpt.json is missing"):
        Repository(LocalStore(tmp_path)).check()


class _SortedStore(LocalStore):
    """Lists the files in an order; a store may list them in any."""

    def __init__(self, path: Path, is_descending: bool) -> None:
        super().__init__(path)
        self._is_descending = is_descending

    def list(self, prefix: str = "") -> Iterator[Entry]:
        return iter(sorted(super().list(prefix), key=lambda entry: entry.name, reverse=self._is_descending))


@pytest.mark.parametrize("is_descending", [False, True])
def test_a_save_to_steps_without_a_marker_is_refused(tmp_path: Path, is_descending: bool) -> None:
    ckpt.save({"a": np.zeros(4)}, tmp_path, step=1)
    (tmp_path / MARKER).unlink()
    with pytest.raises(ckpt.FormatError, match="has steps, and its ckpt.json is missing"):
        ckpt.save({"a": np.zeros(4)}, _SortedStore(tmp_path, is_descending), step=2)


@pytest.mark.parametrize("index", ["1", 1.0, None, True, slice(0, 2)])
def test_an_index_that_is_no_step_number_is_refused(index: object, tmp_path: Path) -> None:
    """It is not damage of the step."""
    ckpt.save({"a": np.ones(2)}, tmp_path, step=1)
    repo = ckpt.open(tmp_path)
    with pytest.raises(ckpt.InvalidArgument, match="step must be a whole number, 0, 1, 2 …, and not "):
        repo[index]  # type: ignore[index]
    assert repo[np.int64(1)].step == 1  # type: ignore[index]
