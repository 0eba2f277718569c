"""Steps and files that an administrator moved to another disk, behind symbolic links."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

import ckpt
from ckpt.storage.base.errors import NotFound, StoreError
from ckpt.storage.local.directory import LocalStore
from ckpt.storage.member.device import Device, DeviceStore

FROZEN = np.arange(300_000.0)


def state_of(step: int) -> dict[str, np.ndarray]:
    return {"frozen": FROZEN, "trained": np.full(1000, step)}


def assert_is_state_of(step: int, run: Path) -> None:
    state = ckpt.load(run, step=step)
    assert state["trained"].tolist() == [step] * 1000
    assert np.array_equal(state["frozen"], FROZEN)


def move_behind_link(path: Path, disk: Path) -> Path:
    disk.mkdir(exist_ok=True)
    target = disk / path.name
    shutil.move(path, target)
    path.symlink_to(target)
    return target


def save_three_steps(run: Path) -> None:
    """The steps 1 and 2 refer to blocks in the packs of step 0."""
    with ckpt.Checkpointer(run, every=1, keep=ckpt.Keep(last=9)) as ck:
        for step in range(3):
            ck.save(step, state_of(step)).result()


def test_a_step_behind_a_link_keeps_its_packs_and_those_it_refers_to(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_three_steps(run)
    for step in (0, 1):
        move_behind_link(run / f"steps/{step}", tmp_path / "disk")
    with ckpt.Checkpointer(run, every=1, keep=ckpt.Keep(last=9)) as ck:
        ck.save(3, state_of(3)).result()
    assert ckpt.open(run).steps() == [0, 1, 2, 3]
    for step in range(4):
        assert_is_state_of(step, run)


def test_an_expired_step_behind_a_link_is_deleted_without_the_packs_of_others(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_three_steps(run)
    move_behind_link(run / "steps/1", tmp_path / "disk")
    with ckpt.Checkpointer(run, every=1, keep=2) as ck:
        ck.save(3, state_of(3)).result()
    assert ckpt.open(run).steps() == [2, 3]
    assert not [path for path in (tmp_path / "disk").rglob("*") if path.is_file()]
    for step in (2, 3):
        assert_is_state_of(step, run)


@pytest.mark.parametrize("moved", ["steps/1", "steps/1/commit.json"])
def test_nothing_is_deleted_while_the_disk_behind_a_link_is_not_mounted(
    tmp_path: Path, moved: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Step 1 is the only one that still refers to a pack of step 0. Its disk comes back after the sweep."""
    run = tmp_path / "run"
    save_three_steps(run)
    for step in (0, 2):  # now only step 1 refers to the packs of step 0
        (run / f"steps/{step}/commit.json").unlink()
    target = move_behind_link(run / moved, tmp_path / "disk")
    away = target.rename(tmp_path / "away")
    with caplog.at_level(logging.WARNING), ckpt.Checkpointer(run, every=1, keep=1, scrub=None) as ck:
        for step in (3, 4):
            ck.save(step, state_of(step)).result()
    assert f"{run / moved} is a symbolic link" in caplog.text
    away.rename(target)
    assert_is_state_of(1, run)
    assert_is_state_of(4, run)


def test_the_newest_step_whose_disk_is_not_mounted_is_not_skipped(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_three_steps(run)
    away = move_behind_link(run / "steps/2", tmp_path / "disk").rename(tmp_path / "away")
    with pytest.raises(StoreError, match="steps/2 is a symbolic link to .* mount its disk"):
        ckpt.load(run)
    away.rename(tmp_path / "disk/2")
    assert ckpt.load(run)["trained"][0] == 2


def test_a_listing_has_the_files_that_can_be_opened(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    store.put("a/x", b"12")
    move_behind_link(tmp_path / "store/a/x", tmp_path / "cache")  # as DVC and git-annex do
    store.put("b/y", b"345")
    move_behind_link(tmp_path / "store/b", tmp_path / "disk")
    assert sorted((entry.name, entry.nbytes) for entry in store.list()) == [("a/x", 2), ("b/y", 3)]
    assert sorted(store.list_folders()) == ["a", "b"]
    assert store.get("a/x") + store.get("b/y") == b"12345"


def test_a_file_behind_a_link_to_nothing_is_not_missing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    store.put("a/x", b"1")
    move_behind_link(tmp_path / "store/a", tmp_path / "disk").rename(tmp_path / "away")
    for read in (store.get, store.exists, store.open):
        with pytest.raises(StoreError, match="store/a is a symbolic link to .*disk/a, which does not exist") as raised:
            read("a/x")
        assert not isinstance(raised.value, NotFound)
    with pytest.raises(NotFound):
        store.get("b/x")
    with pytest.raises(StoreError, match="symbolic link"):
        list(store.list())
    assert list(store.list_folders()) == ["a"]


def test_a_member_lists_no_link_because_it_opens_none(tmp_path: Path) -> None:
    store = DeviceStore(tmp_path / "member")
    store.put("a/x", b"1")
    move_behind_link(tmp_path / "member/a", tmp_path / "disk")
    assert list(store.list()) == []
    assert list(store.list_folders()) == []
    with pytest.raises(StoreError, match="leads through a symbolic link"):
        store.get("a/x")


def test_a_link_through_a_file_ends_no_listing_early(tmp_path: Path) -> None:
    """Such a link leads to a folder that is now a file. Its entry may come before those of other steps."""
    store = LocalStore(tmp_path / "store")
    for step in range(8):
        store.put(f"steps/{step}/x", b"1")
    (tmp_path / "disk").write_bytes(b"")
    (tmp_path / "store/steps/3b").symlink_to(tmp_path / "disk/3b")
    with pytest.raises(StoreError, match="steps/3b is a symbolic link to .*disk/3b, which does not exist"):
        list(store.list("steps"))
    with pytest.raises(StoreError, match="symbolic link") as raised:
        store.get("steps/3b/x")
    assert not isinstance(raised.value, NotFound)
    with pytest.raises(NotFound):
        store.get("steps/0/x/y")


@pytest.mark.parametrize("listed", ["steps", "steps/1"])
def test_a_folder_behind_a_link_to_nothing_is_not_empty(tmp_path: Path, listed: str) -> None:
    store = LocalStore(tmp_path / "store")
    store.put("steps/1/x", b"1")
    move_behind_link(tmp_path / "store/steps", tmp_path / "disk").rename(tmp_path / "away")
    for listing in (store.list, store.list_folders):
        with pytest.raises(StoreError, match="store/steps is a symbolic link to .*disk/steps, which does not exist") as raised:
            list(listing(listed))
        assert not isinstance(raised.value, NotFound)
    assert [*store.list("lines"), *store.list_folders("lines")] == []


def test_a_run_whose_steps_are_not_mounted_is_not_new(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_three_steps(run)
    away = move_behind_link(run / "steps", tmp_path / "disk").rename(tmp_path / "away")
    with pytest.raises(StoreError, match="steps is a symbolic link to .* mount its disk") as raised:
        ckpt.load(run)
    assert not isinstance(raised.value, NotFound)
    away.rename(tmp_path / "disk/steps")
    assert_is_state_of(2, run)


def test_a_run_behind_a_link_to_nothing_is_not_new(tmp_path: Path) -> None:
    save_three_steps(tmp_path / "run")
    away = move_behind_link(tmp_path / "run", tmp_path / "disk").rename(tmp_path / "away")
    with pytest.raises(StoreError, match="run is a symbolic link to .* mount its disk") as raised:
        ckpt.load(tmp_path / "run")
    assert not isinstance(raised.value, NotFound)
    with pytest.raises(StoreError, match="run is a symbolic link to"), ckpt.Checkpointer(tmp_path / "run", every=1) as ck:
        ck.restore(state_of(0))
    away.rename(tmp_path / "disk/run")
    assert_is_state_of(2, tmp_path / "run")


def test_a_member_whose_objects_are_not_mounted_is_not_empty(tmp_path: Path) -> None:
    """The folder of its objects may itself be a link to a larger disk."""
    Device(tmp_path / "member").store.put("a/x", b"1")
    target = move_behind_link(tmp_path / "member/objects", tmp_path / "disk")
    device = Device(tmp_path / "member")
    assert list(device.inventory()) == ["a/x"]
    target.rename(tmp_path / "away")
    for read in (device.inventory, device.usage, lambda: device.store.exists("a/x")):
        with pytest.raises(StoreError, match="objects is a symbolic link to .*, which does not exist"):
            read()
