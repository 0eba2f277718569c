"""A script that trains by paddle.Model.fit and knows nothing of ckpt, under `ckpt-run --adapt`."""

from __future__ import annotations

from pathlib import Path

from helpers.adapted_runs import assert_resumed, run_adapted

PROGRAM = "plain_paddle_fit.py"


def test_killed_fits_have_the_losses_of_undisturbed_ones(tmp_path: Path) -> None:
    variables = {"CKPT_ADAPT_EVERY": "3", "OMP_NUM_THREADS": "1"}
    kills = (10, 1012)
    whole = run_adapted(tmp_path / "a", PROGRAM, "2", **variables)
    killed = run_adapted(tmp_path / "b", PROGRAM, "2", kill_after=kills, **variables)
    assert_resumed(whole, killed, len(kills))
    ends = [[line for line in ended.outputs[-1].splitlines() if line.startswith("weights")] for ended in (whole, killed)]
    assert ends[0] == ends[1]
    assert len(ends[0]) == 2
