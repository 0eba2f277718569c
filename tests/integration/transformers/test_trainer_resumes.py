"""A Trainer that is killed and resumed has the losses of one that never stopped, bit for bit.

The model has dropout, the dataset and the collator draw random numbers, gradients are accumulated over two batches, and the
samples are shuffled.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import transformers  # noqa: F401  # children of this process then begin at once
from helpers.hf_runs import check_continuation, finish, lines, run

import ckpt
from ckpt.adapters.transformers_epochs import CAN_CHOOSE_POSITION

EACH_BATCH = {"gradient_accumulation_steps": 1, "save_steps": 1, "logging_steps": 4}


@pytest.mark.parametrize(
    ("kill_at", "arguments"),
    [
        pytest.param(10, {"save_steps": 4}, marks=pytest.mark.essential),  # in the second epoch
        (7, {"save_steps": 6}),  # between two epochs
        (2, EACH_BATCH),  # after the first batch of an epoch, which is fetched together with the second
        (16, {"save_steps": 5, "save_total_limit": 1}),  # in the last epoch
    ],
    ids=["in an epoch", "at its end", "at its first batch", "keeping one"],
)
def test_a_killed_training_continues_as_before(tmp_path: Path, kill_at: int, arguments: dict[str, object]) -> None:
    check_continuation(tmp_path, kill_at, args=arguments)
    steps = [checkpoint.step for checkpoint in ckpt.open(tmp_path / "quiet/out/ckpt")]
    if arguments.get("save_total_limit"):
        assert len(steps) == 1
    assert not list((tmp_path / "quiet/out").glob("checkpoint-*"))


def test_a_killed_training_of_two_processes_continues_as_before(tmp_path: Path) -> None:
    check_continuation(tmp_path, 9, ranks=2, samples=44, args={"save_steps": 4})


def test_order_drawn_from_the_global_generators(tmp_path: Path) -> None:
    """The sampler draws a permutation at the start of each epoch, which a resumed epoch must draw again."""
    arguments = {"accelerator_config": {"use_seedable_sampler": False}, "save_steps": 4}
    check_continuation(tmp_path, 10, args=arguments)


def test_stream_and_workers(tmp_path: Path) -> None:
    """An IterableDataset, and a data loader with workers: exact where they draw no random numbers."""
    check_continuation(tmp_path / "stream", 5, stream=True, random_data=False, args={"max_steps": 9, "save_steps": 3})
    check_continuation(tmp_path / "workers", 10, random_data=False, args={"dataloader_num_workers": 1, "save_steps": 4})


def test_persistent_workers_are_warned_of(tmp_path: Path) -> None:
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "save_steps": 4}
    run(tmp_path, "killed", kill_at=10, args=workers)
    assert "use dataloader_persistent_workers=False" in finish(tmp_path, "again", resume=True, args=workers)


@pytest.mark.skipif(not CAN_CHOOSE_POSITION, reason="this version always continues with the next epoch")
@pytest.mark.parametrize("options", [{}, {"patience": 2}, {"samples": 24}], ids=["losses", "patience", "whole updates"])
def test_a_step_before_the_evaluation_of_its_epoch(tmp_path: Path, options: dict[str, int]) -> None:
    """The Trainer saves the last update of an epoch before it evaluates. The continuation makes up for the evaluation."""
    arguments = {"save_steps": 6, "eval_strategy": "epoch", "metric_for_best_model": "eval_loss", "greater_is_better": False}
    check_continuation(tmp_path, 7, evaluate=True, args=arguments, **options)


def test_patience_of_an_early_stop(tmp_path: Path) -> None:
    """The counter of EarlyStoppingCallback continues, so that the resumed run stops where the other one does."""
    arguments = {
        "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
    }  # fmt: skip
    check_continuation(tmp_path, 5, evaluate=True, patience=2, args=arguments)
    assert lines(tmp_path / "quiet", "quiet", suffix="end.jsonl")[0][0] == 6


def test_reference_model_that_follows_the_model(tmp_path: Path) -> None:
    """DPOTrainer of TRL with sync_ref_model: the reference model is neither the first model nor the present one."""
    check_continuation(tmp_path, 10, dpo=True, args={"save_steps": 4})


@pytest.mark.essential
def test_adapters_of_peft(tmp_path: Path) -> None:
    """Only the adapters are saved, and the base model comes from the script."""
    check_continuation(tmp_path, 10, lora=True, args={"save_steps": 4})
    names = list(ckpt.open(tmp_path / "quiet/out/ckpt").latest())
    weights = [name for name in names if name.startswith("train.model.")]
    assert weights
    assert all("lora_" in name for name in weights)


def test_trainer_of_trl(tmp_path: Path) -> None:
    check_continuation(tmp_path, 10, sft=True, random_data=False, args={"save_steps": 4})


def test_samples_that_are_generated_for_several_updates(tmp_path: Path) -> None:
    """GRPOTrainer of TRL is killed between two updates that use the samples of one generation."""
    check_continuation(tmp_path, 4, grpo=True, args={"save_steps": 3, "max_steps": 6})


def test_fewer_processes_continue_from_the_same_step(tmp_path: Path) -> None:
    finish(tmp_path, "two", 2, samples=44, args={"max_steps": 4, "save_steps": 4})
    finish(tmp_path, "one", 1, samples=44, resume=True, args={"max_steps": 6, "save_steps": 4})
    assert lines(tmp_path, "one")[0][0] == 4


@pytest.mark.parametrize("limit", [1, None])
def test_best_model_is_loaded_at_the_end(tmp_path: Path, limit: int | None) -> None:
    arguments = {
        "load_best_model_at_end": True, "metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 2,
        "save_total_limit": limit, "greater_is_better": True,
    }  # fmt: skip
    check_continuation(tmp_path, 10, evaluate=True, args=arguments)
    (last, _, best, where, _), *_ = lines(tmp_path / "quiet", "quiet", 0, "end.jsonl")
    assert best < last
    assert where.endswith(f"(step {best})")
    if limit:
        assert best in ckpt.open(tmp_path / "quiet/out/ckpt-best").steps()


BEST = {
    "load_best_model_at_end": True, "metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 2,
    "save_total_limit": 1,
}  # fmt: skip


def test_a_kill_between_a_step_and_the_copy_of_its_best_model(tmp_path: Path) -> None:
    """The first model is the best. A kill leaves its step, and the repository of the best model has nothing yet."""
    arguments = BEST | {"greater_is_better": True, "max_steps": 8}
    finish(tmp_path / "quiet", "quiet", evaluate=True, best_at=2, args=arguments)
    run(tmp_path, "killed", kill_at=3, evaluate=True, best_at=2, args=arguments)
    assert ckpt.open(tmp_path / "out/ckpt").steps() == [2]
    shutil.rmtree(tmp_path / "out/ckpt-best")
    finish(tmp_path, "again", resume=True, evaluate=True, best_at=2, args=arguments)
    (last, weights, best, *_), *_ = lines(tmp_path, "again", 0, "end.jsonl")
    assert (last, best) == (8, 2)
    assert weights == lines(tmp_path / "quiet", "quiet", 0, "end.jsonl")[0][1]


def test_a_kill_between_the_copy_of_a_best_model_and_its_step(tmp_path: Path) -> None:
    """The copy of step 6 is committed, and the step is not. After the resumed run, the newest copy is its best model."""
    arguments = BEST | {"greater_is_better": True, "max_steps": 4}
    finish(tmp_path, "killed", evaluate=True, best_at=2, args=arguments)
    copies = tmp_path / "out/ckpt-best"
    assert ckpt.open(copies).steps() == [2]
    model = ckpt.load(copies)["train"]
    ckpt.save({"train": "of a training run that was abandoned"}, copies, 6)
    finish(tmp_path, "again", resume=True, evaluate=True, best_at=2, args=arguments | {"max_steps": 8})
    (last, _, best, where, _), *_ = lines(tmp_path, "again", 0, "end.jsonl")
    assert (last, best) == (8, 2)
    assert where.endswith("ckpt-best (step 2)")
    assert ckpt.open(copies).latest().step == 2
    assert str(ckpt.load(copies)["train"]) == str(model)


@pytest.mark.parametrize("limit", [1, None])
def test_a_best_evaluation_between_two_saves(tmp_path: Path, limit: int | None) -> None:
    """The best evaluation is one whose model is not saved. Trainer then loads no model at the end, either."""
    arguments = BEST | {"greater_is_better": True, "max_steps": 10, "eval_steps": 1, "save_steps": 5, "save_total_limit": limit}
    check_continuation(tmp_path, 7, evaluate=True, best_at=2, args=arguments)
    (last, _, best, where, _), *_ = lines(tmp_path / "killed", "again", 0, "end.jsonl")
    assert (last, best, where) == (10, 2, None)


def test_a_best_model_among_more_evaluations_than_saves(tmp_path: Path) -> None:
    """Step 2 is the best evaluation and is saved. The resumed run finds its best model there, and not at the newest step."""
    arguments = BEST | {"greater_is_better": True, "max_steps": 7, "eval_steps": 1, "save_steps": 2}
    check_continuation(tmp_path, 5, evaluate=True, best_at=2, args=arguments)
    (last, _, best, where, _), *_ = lines(tmp_path / "killed", "again", 0, "end.jsonl")
    assert (last, best) == (7, 2)
    assert where.endswith("ckpt-best (step 2)")


def test_a_best_model_that_is_gone_is_named(tmp_path: Path) -> None:
    arguments = BEST | {"greater_is_better": True, "max_steps": 8}
    run(tmp_path, "killed", kill_at=7, evaluate=True, best_at=2, args=arguments)  # step 6 is saved, so step 2 is deleted
    shutil.rmtree(tmp_path / "out/ckpt-best")
    assert "the best model, of step 2, is in neither" in finish(
        tmp_path, "again", resume=True, evaluate=True, best_at=2, args=arguments
    )
    assert lines(tmp_path, "again", 0, "end.jsonl")[0][2] == 8


def test_the_best_model_before_the_newest_one_is_kept(tmp_path: Path) -> None:
    """A kill may leave a new best model whose step is not complete. The step before then refers to the best model before."""
    finish(tmp_path, "quiet", evaluate=True, best_at=2, args=BEST | {"greater_is_better": False, "max_steps": 6})
    assert lines(tmp_path, "quiet", 0, "end.jsonl")[0][2] == 6
    steps = ckpt.open(tmp_path / "out/ckpt-best").steps()
    assert len(steps) == 2
    assert steps[-1] == 6


def test_a_step_of_only_the_model_continues_with_a_warning(tmp_path: Path) -> None:
    arguments = {"save_steps": 2, "max_steps": 4}
    finish(tmp_path, "first", args=arguments | {"save_only_model": True})
    for only_model in (True, False):
        printed = finish(tmp_path, "again", resume="4", args={"max_steps": 5, "save_only_model": only_model, "save_steps": 9})
        assert "step 4 has only the model (save_only_model)" in printed
    assert [row[0] for row in lines(tmp_path, "again")] == [4, 4] * 2


def test_a_complete_step_continues_where_only_the_model_is_saved_now(tmp_path: Path) -> None:
    arguments = {"save_steps": 4, "max_steps": 8}
    finish(tmp_path / "quiet", "quiet", args=arguments)
    run(tmp_path, "killed", kill_at=6, args=arguments)
    printed = finish(tmp_path, "again", resume=True, args=arguments | {"save_only_model": True})
    assert "has only the model" not in printed
    assert lines(tmp_path, "again") == lines(tmp_path / "quiet", "quiet")[8:]


def test_a_damaged_step_is_passed_over(tmp_path: Path) -> None:
    finish(tmp_path, "first", args={"max_steps": 6})
    for pack in (tmp_path / "out/ckpt/steps").glob("*6/pack/*"):
        data = bytearray(pack.read_bytes())
        data[: len(data)] = bytes(len(data))
        pack.write_bytes(data)
    finish(tmp_path, "again", resume=True, args={"max_steps": 8})
    assert lines(tmp_path, "again")[0][0] == 4
    status, printed = run(tmp_path, "named", resume="checkpoint-12", args={"max_steps": 14})
    assert status
    assert "StepNotFound" in printed


def test_resuming_where_nothing_is_saved_begins(tmp_path: Path) -> None:
    finish(tmp_path, "new", resume=True, args={"max_steps": 2})
    assert lines(tmp_path, "new")[0][0] == 0
