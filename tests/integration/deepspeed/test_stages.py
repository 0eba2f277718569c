"""Steps of DeepSpeed engines are loaded on any number of ranks, into any ZeRO stage, and into models of torch alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.folders import PROGRAMS
from helpers.torchrun import check_on_torch_ranks, torchrun

import ckpt

LOADS = "deepspeed_load_checks.py"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a step of each stage, saved by two ranks."""
    folder = tmp_path_factory.mktemp("stages")
    check(2, folder, "save_stages")
    return folder


def check(ranks: int, folder: Path, *checks: str) -> None:
    check_on_torch_ranks("deepspeed_checks.py", ranks, folder, *checks)


def test_every_stage_loads_what_another_stage_saved(saved: Path) -> None:
    check(2, saved, "load_stages", "refuse_other_models", "load_parts", "load_folder_of_deepspeed", "exchange_with_torch")
    check(2, saved, "refuse_engines", "load_offloaded")


@pytest.mark.parametrize("ranks", [1, 4])
def test_another_number_of_ranks(saved: Path, ranks: int) -> None:
    check(ranks, saved, "load_stages")


def test_the_next_step_waits_for_a_save(tmp_path: Path) -> None:
    check(2, tmp_path, "train_during_saves", "copy_at_once_with_muon")


def test_a_tag_is_that_of_the_newest_save_which_still_runs(tmp_path: Path) -> None:
    check_on_torch_ranks(LOADS, 2, tmp_path, "load_tag_of_running_save")


def test_a_step_that_only_a_near_tier_has_is_loaded(tmp_path: Path) -> None:
    assert torchrun(1, PROGRAMS / LOADS, str(tmp_path), "save_to_tiers_and_die").returncode
    assert [ckpt.open(tmp_path / "tiers" / tier).steps() for tier in ("far", "near")] == [[1], [1, 2]]
    check_on_torch_ranks(LOADS, 1, tmp_path, "load_from_the_near_tier")
