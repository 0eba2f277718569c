"""A Trainer whose training has ended, and which is started again: it trains only if the script asks for more."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from helpers.hf_runs import finish, lines

import ckpt
from ckpt.adapters.transformers_data import DataPosition
from ckpt.adapters.transformers_epochs import EpochEnd
from ckpt.adapters.transformers_progress import TrainerProgress

BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True, "save_total_limit": 1}
EVALUATE = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_loss", "greater_is_better": False}


@pytest.mark.parametrize("options", [{}, {"stream": True}, {"evaluate": True, "best_at": 2, "args": EVALUATE | BEST}])
def test_a_run_that_reached_max_steps_in_an_epoch_trains_only_if_it_is_raised(tmp_path: Path, options: dict[str, Any]) -> None:
    arguments = {"save_steps": 2, **options.pop("args", {})}
    for name in ("first", "again"):
        finish(tmp_path, name, resume=True, args=arguments | {"max_steps": 8}, **options)
    assert lines(tmp_path, "again") == []
    assert lines(tmp_path, "again", suffix="end.jsonl")[0][:4] == lines(tmp_path, "first", suffix="end.jsonl")[0][:4]
    assert ckpt.open(tmp_path / "out/ckpt").latest().step == 8
    if "stream" in options and not hasattr(transformers.Trainer, "_init_training_state"):
        return  # this version continues only in the first pass of a stream
    finish(tmp_path, "more", resume=True, args=arguments | {"max_steps": 9}, **options)
    assert {row[0] for row in lines(tmp_path, "more")} == {8}


continues_after_a_pass = pytest.mark.skipif(
    not hasattr(transformers.Trainer, "_init_training_state"), reason="this version continues only in a pass with more batches"
)


@pytest.mark.parametrize("samples", [44, pytest.param(16, marks=continues_after_a_pass)])
def test_a_stream_continues_where_a_shorter_run_has_ended(tmp_path: Path, samples: int) -> None:
    """A run of 4 updates takes 16 samples. For Trainer, its end is that of an epoch, also if the stream has more."""
    arguments = {"save_steps": 4, "lr_scheduler_type": "constant"}
    finish(tmp_path / "whole", "whole", stream=True, samples=samples, args=arguments | {"max_steps": 8})
    for name, steps in (("first", 4), ("more", 8)):
        finish(tmp_path, name, resume=True, stream=True, samples=samples, args=arguments | {"max_steps": steps})
    assert lines(tmp_path, "first") + lines(tmp_path, "more") == lines(tmp_path / "whole", "whole")


@continues_after_a_pass
def test_a_stream_continues_where_a_shorter_run_with_a_save_per_epoch_has_ended(tmp_path: Path) -> None:
    """The Trainer then saves after the end of an epoch, although the stream has more samples."""
    arguments = {"save_strategy": "epoch", "lr_scheduler_type": "constant"}
    finish(tmp_path / "whole", "whole", stream=True, samples=44, args=arguments | {"max_steps": 8})
    for name, steps in (("first", 4), ("more", 8)):
        finish(tmp_path, name, resume=True, stream=True, samples=44, args=arguments | {"max_steps": steps})
    assert lines(tmp_path, "first") + lines(tmp_path, "more") == lines(tmp_path / "whole", "whole")


def test_trainer_computes_the_position_where_an_earlier_version_has_ended_in_a_stream() -> None:
    best: Any = None
    progress = TrainerProgress(SimpleNamespace(train_dataset=iter(())), DataPosition(), best, EpochEnd(list))
    progress.load_state_dict({"json": "{}", "losses": [], "position": [1, 0], "best_step": None})
    assert progress.position == []


def test_a_run_that_an_early_stop_has_ended_trains_only_with_more_patience(tmp_path: Path) -> None:
    options: dict[str, Any] = {"evaluate": True, "resume": True}
    arguments = EVALUATE | {"save_steps": 2}
    for name, more in (("first", {}), ("again", {}), ("longer", {"num_train_epochs": 6})):
        finish(tmp_path, name, patience=2, args=arguments | more, **options)
    assert lines(tmp_path, "first")[-1][0] == 5
    assert lines(tmp_path, "again") == lines(tmp_path, "longer") == []
    assert lines(tmp_path, "again", suffix="end.jsonl")[0][:3] == lines(tmp_path, "first", suffix="end.jsonl")[0][:3]
    finish(tmp_path, "patient", patience=3, args=arguments, **options)
    assert {row[0] for row in lines(tmp_path, "patient")} == {6, 7}


def test_a_run_that_a_callback_of_the_script_has_stopped_continues(tmp_path: Path) -> None:
    """Such a callback may stop for a limit of time, and the next start of the script is meant to continue."""
    for name in ("first", "again"):
        finish(tmp_path, name, resume=True, stop_at=5, args={"save_steps": 2, "max_steps": 7})
    assert lines(tmp_path, "first")[-1][0] == 4
    assert {row[0] for row in lines(tmp_path, "again")} == {5, 6}
