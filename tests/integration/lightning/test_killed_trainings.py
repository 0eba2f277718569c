"""A Lightning training run that is killed and started again gives the losses of an unbroken one, bit for bit."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
import torch
from helpers.lightning_runs import Training
from lightning.pytorch import callbacks, strategies
from lightning.pytorch.strategies import FSDPStrategy

import ckpt
from ckpt.adapters.lightning_state import require_supported_strategy

needs_average = pytest.mark.skipif(not hasattr(callbacks, "EMAWeightAveraging"), reason="a newer version of Lightning has it")
needs_fsdp2 = pytest.mark.skipif(not hasattr(strategies, "ModelParallelStrategy"), reason="Lightning has FSDP2 from 2.4 on")
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
        pytest.param(17, ["--sampler=stream", "--noise"], id="random samples that are fetched ahead"),
        pytest.param(17, ["--sampler=permuted-stream"], id="a stream in an order drawn at its start"),
        pytest.param(17, ["--sampler=stateful-stream", "--noise"], id="a loader with a state and without a length"),
        pytest.param(17, ["--sampler=combined"], id="a shorter loader that begins again in the epoch"),
        pytest.param(17, ["--swa"], id="stochastic weight averaging, in its second epoch"),
        pytest.param(22, ["--swa"], id="stochastic weight averaging, between two epochs"),
        pytest.param(48, ["--swa"], id="stochastic weight averaging, in the epoch for the batch norms"),
        pytest.param(17, ["--averaging"], id="a moving average of the weights", marks=needs_average),
        pytest.param(17, ["--finetuning"], id="layers that are frozen"),
        pytest.param(38, ["--finetuning"], id="layers that are no longer frozen"),
        pytest.param(17, ["--workers=2", "--noise"], id="random samples of workers"),
        pytest.param(17, ["--accumulate=3"], id="accumulated gradients"),
        pytest.param(17, ["--manual"], id="manual optimization"),
    ],
)
def test_losses_after_a_kill(tmp_path: Path, batches: int, options: list[str]) -> None:
    Training(tmp_path, *options).killed_and_resumed(batches)


def test_losses_of_two_processes_after_a_kill(tmp_path: Path) -> None:
    Training(tmp_path, "--ranks=2", "--every=2", "--epochs=5").killed_and_resumed(9, ranks=2)


def test_last_step_is_saved_by_no_process_if_one_has_a_bad_loss(tmp_path: Path) -> None:
    """The other one would wait for its part of the step until the timeout, and fail."""
    training = Training(tmp_path, "--ranks=2", "--every=1000", "--epochs=1", "--nan-at=5", "--timeout=30")
    training.run("one")
    assert len(training.losses("one", rank=1)) == 6
    assert ckpt.open(training.url("one")).steps() == []


@needs_fsdp2
def test_losses_of_two_processes_with_fsdp2_after_a_kill(tmp_path: Path) -> None:
    Training(tmp_path, "--sharded", "--ranks=2", "--every=2", "--epochs=5").killed_and_resumed(9, ranks=2)


@needs_fsdp2
def test_fsdp2_by_other_numbers_of_processes(tmp_path: Path) -> None:
    """Each loads the same model and moments. In the middle of an epoch, another number has other samples, and is refused."""
    training = Training(tmp_path, "--sharded", "--every=2")
    training.run("two", "--ranks=2", "--epochs=1")
    saved = ckpt.load(tmp_path / "two")["train"]
    for ranks in (1, 3):
        shutil.copytree(tmp_path / "two", tmp_path / f"by{ranks}")
        assert "ckpt: resumed from step 5" in training.run(f"by{ranks}", f"--ranks={ranks}", "--epochs=2")
        for rank in range(ranks):
            whole = torch.load(tmp_path / f"by{ranks}.losses.start.{rank}")
            assert len(whole) == 6
            for name, (value, moment) in whole.items():
                assert torch.equal(value, saved["model"][name])
                assert torch.equal(moment, saved["optimizer"]["state"][name]["exp_avg"])
    training.run("cut", "--ranks=2", "--kill-at=4", status=-signal.SIGKILL)
    assert "have other samples than before; use the same" in training.run("cut", "--ranks=3", status=1)


def test_each_multiple_is_saved_where_a_batch_has_two_optimizer_steps(tmp_path: Path) -> None:
    training = Training(tmp_path, "--manual", "--every=5", "--epochs=1", "--keep=9")
    training.run("one")
    assert [step + 1 for step in ckpt.open(training.url("one")).steps()] == [6, 10, 16, 20, 22]


def test_strategy_of_fsdp1_is_refused() -> None:
    strategy = FSDPStrategy()
    with pytest.raises(ckpt.InvalidArgument, match="FSDPStrategy: use ModelParallelStrategy, which is FSDP2"):
        require_supported_strategy(strategy)


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


def test_stream_that_draws_with_the_model_is_warned_of(tmp_path: Path) -> None:
    """The training draws between the fetches of two batches, and that is not repeated when the stream is read again."""
    training = Training(tmp_path, "--sampler=buffered-stream")
    training.run("cut", "--kill-at=17", status=-signal.SIGKILL)
    assert "global generator of torch" in training.run("cut")


def test_persistent_workers_are_warned_of(tmp_path: Path) -> None:
    training = Training(tmp_path, "--workers=1", "--persistent-workers")
    training.run("cut", "--kill-at=17", status=-signal.SIGKILL)
    assert "use persistent_workers=False" in training.run("cut")


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
