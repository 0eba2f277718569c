"""A script that trains by Trainer and knows nothing of ckpt, under `ckpt-run --adapt`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.adapted_runs import assert_resumed, run_adapted

import ckpt

PROGRAM = "plain_hf_training.py"

EACH_TWO = {"CKPT_ADAPT_EVERY": "2"}


@pytest.mark.parametrize(
    ("kills", "options"),
    [
        ((41, 121), {}),
        ((41, 1051), {"trainings": 2, "child": True, "args": {"dataloader_num_workers": 1}}),
    ],
    ids=["one", "two trainings"],
)
def test_a_killed_training_has_the_losses_of_an_undisturbed_one(tmp_path: Path, kills: tuple[int, ...], options: dict) -> None:
    arguments = PROGRAM, json.dumps(options)
    whole = run_adapted(tmp_path / "a", *arguments)
    killed = run_adapted(tmp_path / "b", *arguments, kill_after=kills)
    assert_resumed(whole, killed, len(kills))
    assert not list(tmp_path.rglob("checkpoint-*"))


def test_two_ranks_that_save_nothing_by_themselves(tmp_path: Path) -> None:
    """With save_strategy="no", CKPT_ADAPT_EVERY says when to save; the last step is saved, too."""
    arguments = PROGRAM, json.dumps({"args": {"save_strategy": "no", "gradient_accumulation_steps": 1}})
    options = "--adapt", "-n", "2"
    whole = run_adapted(tmp_path / "a", *arguments, options=options, **EACH_TWO)
    killed = run_adapted(tmp_path / "b", *arguments, options=options, kill_after=(90,), **EACH_TWO)
    assert_resumed(whole, killed, 1)
    assert "every 2 steps" in killed.outputs[0]
    assert ckpt.open(tmp_path / "a/run/checkpoints").latest().step == 18
    again = run_adapted(tmp_path / "a", *arguments, options=options, **EACH_TWO)
    assert again.status == 0
    assert again.losses == whole.losses  # a training run that has ended is not repeated


def test_only_the_first_trainings_of_a_script_are_saved(tmp_path: Path) -> None:
    """The ninth training writes the folders of transformers, and no repository."""
    options = {"trainings": 9, "args": {"max_steps": 1}}
    ended = run_adapted(tmp_path / "a", PROGRAM, json.dumps(options))
    assert ended.status == 0, ended.messages
    repositories = sorted(path.name for path in (tmp_path / "a/run").glob("checkpoints*"))
    assert repositories == ["checkpoints", *(f"checkpoints-{number}" for number in range(2, 9))]
    assert ended.outputs[0].count("only the first 8 training runs of a script are") == 1
    assert (tmp_path / "a/log.out/checkpoint-1").is_dir()


def test_an_evaluation_that_takes_longer_than_steps_is_no_hang(tmp_path: Path) -> None:
    options = {"eval_seconds": 16, "args": {"eval_strategy": "steps", "eval_steps": 15}}
    ended = run_adapted(tmp_path / "a", PROGRAM, json.dumps(options), options=("--adapt", "--hang", "4", "--restarts", "0"))
    assert ended.status == 0, ended.messages
    assert "eval_loss" in ended.outputs[0]
    assert len(ended.outputs) == 1
