"""Damage in a tier: the good copy of another tier is read, and damaged files are not copied."""

from __future__ import annotations

import shutil
import warnings

import pytest
from helpers.flipped_bits import flip_bit, put_on_bad_sector
from helpers.repositories import assert_all_load
from helpers.states import assert_same, state_of
from helpers.tier_folders import TierFolders, close_as_if_failed, saved_everywhere, switch_memory_folder, train
from helpers.tier_folders import tier_folders as tier_folders

import ckpt
from ckpt.format import json_records
from ckpt.storage.base.errors import StoreError
from ckpt.storage.base.store import ALIGNMENT


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pack", "manifest/*.parquet", "manifest/*.json", "commit"])
@pytest.mark.parametrize("which", ["memory", "nvme", "run", "memory nvme", "nvme run"])
def test_a_flipped_byte_in_a_tier_is_avoided_and_its_copy_removed(
    tier_folders: TierFolders, which: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The step is loaded from the next tier, and the damaged copy is not used again."""
    saved_everywhere(tier_folders)
    pattern = {"pack": "steps/*/pack/*.pack", "commit": "steps/7/commit.json"}.get(kind, f"steps/7/{kind}")
    for name in which.split():
        for path in getattr(tier_folders, name).glob(pattern):
            flip_bit(path)
    for again in (False, True):
        caplog.clear()
        with warnings.catch_warnings(record=True) as raised, tier_folders.open() as ck:
            warnings.simplefilter("always")
            state, start = ck.restore(state_of(0))
            assert start == 8
            assert_same(state, state_of(7))
            found = not again and which.startswith("memory")
            assert ("bad copy in the tier" in caplog.text) == (found or kind == "commit")
            assert any("is removed" in str(each.message) for each in raised) == (found and kind != "commit")
            close_as_if_failed(ck)
    with tier_folders.open() as ck:
        train(ck, range(8, 10))
        ck.wait()
        assert_same(ckpt.load(tier_folders.memory, step=9), state_of(9))
        assert_same(ckpt.load(tier_folders.nvme, step=9), state_of(9))
        close_as_if_failed(ck)


@pytest.mark.parametrize("which", ["memory", "nvme", "run", "memory nvme", "nvme run"])
def test_a_commit_record_on_a_bad_sector_is_avoided_and_replaced(tier_folders: TierFolders, which: str) -> None:
    """The step is loaded from the next tier, and the next save of that number is copied to the tier."""
    saved_everywhere(tier_folders)
    for name in which.split():
        put_on_bad_sector(getattr(tier_folders, name) / "steps" / "7" / "commit.json")
    with tier_folders.open() as ck:
        state, start = ck.restore(state_of(0))
        assert start == 8
        assert_same(state, state_of(7))
        ck.save(7, state_of(70))
        ck.wait()
        close_as_if_failed(ck)
    for tier in tier_folders.all():
        assert_same(ckpt.load(tier, step=7), state_of(70))


@pytest.mark.parametrize("kind", ["flipped bytes", "bad sectors"])
def test_damage_of_the_small_files_of_a_tier_does_no_harm(tier_folders: TierFolders, kind: str) -> None:
    """The steps of a near tier do not depend on these files."""
    saved_everywhere(tier_folders)
    for tier in (tier_folders.memory, tier_folders.nvme):
        for name in ("ckpt.json", "tier.json", "generations/*.json"):
            for path in tier.glob(name):
                if kind == "flipped bytes":
                    flip_bit(path, 20)
                else:
                    put_on_bad_sector(path)
    with tier_folders.open() as ck:
        state, start = ck.restore(state_of(0))
        assert start == 8
        assert_same(state, state_of(7))
        train(ck, range(8, 10))
    tier_folders.check()


@pytest.mark.parametrize("reason", ["unreadable", "newer version"])
def test_a_job_does_not_begin_while_the_note_of_an_earlier_memory_cannot_be_read(
    tier_folders: TierFolders, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """Without this memory, the job would continue from an older step, and abandon the newest one."""
    ck = tier_folders.open(every=100)
    train(ck, range(6))
    close_as_if_failed(ck)
    note = tier_folders.memory / "tier.json"
    content = note.read_bytes()
    switch_memory_folder(tier_folders, monkeypatch)
    shutil.rmtree(tier_folders.nvme / "steps")
    note.unlink()
    if reason == "unreadable":
        note.symlink_to(note)  # a read fails with ELOOP, which says nothing about the bytes
    else:
        body = json_records.decode("tier", content, "the note")
        with monkeypatch.context() as newer:
            newer.setattr(json_records, "FORMAT_VERSION", json_records.FORMAT_VERSION + 1)
            note.write_bytes(json_records.encode("tier", body))
    with pytest.raises((StoreError, ckpt.FormatError), match="tier.json"):
        tier_folders.open(every=100)
    note.unlink()
    note.write_bytes(content)
    with tier_folders.open(every=100) as ck:
        assert ck.restore(state_of(0))[1] == 6


def test_rot_at_the_same_position_in_all_tiers_falls_back(tier_folders: TierFolders) -> None:
    saved_everywhere(tier_folders)
    for tier in tier_folders.all():
        for path in tier.glob("steps/7/pack/*.pack"):
            flip_bit(path, 0)
    with tier_folders.open() as ck:
        with pytest.warns(UserWarning, match="so the older step 3 was loaded"):
            state, start = ck.restore(state_of(0))
        assert start == 4
        assert_same(state, state_of(3))
        with pytest.raises(ckpt.IntegrityError):
            ck.restore(state_of(0), step=7)
        train(ck, range(4, 8))  # the same blocks bit for bit: they are written again
    assert_all_load(tier_folders.run, 7)


def test_each_block_comes_from_a_good_copy(tier_folders: TierFolders) -> None:
    """No tier has a whole step any more, but together they have all blocks."""
    saved_everywhere(tier_folders)
    packs = [sorted(tier.glob("steps/7/pack/*.pack")) for tier in tier_folders.all()]
    size = packs[0][0].stat().st_size
    for number, (path,) in enumerate(packs):
        flip_bit(path, (0, ALIGNMENT, size - ALIGNMENT)[number])
    with tier_folders.open() as ck:
        assert_same(ck.restore(state_of(0))[0], state_of(7))
        close_as_if_failed(ck)


def test_rot_is_not_promoted(tier_folders: TierFolders, caplog: pytest.LogCaptureFixture) -> None:
    ck = ckpt.Checkpointer(tier_folders.run, every=100, tiers=[ckpt.Tier("memory")], group=None)
    train(ck, range(3))
    ck.wait()
    close_as_if_failed(ck)
    for path in tier_folders.memory.glob("steps/2/pack/*.pack"):
        flip_bit(path)
    ck = ckpt.Checkpointer(tier_folders.run, every=100, tiers=[ckpt.Tier("memory")], group=None)
    with pytest.raises(ckpt.SaveFailed, match="is damaged"):
        ck.close()
    assert ckpt.open(tier_folders.run).steps() == []
    assert "could not be promoted" in caplog.text
    with ckpt.Checkpointer(tier_folders.run, every=100, tiers=[ckpt.Tier("memory")], group=None) as ck:
        assert ck.restore(state_of(0))[1] == 2
        train(ck, range(2, 4))
    assert_all_load(tier_folders.run, 3)


def test_a_damaged_pack_in_the_repository_of_record_is_replaced(tier_folders: TierFolders) -> None:
    """A load found the damage; the next step that needs the block writes it again."""
    saved_everywhere(tier_folders)
    for tier in (tier_folders.memory, tier_folders.nvme):
        shutil.rmtree(tier)
    bad = [*tier_folders.run.glob("steps/*/pack/*.pack")]
    for path in bad:
        flip_bit(path, 0)
    with pytest.raises(ckpt.IntegrityError):
        ckpt.load(tier_folders.run)
    with tier_folders.open() as ck:
        train(ck, range(8, 9))
    assert_same(ckpt.load(tier_folders.run, step=8), state_of(8))
