"""FSDP2 by `accelerate launch`: killed and resumed by as many ranks bit for bit, and loaded by another number of ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from helpers.hf_runs import lines, run

ACCELERATE, TRAINER = "accelerate_training.py", "hf_training.py"


def kill_and_resume(folder: Path, program: str, kill_at: int, **options: Any) -> None:
    """Kill two ranks in the middle of an epoch; the losses after the resume are those of a run that was never killed."""
    status, printed = run(folder / "quiet", "quiet", 2, program, fsdp=True, **options)
    assert status == 0, printed[-4000:]
    status, printed = run(folder / "killed", "killed", 2, program, fsdp=True, kill_at=kill_at, **options)
    assert status == 1, printed[-4000:]
    assert "SIGKILL" in printed
    status, printed = run(folder / "killed", "again", 2, program, fsdp=True, resume=True, **options)
    assert status == 0, printed[-4000:]
    for rank in range(2):
        whole = lines(folder / "quiet", "quiet", rank)
        killed, again = lines(folder / "killed", "killed", rank), lines(folder / "killed", "again", rank)
        assert killed == whole[: len(killed)]
        assert again == whole[len(whole) - len(again) :]
        assert len(killed) + len(again) > len(whole) > len(again)


def load_by_other_ranks(folder: Path, program: str, **options: Any) -> None:
    """Kill two ranks; one, three and four ranks load the whole parameters and moments, and train to the end."""
    status, printed = run(folder / "two", "two", 2, program, fsdp=True, **options)
    assert status == 1, printed[-4000:]
    saved = dict(lines(folder / "two", "two", 0, "digests.jsonl"))
    for ranks in (1, 3, 4):
        shutil.copytree(folder / "two", other := folder / str(ranks))
        more = options | {"kill_at": None, "resume": True}
        status, printed = run(other, "other", ranks, program, fsdp=ranks > 1, **more)
        assert status == 0, printed[-4000:]
        for rank in range(ranks):
            step, loaded = lines(other, "other", rank, "digests.jsonl")[0]
            assert loaded == saved[step]
            assert lines(other, "other", rank)


def test_save_state_of_accelerate(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, ACCELERATE, 11, samples=28, saved=9)


def test_load_state_of_accelerate_by_other_ranks(tmp_path: Path) -> None:
    load_by_other_ranks(tmp_path, ACCELERATE, samples=28, kill_at=11, saved=9)


def test_a_killed_trainer_continues_as_before(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, TRAINER, 9, samples=44, args={"save_steps": 4})


def test_ckpt_trainer_by_other_ranks(tmp_path: Path) -> None:
    load_by_other_ranks(tmp_path, TRAINER, samples=44, kill_at=5, args={"save_steps": 4, "max_steps": 6})
