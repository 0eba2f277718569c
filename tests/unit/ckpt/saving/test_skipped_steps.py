"""A step that one rank leaves out, because its loss is bad: no rank saves it, and the training of all ranks continues."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.loop_runs import Job
from helpers.loop_runs import job as job
from helpers.rank_threads import all_well, on_ranks
from helpers.tier_folders import TierFolders, shard_of
from helpers.tier_folders import tier_folders as tier_folders

import ckpt
from ckpt.groups.base import Group
from ckpt.saving.handle import SaveHandle

RANKS = 4


def loss_of(group: Group, step: int, bad_rank: int, bad_step: int) -> float:
    """Return the loss of a rank at a step: not a number for one rank at one step."""
    return math.nan if (group.rank, step) == (bad_rank, bad_step) else 1.0


@pytest.mark.parametrize("bad_step", [3, 11])
@pytest.mark.parametrize("bad_rank", range(RANKS))
def test_training_of_all_ranks_continues_after_a_bad_loss_of_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bad_rank: int, bad_step: int
) -> None:
    def work(group: Group) -> SaveHandle | None:
        skipped: SaveHandle | None = None
        with ckpt.Checkpointer(tmp_path, every=2, group=group, timeout=60) as ck:
            for step in range(12):
                handle = ck.step(step, shard_of(group.rank, RANKS, step), loss=loss_of(group, step, bad_rank, bad_step))
                skipped = handle if step == bad_step else skipped
        return skipped

    handles = all_well(on_ranks(RANKS, work))
    assert ckpt.open(tmp_path).steps() == [step for step in range(1, 12, 2) if step != bad_step]
    text = f"step {bad_step} is not saved because rank {bad_rank} leaves it out: its loss is nan; look at its log"
    assert [handle is None for handle in handles] == [rank == bad_rank for rank in range(RANKS)]
    for handle in filter(None, handles):
        with pytest.raises(ckpt.StepSkipped, match=text):
            handle.result()
    assert [record.message for record in caplog.records].count(text) == RANKS - 1


@pytest.mark.parametrize("bad_rank", range(2))
def test_no_tier_is_left_out_after_a_bad_loss_of_one_rank(tier_folders: TierFolders, bad_rank: int) -> None:
    def work(group: Group) -> None:
        with tier_folders.open(group=group) as ck:
            for step in range(8):
                ck.step(step, shard_of(group.rank, 2, step), loss=loss_of(group, step, bad_rank, 5))
                ck.wait()
            assert [tier.saves_to_skip for tier in ck._tiers._open_tiers] == [0, 0, 0]

    all_well(on_ranks(2, work))
    assert ckpt.open(tier_folders.nvme).steps() == [3, 7]
    assert ckpt.open(tier_folders.run).steps() == [3, 7]


@pytest.mark.parametrize("with_tiers", [False, True])
@pytest.mark.parametrize("bad_rank", [None, 0, 1])
def test_last_step_is_saved_by_all_ranks_or_by_none(tier_folders: TierFolders, bad_rank: int | None, with_tiers: bool) -> None:
    def work(group: Group) -> None:
        tiers = {} if with_tiers else {"tiers": ()}
        with tier_folders.open(group=group, timeout=60, **tiers) as ck:
            ck.save(1, shard_of(group.rank, 2, 1))
            handle = ck.save_unless_bad(9, shard_of(group.rank, 2, 9), loss=math.inf if group.rank == bad_rank else 1.0)
            assert (handle is None) == (group.rank == bad_rank)

    all_well(on_ranks(2, work))
    newest = ckpt.open(tier_folders.run).latest()
    assert newest is not None
    assert newest.step == (9 if bad_rank is None else 1)


@pytest.mark.slow
def test_ranks_agree_on_the_step_after_one_that_one_rank_leaves_out(tmp_path: Path) -> None:
    """Rank 0 chooses the steps by time, and the first one, which schedules the second, is left out."""

    def work(group: Group) -> list[int]:
        with ckpt.Checkpointer(tmp_path, every="auto", group=group, timeout=60) as ck:
            handles = []
            for step in range(150):
                time.sleep(0.02)
                handles.append(ck.step(step, shard_of(group.rank, 2, step), loss=loss_of(group, step, 1, 0)))
            return [handle.step for handle in handles if handle is not None]

    saved = all_well(on_ranks(2, work))
    assert saved[0] == [0, *saved[1]]
    assert saved[1]
    assert ckpt.open(tmp_path).steps() == saved[1]


def test_requested_end_of_a_job_whose_rank_has_a_bad_loss(job: Callable[..., Job], tmp_path: Path) -> None:
    """All ranks end with status 0: no rank has failed."""
    (tmp_path / "losses").write_text(json.dumps({"1:2": math.nan}))
    ranks = job(1_000_000, 0.01, 1_000_000, tmp_path / "losses", size=2)
    ranks.until(lambda beats: all(beat.step > 3 for beat in beats))
    request = ranks.stop(0.01)
    outputs = ranks.end()
    assert ckpt.open(tmp_path / "repo").steps() == []
    assert "the job ends as requested" in outputs[0]
    assert f"step {request.step} is not saved" in outputs[1]


def test_save_of_one_process_needs_no_group(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, group=None) as ck:
        state: dict[str, Any] = {"step": 1}
        assert ck.save_unless_bad(1, state, loss=None) is not None
        assert ck.save_unless_bad(2, state, loss=math.nan) is None
    assert ckpt.open(tmp_path).steps() == [1]
