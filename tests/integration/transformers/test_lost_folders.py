"""Ranks whose hosts have different folders of Trainer do not continue from different ones."""

from __future__ import annotations

from pathlib import Path

from helpers.torchrun import check_on_torch_ranks


def test_a_host_without_the_folder_of_rank_0_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    check_on_torch_ranks("trainer_checks.py", 2, tmp_path, "a_new_host_lacks_the_folder_of_trainer")
