"""A Trainer that is killed while it reads data without a length, and runs whose data has another position than before."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import transformers
from helpers.hf_runs import check_continuation, finish, lines, run

EPOCHS = {"eval_strategy": "epoch", "metric_for_best_model": "eval_loss", "greater_is_better": False}

needs_position = pytest.mark.skipif(
    not hasattr(transformers.Trainer, "_init_training_state"), reason="this version continues only in the first pass"
)


def test_random_numbers_of_a_collator(tmp_path: Path) -> None:
    """The resumed run reads the batches that are done, and their draws must not change those that follow."""
    check_continuation(tmp_path, 5, stream=True, args={"max_steps": 6, "save_steps": 3})


@needs_position
def test_in_the_second_pass(tmp_path: Path) -> None:
    check_continuation(tmp_path, 10, stream=True, args={"max_steps": 15, "save_steps": 4})


@needs_position
@pytest.mark.parametrize("stream", ["permuted", "own"])
def test_order_drawn_at_the_start_of_a_pass(tmp_path: Path, stream: str) -> None:
    """From a global generator, or from one of the dataset that continues from pass to pass."""
    check_continuation(tmp_path, 10, stream=stream, args={"max_steps": 15, "save_steps": 4})


def test_a_step_with_the_last_batch_of_a_pass(tmp_path: Path) -> None:
    """The continuation fetches nothing in that pass, and begins the next one with the numbers of the save."""
    arguments = {"max_steps": 21, "save_steps": 11, "gradient_accumulation_steps": 1}
    check_continuation(tmp_path, 13, stream=True, random_data=False, args=arguments)


@needs_position
@pytest.mark.parametrize("options", [{}, {"patience": 3}], ids=["losses", "patience"])
def test_a_step_after_the_evaluation_of_a_pass(tmp_path: Path, options: dict[str, int]) -> None:
    """The continuation does not evaluate that pass again: this draws random numbers, and early stopping would count it.

    A pass has whole updates, because the Trainer keeps the gradients of the rest for the next pass, and no step has gradients.
    """
    arguments = EPOCHS | {"max_steps": 27, "save_strategy": "epoch"}
    check_continuation(tmp_path, 8, samples=24, stream=True, evaluate=True, args=arguments, **options)


def test_stream_that_draws_with_the_model_is_warned_of(tmp_path: Path) -> None:
    """The training draws between the fetches of two batches, and that is not repeated when the stream is read again."""
    arguments = {"max_steps": 6, "save_steps": 3}
    run(tmp_path, "killed", kill_at=4, stream="buffered", args=arguments)
    assert "global generator of torch" in finish(tmp_path, "again", resume=True, stream="buffered", args=arguments)


@needs_position
def test_another_order_in_each_pass(tmp_path: Path) -> None:
    """The dataset gets the number of the pass from the Trainer, as it does without ckpt."""
    arguments = {"max_steps": 15, "save_steps": 4}
    check_continuation(tmp_path, 10, shuffled_stream=True, random_data=False, args=arguments)
    finish(tmp_path, "plain", plain=True, shuffled_stream=True, random_data=False, args=arguments | {"save_strategy": "no"})
    assert lines(tmp_path, "plain") == lines(tmp_path / "quiet", "quiet")


@pytest.mark.skipif(hasattr(transformers.Trainer, "_init_training_state"), reason="this version continues in each pass")
def test_a_version_that_cannot_continue_in_the_second_pass(tmp_path: Path) -> None:
    finish(tmp_path, "first", stream=True, args={"max_steps": 8, "save_steps": 8})
    status, printed = run(tmp_path, "again", stream=True, resume=True, args={"max_steps": 15})
    assert status
    assert "step 8 is in pass 2 of data without a length" in printed


def test_average_loss_covers_the_steps_since_the_resume(tmp_path: Path) -> None:
    """Losses that were not logged at the save are logged later, and are not a part of the average of the resumed call."""
    finish(tmp_path, "first", args={"max_steps": 4, "save_steps": 4})
    finish(tmp_path, "again", resume=True, args={"max_steps": 9})
    losses = [float.fromhex(loss) for _, loss in lines(tmp_path, "again")]
    divides_by_own_steps = "num_steps_trained" in inspect.getsource(transformers.trainer)  # 5.17 still divides by all steps
    steps = 5 if divides_by_own_steps else 9
    assert lines(tmp_path, "again", suffix="end.jsonl")[0][4] == pytest.approx(sum(losses) / steps)
