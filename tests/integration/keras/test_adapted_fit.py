"""A script that trains by fit and knows nothing of ckpt, under `ckpt-run --adapt`."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.adapted_runs import assert_resumed, run_adapted

import ckpt

PROGRAM = "plain_keras_training.py"


@pytest.mark.parametrize(
    ("backend", "fits", "kills"), [("tensorflow", "1", (11, 19)), ("torch", "2", (10, 1009)), ("jax", "2", (1012,))]
)
def test_a_killed_fit_has_the_losses_of_an_undisturbed_one(
    tmp_path: Path, backend: str, fits: str, kills: tuple[int, ...]
) -> None:  # fmt: skip
    variables = {"KERAS_BACKEND": backend, "CKPT_ADAPT_EVERY": "3"}
    whole = run_adapted(tmp_path / "a", PROGRAM, fits, **variables)
    killed = run_adapted(tmp_path / "b", PROGRAM, fits, kill_after=kills, **variables)
    assert_resumed(whole, killed, len(kills))
    ends = [
        [line for line in ended.outputs[-1].splitlines() if line[:7] in ("history", "weights")] for ended in (whole, killed)
    ]
    assert ends[0] == ends[1]
    assert len(ends[0]) == 2 * int(fits)


def test_a_validation_that_takes_longer_than_steps_is_no_hang(tmp_path: Path) -> None:
    options = "--adapt", "--hang", "4", "--restarts", "0"
    ended = run_adapted(tmp_path / "a", PROGRAM, "1", "16", options=options, KERAS_BACKEND="torch")
    assert ended.status == 0, ended.messages
    assert len(ended.outputs) == 1


def test_a_fit_with_each_kind_of_callbacks_runs_and_saves(tmp_path: Path) -> None:
    options = "--adapt", "--restarts", "0"
    ended = run_adapted(tmp_path / "a", "plain_keras_callbacks.py", options=options, KERAS_BACKEND="torch")
    output = "".join(ended.outputs)
    assert ended.status == 0, ended.messages + output
    fits = [line.split()[1:] for line in output.splitlines() if line.startswith("fit ")]
    logged = ["single", "list", "nested", "CallbackList"]
    assert fits == [[kind, "0"] for kind in ("without", "none", "empty")] + [[kind, "8"] for kind in logged]
    folder = tmp_path / "a/run/checkpoints"
    repositories = [ckpt.open(f"{folder}{suffix}") for suffix in ("", "-2", "-3", "-4", "-5", "-6")]
    assert [repository.steps() for repository in repositories] == [[7]] * 6
    assert "keras.Model is not adapted and saves nothing to ckpt: its callbacks are a CallbackList" in output
