"""Differences in tiers: a step is copied with its bases, and each of both blocks is read from the nearest good copy."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.drifting_states import assert_drifting_steps_load, base_of_weights, drifting_state, pack_step, weight_row
from helpers.flipped_bits import flip_bit
from helpers.states import assert_same
from helpers.tier_folders import TierFolders, close_as_if_failed
from helpers.tier_folders import tier_folders as tier_folders

import ckpt
from ckpt.block_io import replicated_store
from ckpt.repository import damage_registry


@pytest.fixture(autouse=True)
def _forget_damage() -> Iterator[None]:
    """Clear the damage that this process has recorded."""
    yield
    replicated_store._bad_blocks.clear()
    damage_registry._damaged.clear()


def save(tier_folders: TierFolders, steps: range, every: int = 1) -> None:
    """Save drifting states to the near tiers, and copy each that is due before the next."""
    ck = tier_folders.open(every=every, full_every=100, keep=1)
    for step in steps:
        ck.step(step, drifting_state(step))
        ck.wait()
    close_as_if_failed(ck)


def test_a_step_is_promoted_with_a_base_that_the_further_tier_never_had(tier_folders: TierFolders) -> None:
    """The base belongs to a step that was not due in the further tiers."""
    save(tier_folders, range(1, 4), every=3)
    (step,) = ckpt.open(tier_folders.run).steps()
    assert step > 1
    assert pack_step(base_of_weights(tier_folders.run, step).pack) == 1
    for tier in tier_folders.all():
        assert_drifting_steps_load(tier)


@pytest.mark.parametrize("which", ["base", "difference"])
def test_each_of_both_blocks_is_read_from_the_nearest_good_copy(tier_folders: TierFolders, which: str) -> None:
    save(tier_folders, range(1, 4))
    row, base = weight_row(tier_folders.memory, 3), base_of_weights(tier_folders.memory, 3)
    pack, position = (base.pack, base.position) if which == "base" else (row.pack or "", row.position)
    flip_bit(tier_folders.memory / pack, position + 5000)
    with tier_folders.open(full_every=100) as ck:
        with pytest.warns(UserWarning, match="is removed"):
            state, start = ck.restore(drifting_state(0))
        assert start == 4
        assert_same(state, drifting_state(3))
        assert replicated_store.bad_files(ckpt.open(tier_folders.run).url) == set()
        assert not (tier_folders.memory / pack).exists(), "the bad copy is kept although a further tier has a good one"
        close_as_if_failed(ck)


def test_a_base_that_only_the_further_tiers_have_is_read_from_there(tier_folders: TierFolders) -> None:
    save(tier_folders, range(1, 4))
    (tier_folders.memory / base_of_weights(tier_folders.memory, 3).pack).unlink()
    with tier_folders.open(full_every=100) as ck:
        state, start = ck.restore(drifting_state(0))
        assert start == 4
        assert_same(state, drifting_state(3))
        ck.step(4, drifting_state(4))
        ck.wait()
    assert_drifting_steps_load(tier_folders.run, 4)


def test_a_damaged_base_is_not_copied(tier_folders: TierFolders, caplog: pytest.LogCaptureFixture) -> None:
    """The base is damaged in the only tier that has it: no step that needs it is promoted."""
    ck = tier_folders.open(every=8, full_every=100, keep=1, tiers=[ckpt.Tier("memory", keep=2)])
    for step in (1, 2, 3):
        ck.step(step, drifting_state(step))
    ck.wait()
    base = base_of_weights(tier_folders.memory, 3)
    flip_bit(tier_folders.memory / base.pack, base.position + 5000)
    close_as_if_failed(ck)
    ck = tier_folders.open(every=8, full_every=100, keep=1, tiers=[ckpt.Tier("memory", keep=2)])
    with pytest.raises(ckpt.CkptError):
        ck.close()
    assert not list((tier_folders.run / "steps").glob("*/commit.json"))
    assert base.pack in caplog.text


def test_a_near_tier_continues_differences_after_its_folder_was_lost(tier_folders: TierFolders) -> None:
    save(tier_folders, range(1, 4))
    shutil.rmtree(tier_folders.memory)
    with tier_folders.open(every=1, full_every=100) as ck:
        assert_same(ck.restore(drifting_state(0))[0], drifting_state(3))
        for step in (4, 5):
            ck.step(step, drifting_state(step))
            ck.wait()
        for tier in (tier_folders.memory, tier_folders.run):
            assert_drifting_steps_load(tier, 5)
    assert_drifting_steps_load(tier_folders.run, 5)


def test_a_copied_repository_has_its_bases(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        ckpt.save(drifting_state(step), tmp_path / "run", step, keep=1, full_every=10)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert assert_drifting_steps_load(tmp_path / "copy") == [3]
