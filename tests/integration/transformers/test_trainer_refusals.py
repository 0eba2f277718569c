"""What the adapter of Trainer does not save is refused before the training, with what to write instead."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.refusal import refused
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ckpt
from ckpt.adapters.accelerate import attach
from ckpt.adapters.transformers import CheckpointedTrainer, Checkpoints, CkptTrainer

ROWS = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 4


def make(kind: Any, folder: Path, *, arguments: dict[str, Any] | None = None, **more: Any) -> Any:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    args = TrainingArguments(str(folder), use_cpu=True, report_to=[], max_steps=1, **(arguments or {}))
    return kind(model, args, train_dataset=ROWS, **more)


def test_a_callback_alone(tmp_path: Path) -> None:
    with refused(ckpt.InvalidArgument, "position in the data", "CkptTrainer", "ckpt='/data/run'"):
        make(Trainer, tmp_path, callbacks=[Checkpoints("/data/run")])
    trainer = make(Trainer, tmp_path)
    trainer.add_callback(Checkpoints())
    with refused(ckpt.InvalidArgument, "CkptTrainer"):
        trainer.train()


def test_the_mixin_behind_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The methods of Trainer would come before those of the mixin, so nothing would be saved to the repository."""
    with refused(ckpt.InvalidArgument, "Behind", "class Behind(CheckpointedTrainer, Trainer)"):

        class Behind(Trainer, CheckpointedTrainer):
            pass

    class Before(CheckpointedTrainer, Trainer):
        pass

    class Below(Before):
        pass

    monkeypatch.setenv("CKPT_DIR", str(tmp_path / "run"))
    make(Below, tmp_path / "out", arguments={"save_strategy": "steps", "save_steps": 1}).train()
    assert ckpt.open(tmp_path / "run").steps() == [1]


def test_the_accelerator_of_a_trainer(tmp_path: Path) -> None:
    """A Trainer writes its checkpoints itself, and does not call save_state of its Accelerator."""
    trainer = make(Trainer, tmp_path / "out")
    attach(trainer.accelerator, tmp_path / "run")
    with refused(ckpt.InvalidArgument, "would save nothing", "CkptTrainer"):
        trainer.train()


def test_uploads_of_checkpoint_folders(tmp_path: Path) -> None:
    trainer = make(CkptTrainer, tmp_path)
    trainer.args.push_to_hub = True
    with refused(ckpt.InvalidArgument, "hub_strategy='end'"):
        trainer.train()


def test_a_trial_of_a_search(tmp_path: Path) -> None:
    with refused(ckpt.InvalidArgument, "hyperparameter search"):
        make(CkptTrainer, tmp_path).train(trial={"learning_rate": 1.0})


def test_a_step_that_has_no_name(tmp_path: Path) -> None:
    with refused(ckpt.InvalidArgument, "'newest'", "use True or a number"):
        make(CkptTrainer, tmp_path).train(resume_from_checkpoint="newest")
    with pytest.raises(ckpt.StepNotFound):
        make(CkptTrainer, tmp_path).train(resume_from_checkpoint="checkpoint-7")


def test_a_folder_of_trainer_is_loaded_and_the_next_step_is_saved_here(tmp_path: Path) -> None:
    make(Trainer, tmp_path, arguments={"save_steps": 1}).train()
    trainer = make(CkptTrainer, tmp_path, arguments={"save_steps": 1})
    trainer.args.max_steps = 2
    trainer.train(resume_from_checkpoint=True)
    assert [checkpoint.step for checkpoint in ckpt.open(tmp_path / "ckpt")] == [2]


needs_position = pytest.mark.skipif(
    not hasattr(Trainer, "_init_training_state"), reason="this version computes the position out of reach"
)


def train(folder: Path, steps: int, batch_size: int, **more: Any) -> None:
    trainer = make(CkptTrainer, folder, arguments={"save_steps": 1, "per_device_train_batch_size": batch_size})
    trainer.args.max_steps = steps
    trainer.train(**more)


@needs_position
def test_a_position_that_repeats_or_leaves_out_samples_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, 3, 2)
    train(tmp_path, 5, 2, resume_from_checkpoint=True)
    assert "left out" not in caplog.text
    train(tmp_path, 6, 1, resume_from_checkpoint=True)
    assert "step 5 was saved after batch 1 of epoch 2" in caplog.text
    assert "resumes after batch 1 of epoch 1, so samples repeat or are missing: use the same batch size" in caplog.text


@needs_position
def test_another_number_of_samples_in_each_batch_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the first epoch, the number of the batch is the same, but the samples are others."""
    train(tmp_path, 1, 2)
    train(tmp_path, 2, 1, resume_from_checkpoint=True)
    assert "step 1 was saved after batch 1 with 2 samples in a batch of all processes" in caplog.text
    assert "and now a batch has 1, so samples are repeated or left out: use the batch size" in caplog.text


def test_a_model_of_another_shape(tmp_path: Path) -> None:
    make(CkptTrainer, tmp_path, arguments={"save_steps": 1}).train()
    trainer = make(CkptTrainer, tmp_path)
    trainer.model.resize_token_embeddings(16, mean_resizing=False)
    with refused(ckpt.LeafMismatch, "transformer.wte.weight", "[16, 8]"):
        trainer.train(resume_from_checkpoint=True)


def test_only_the_model_is_saved(tmp_path: Path) -> None:
    make(CkptTrainer, tmp_path, arguments={"save_steps": 1, "save_only_model": True}).train()
    names = list(ckpt.open(tmp_path / "ckpt").latest())
    assert names
    assert all(name.startswith("train.model.") for name in names)


def test_import_of_ckpt_imports_no_transformers() -> None:
    import subprocess

    subprocess.run([sys.executable, "-c", "import ckpt, sys; ckpt.save; assert 'transformers' not in sys.modules"], check=True)
