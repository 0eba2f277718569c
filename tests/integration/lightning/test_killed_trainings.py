"""A Lightning training that is killed and started again gives the losses of an unbroken one, bit for bit."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from helpers.lightning_runs import Training

import ckpt

OTHER_PACKAGE = "--package=pytorch_lightning"


@pytest.mark.parametrize(
    ("batches", "options"),
    [
        pytest.param(17, [], id="in the middle of an epoch", marks=pytest.mark.essential),
        pytest.param(11, [OTHER_PACKAGE], id="between two epochs"),
        pytest.param(9, ["--every=4", "--val-interval=0.3", OTHER_PACKAGE], id="after a validation in the epoch"),
        pytest.param(17, ["--sampler=own"], id="a sampler of the user"),
        pytest.param(17, ["--sampler=seeded", "--max-steps=30"], id="a loader with a generator, up to max_steps"),
        pytest.param(17, ["--sampler=stream"], id="a dataset without a length"),
        pytest.param(17, ["--workers=2", "--noise"], id="random samples of workers"),
        pytest.param(17, ["--accumulate=3"], id="accumulated gradients"),
        pytest.param(17, ["--manual"], id="manual optimization"),
    ],
)
def test_losses_after_a_kill(tmp_path: Path, batches: int, options: list[str]) -> None:
    Training(tmp_path, *options).killed_and_resumed(batches)


def test_two_processes(tmp_path: Path) -> None:
    Training(tmp_path, "--ranks=2", "--every=2", "--epochs=5").killed_and_resumed(9, ranks=2)


def test_two_processes_with_fsdp2(tmp_path: Path) -> None:
    Training(tmp_path, "--sharded", "--ranks=2", "--every=2", "--epochs=5").killed_and_resumed(9, ranks=2)


def test_more_epochs_continue_an_ended_training(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.run("whole")
    training.run("parts", "--epochs=2", "--every=1000")
    assert [checkpoint.step for checkpoint in ckpt.open(training.url("parts"))] == [21]  # the last step is saved
    training.run("parts", "--every=1000")
    assert training.losses("parts") == training.losses("whole")


def test_more_steps_continue_in_the_epoch(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.run("whole")
    training.run("parts", "--max-steps=17", "--every=1000")
    training.run("parts", "--every=1000")
    assert training.losses("parts") == training.losses("whole")


def test_data_in_another_order_is_refused(tmp_path: Path) -> None:
    training = Training(tmp_path, "--sampler=hidden")
    training.run("cut", "--kill-at=17", status=-signal.SIGKILL)
    printed = training.run("cut", status=1)
    assert "CkptError: the data cannot continue where the saved step was: the first 6 batches" in printed
    assert "check_data=False" in printed


def test_hyperparameter_that_is_code_is_named(tmp_path: Path) -> None:
    training = Training(tmp_path, "--epochs=1")
    printed = training.run("one")
    assert printed.count("hyper_parameters.rule is not stored, because it is a function") == 1


def test_step_of_other_code_is_refused(tmp_path: Path) -> None:
    training = Training(tmp_path)
    ckpt.save({"weights": b"1"}, training.url("other"), step=3)
    assert "FormatError: step 3 of" in training.run("other", status=1)


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_script_that_does_not_mention_ckpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """The entry point gives a Trainer the callback where CKPT_DIR is set."""
    training = Training(tmp_path, "--no-callback", "--epochs=2", f"--package={package}")
    monkeypatch.setenv("CKPT_DIR", str(tmp_path / "repository"))
    monkeypatch.setenv("CKPT_LIGHTNING", "0")
    training.run("off")
    assert not (tmp_path / "repository").exists()
    monkeypatch.delenv("CKPT_LIGHTNING")
    printed = training.run("on")
    assert printed.count("saves this fit to") == printed.count("CKPT_LIGHTNING=0 turns this off") == 1
    assert training.losses("on") == training.losses("off")  # the callback changes no number
    assert "ckpt: resumed from step 21" in training.run("again")
