"""A Trainer that begins again with a smaller batch because the memory does not suffice (`auto_find_batch_size`)."""

from __future__ import annotations

from pathlib import Path

import transformers  # noqa: F401  # children of this process then begin at once
from helpers.hf_runs import check_continuation, finish, lines, run

import ckpt

SMALLER = {"auto_find_batch_size": True, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "save_steps": 2}


def test_steps_after_a_smaller_batch_have_the_new_schedule(tmp_path: Path) -> None:
    check_continuation(tmp_path, 9, out_of_memory_at={"quiet": 3, "killed": 3}, args=SMALLER)


def test_a_smaller_batch_after_the_resumed_step_is_deleted_continues_from_the_newest_one(tmp_path: Path) -> None:
    options = {"out_of_memory_at": {"again": 9}, "args": SMALLER | {"save_total_limit": 1}}
    run(tmp_path, "killed", kill_at=5, **options)
    assert ckpt.open(tmp_path / "out/ckpt").steps()[-1] == 4
    finish(tmp_path, "again", resume=True, **options)
    updates = [row[0] for row in lines(tmp_path, "again")]
    assert updates[:6] == [4, 5, 6, 7, 8, 8]
