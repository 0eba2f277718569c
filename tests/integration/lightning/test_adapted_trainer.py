"""A script that trains by Lightning and knows nothing of ckpt, under `ckpt-run --adapt`, which sets CKPT_DIR."""

from __future__ import annotations

from pathlib import Path

from helpers.adapted_runs import run_adapted


def test_a_killed_training_has_the_losses_of_an_undisturbed_one(tmp_path: Path) -> None:
    whole = run_adapted(tmp_path / "a", "plain_lightning_training.py", CKPT_ADAPT_EVERY="3")
    killed = run_adapted(tmp_path / "b", "plain_lightning_training.py", kill_after=(13, 25), CKPT_ADAPT_EVERY="3")
    assert whole.status == killed.status == 0, whole.messages + killed.messages + "".join(killed.outputs)
    assert {step for step, _ in killed.losses} == set(range(32))
    assert [(step, loss) for step, loss in killed.losses if whole.by_number[step] != loss] == []
    assert "resumed from step" in killed.outputs[-1], killed.outputs
    for output in killed.outputs:
        assert output.count("saves this fit to ") == 1
        assert "uses ckpt itself" not in output
        assert "not adapted" not in output
