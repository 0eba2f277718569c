"""After a power loss of all tiers at any moment, each tier has its acknowledged steps, and the job continues."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.campaigns import CountCases
from helpers.crash_states import CrashState
from helpers.mounts import why_no_fuse
from helpers.power_loss import first_wrong, record
from helpers.processes import SOAK
from helpers.recorded_tiers import open_tiers, state_of

import ckpt

pytestmark = pytest.mark.skipif(why_no_fuse() is not None, reason=why_no_fuse() or "")

STEPS = 9

SAVES = f"""
import sys
from pathlib import Path
from ckpt.storage.base import fsync
from ckpt.storage.local import directory, durable_writer
from ckpt.tiers import background_copier
from helpers.crash_states import leave_out
from helpers.power_loss import acknowledge
from helpers.recorded_tiers import open_tiers, state_of

mount, left_out = sys.argv[1:]
leave_out(left_out, directory, durable_writer, fsync)
promote = background_copier.promote

def promote_and_acknowledge(source, step, *arguments):
    copied = promote(source, step, *arguments)
    acknowledge(mount, f"run-{{step}}")
    return copied

background_copier.promote = promote_and_acknowledge
with open_tiers(Path(mount)) as ck:
    for step in range({STEPS}):
        ck.step(step, state_of(step)).result()
        acknowledge(mount, f"nvme-{{step}}")
        if step == 3:
            ck.wait()
"""
"""The nearer tier deletes older steps while steps are promoted. Step 3 is promoted before the next save."""


def wrong_in_state(found: dict[str, object], step: int) -> str | None:
    """Return a text if a loaded state is not that of a step."""
    expected = state_of(step)
    same = all(np.array_equal(found[name], expected[name]) for name in expected)  # type: ignore[arg-type]
    return None if same else f"step {step} has other values"


def wrong_in_tier(tier: Path, acknowledged: list[int]) -> str | None:
    """Return what is wrong in one tier alone, None if it has its newest acknowledged step, and all its steps can be loaded."""
    newest = max(acknowledged, default=-1)
    try:
        steps = ckpt.open(tier).steps()
    except ckpt.CkptError as error:
        return f"{tier.name} had step {newest}: {error}" if acknowledged else None
    if max(steps, default=-1) < newest:
        return f"{tier.name} had step {newest}, and has only {steps}"
    for step in steps:
        try:
            if wrong := wrong_in_state(ckpt.load(tier, step=step), step):
                return f"{tier.name}: {wrong}"
        except ckpt.CkptError as error:
            return f"step {step} is listed in {tier.name}, and can't be loaded: {error}"
    return None


def wrong_in_tiers(state: CrashState, folder: Path) -> str | None:
    """Return what is wrong in a state, None if no acknowledged step is lost and the next job continues from it."""
    acknowledged: dict[str, list[int]] = {"nvme": [], "run": []}
    for name in state.acknowledged:
        tier, _, step = name.partition("-")
        acknowledged[tier].append(int(step))
    for tier, steps in acknowledged.items():
        if wrong := wrong_in_tier(folder / tier, steps):
            return wrong
    try:
        with open_tiers(folder) as ck:
            found, start = ck.restore(state_of(-1))
            if start <= max(acknowledged["nvme"], default=-1):
                return f"step {acknowledged['nvme'][-1]} was acknowledged, and the job continues with step {start}"
            if start and (wrong := wrong_in_state(found, start - 1)):
                return f"restored: {wrong}"
            ck.step(101, state_of(101)).result()  # type: ignore[union-attr]
        return wrong_in_tier(folder / "nvme", [101]) or wrong_in_tier(folder / "run", [101])
    except ckpt.CkptError as error:
        return f"the next job fails: {type(error).__name__}: {error}"


@pytest.mark.soak
def test_acknowledged_steps_survive_a_power_loss_of_all_tiers_at_any_moment(tmp_path: Path, count_cases: CountCases) -> None:
    amount = (10, 1.0) if SOAK else (1, 0.05)
    assert first_wrong(record(tmp_path, SAVES), wrong_in_tiers, *amount, count_cases=count_cases) is None


@pytest.mark.parametrize("left_out", ["sync_file", "sync_nearest_folder", "make_durable_root", "sync_file in ckpt-promote"])
def test_a_missing_fsync_of_a_tier_is_found(tmp_path: Path, left_out: str) -> None:
    """Else the test above could not fail."""
    assert first_wrong(record(tmp_path, SAVES, left_out), wrong_in_tiers, 1) is not None
