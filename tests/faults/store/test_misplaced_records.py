"""A commit record that is that of another step, as a wrong copy of a file makes it."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

import ckpt

FROZEN = np.arange(300_000.0)


def state_of(step: int) -> dict[str, np.ndarray]:
    return {"frozen": FROZEN, "trained": np.full(1000, step)}


def test_nothing_that_a_step_with_the_record_of_another_needs_is_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its right record is copied back after the sweep, and the step is complete."""
    with ckpt.Checkpointer(tmp_path, every=1, keep=9) as ck:
        for step in range(4):
            ck.save(step, state_of(step)).result()
    record = (tmp_path / "steps/2/commit.json").read_bytes()
    shutil.copyfile(tmp_path / "steps/1/commit.json", tmp_path / "steps/2/commit.json")
    with caplog.at_level(logging.WARNING), ckpt.Checkpointer(tmp_path, every=1, keep=3, scrub=None) as ck:
        ck.save(4, state_of(4)).result()
    assert "is deleted, since step 2 may need any: steps/2/commit.json is damaged" in caplog.text
    (tmp_path / "steps/2/commit.json").write_bytes(record)
    for step in (2, 3, 4):
        assert ckpt.load(tmp_path, step=step)["trained"].tolist() == [step] * 1000


def test_a_step_is_read_from_the_tier_whose_record_is_its_own(tmp_path: Path) -> None:
    near = tmp_path / "near"
    tiers = [ckpt.Tier(str(near), every=1)]
    with ckpt.Checkpointer(tmp_path / "run", every=1, tiers=tiers) as ck:
        for step in range(2):
            ck.save(step, state_of(step)).result()
        ck.wait()
    for moved in near.rglob("steps/1/commit.json"):
        shutil.copyfile(moved.parents[1] / "0/commit.json", moved)
    ck = ckpt.Checkpointer(tmp_path / "run", every=1, tiers=tiers)
    state, start = ck.restore(state_of(9))
    assert start == 2
    assert state["trained"][0] == 1
    with pytest.raises(ckpt.SaveFailed, match="near/steps/1/commit.json is the record of step 0"):
        ck.close()  # this tier may have had a later save of step 1
