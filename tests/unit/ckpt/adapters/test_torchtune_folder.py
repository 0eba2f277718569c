"""All ranks of a recipe of torchtune continue from what rank 0 finds, or none does. Torchtune itself is not needed here."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.rank_threads import all_well, on_ranks

import ckpt
from ckpt.groups.base import Group

NAMES = ("FullModelHFCheckpointer", "FullModelMetaCheckpointer", "FullModelTorchTuneCheckpointer")


class OwnCheckpointer:
    """Stands for the checkpointers of torchtune."""

    def __init__(self, **options: Any) -> None:
        self.options = options


class Recipe:
    """A recipe that makes its checkpointer in `setup`, as those of torchtune do."""

    epochs_run = 0

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter

    def setup(self, **options: Any) -> bool:
        """Return whether the recipe continues from what torchtune has saved."""
        made = self._adapter.FullModelHFCheckpointer(should_load_recipe_state=True, **options)
        return bool(made.options["should_load_recipe_state"])

    def train(self) -> None:
        pass

    def save_checkpoint(self) -> None:
        pass


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return ckpt.adapters.torchtune without torchtune."""
    training = SimpleNamespace(**dict.fromkeys(NAMES, OwnCheckpointer))
    monkeypatch.setitem(sys.modules, "torchtune", SimpleNamespace(training=training))
    yield importlib.import_module("ckpt.adapters.torchtune")
    del sys.modules["ckpt.adapters.torchtune"]


def start(adapter: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let two ranks set up their recipe, each with an output folder of its own, as on hosts with local disks."""
    current = threading.local()
    monkeypatch.setattr(adapter, "as_group", lambda: current.group, raising=False)

    def work(group: Group) -> bool:
        current.group = group
        return Recipe(adapter).setup(output_dir=str(folder / f"host-{group.rank}"), ckpt=folder / "run")

    return on_ranks(2, work)


def add_recipe_state(folder: Path, rank: int) -> None:
    file = folder / f"host-{rank}" / "recipe_state" / "recipe_state.pt"
    file.parent.mkdir(parents=True)
    file.touch()


def test_a_host_without_the_recipe_state_of_rank_0_is_an_error_on_all_ranks(
    adapter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_recipe_state(tmp_path, 0)
    found = start(adapter, tmp_path, monkeypatch)
    assert [isinstance(error, ckpt.CkptError) for error in found] == [True, True]
    assert all("rank 1 has no " in str(error) and "host-1/recipe_state/recipe_state.pt" in str(error) for error in found)


def test_all_ranks_continue_from_the_recipe_state_that_each_host_has(
    adapter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(2):
        add_recipe_state(tmp_path, rank)
    assert all_well(start(adapter, tmp_path, monkeypatch)) == [True, True]


def test_a_recipe_state_that_rank_0_lacks_or_that_a_step_replaces_is_not_used(
    adapter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_recipe_state(tmp_path, 1)
    assert all_well(start(adapter, tmp_path, monkeypatch)) == [False, False]
    add_recipe_state(tmp_path, 0)
    ckpt.save({"a": 1}, tmp_path / "run", 1, group=None)
    assert all_well(start(adapter, tmp_path, monkeypatch)) == [False, False]
