"""Nothing is deleted because of a record that was damaged or missing, or that could not be read."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from helpers.failing_store import FailingStore
from helpers.flipped_bits import flip_bit
from helpers.messages import one_line
from helpers.states import assert_same, state_of
from helpers.tier_folders import TierFolders, close_as_if_failed, tier_folders, train

import ckpt
from ckpt.block_io.replicated_store import bad_files
from ckpt.groups.hello import own_hello
from ckpt.groups.store_rendezvous import RENDEZVOUS_FOLDER, StoreRendezvous
from ckpt.recovery.memory_tier import local
from ckpt.repository.retention import sweep
from ckpt.repository.tiered_repository import TieredRepository
from ckpt.repository.writer_lease import acquire_lease
from ckpt.storage.base.errors import NotFound, StoreError
from ckpt.storage.base.failpoints import set_failpoints
from ckpt.storage.local.directory import LocalStore
from ckpt.storage.remote.fsspec_store import FsspecStore
from ckpt.tiers.freed_memory import remove_freed_commits
from ckpt.tiers.memory_drain import NOT_DRAINED, drain
from ckpt.tools.atomic_destination import atomic_destination

__all__ = ["tier_folders"]


def save_in_memory(tier_folders: TierFolders, steps: range = range(3)) -> None:
    ck = ckpt.Checkpointer(tier_folders.run, every=None, tiers=[ckpt.Tier("memory")], group=None)
    train(ck, steps)
    ck.wait()
    close_as_if_failed(ck)


def damage(path: Path, how: str) -> None:
    if how == "flip_bit":
        flip_bit(path, 20)
    elif how == "truncate":
        path.write_bytes(path.read_bytes()[:20])
    elif how == "missing":
        path.unlink()
    else:  # reading a folder as a file fails for every user
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize("how", ["flip_bit", "truncate", "missing", "unreadable"])
def test_memory_with_a_damaged_tier_note_counts_as_not_drained(tier_folders: TierFolders, how: str) -> None:
    save_in_memory(tier_folders)
    damage(tier_folders.memory / "tier.json", how)
    result = local.drain_folder(Path(os.environ["CKPT_MEMORY"]))
    report = result.text
    assert result.has_failed
    assert NOT_DRAINED in report
    assert "tier.json" in report
    assert_same(ckpt.load(tier_folders.memory, step=2), state_of(2))


@pytest.mark.parametrize("how", ["flip_bit", "truncate"])
def test_memory_with_a_damaged_newest_record_counts_as_not_drained(tier_folders: TierFolders, how: str) -> None:
    save_in_memory(tier_folders)
    damage(tier_folders.memory / "steps/2/commit.json", how)
    assert local.drain_folder(Path(os.environ["CKPT_MEMORY"])).has_failed
    assert (tier_folders.memory / "steps/2").is_dir()


def test_files_of_an_uncommitted_attempt_do_not_replace_an_older_memory(tier_folders: TierFolders) -> None:
    save_in_memory(tier_folders)
    newer = Path(f"{os.environ['CKPT_MEMORY']}-newer")
    unfinished = newer / tier_folders.memory.name / "steps" / "3" / "pack"
    unfinished.mkdir(parents=True)
    (unfinished / "0-9-0.pack").write_bytes(b"x")
    assert "step 2 was brought" in drain(str(newer), os.environ["CKPT_MEMORY"])


def test_a_disk_tier_with_a_damaged_note_is_refused(tier_folders: TierFolders) -> None:
    """Otherwise the `keep` of this job would delete steps of another repository."""
    ck = ckpt.Checkpointer(tier_folders.base / "other", every=100, tiers=[ckpt.Tier(tier_folders.nvme, keep=5)], group=None)
    train(ck, range(3))
    ck.wait()
    close_as_if_failed(ck)
    flip_bit(tier_folders.nvme / "tier.json", 20)
    with pytest.raises(ckpt.InvalidArgument, match=r"tier\.json"):
        ckpt.Checkpointer(tier_folders.run, every=100, tiers=[ckpt.Tier(tier_folders.nvme, keep=1)], group=None)
    assert ckpt.open(tier_folders.nvme).steps() == [0, 1, 2]


def test_a_repository_of_another_run_is_refused_as_a_tier(tier_folders: TierFolders) -> None:
    """It has no note. Otherwise the `keep` of this job would delete its steps."""
    for step in range(3):
        ckpt.save(state_of(step), tier_folders.nvme, step, group=None)
    ckpt.save(state_of(7), tier_folders.run, 7, group=None)
    with pytest.raises(ckpt.InvalidArgument) as error:
        ckpt.Checkpointer(tier_folders.run, every=100, tiers=[ckpt.Tier(tier_folders.nvme, keep=1)], group=None)
    one_line(error, "has steps that may be of another repository than", "use another URL for this tier")
    assert ckpt.open(tier_folders.nvme).steps() == [0, 1, 2]
    assert not (tier_folders.nvme / "tier.json").exists()


def test_a_disk_tier_without_a_note_is_used_if_it_shares_a_step_with_the_repository(tier_folders: TierFolders) -> None:
    tiers = [ckpt.Tier(tier_folders.nvme, keep=5)]
    with ckpt.Checkpointer(tier_folders.run, every=1, tiers=tiers, group=None) as ck:
        train(ck, range(3))
    (tier_folders.nvme / "tier.json").unlink()
    with ckpt.Checkpointer(tier_folders.run, every=1, tiers=tiers, group=None) as ck:
        assert ck.restore(state_of(0))[1] == 3
    assert (tier_folders.nvme / "tier.json").exists()


def test_an_unreadable_step_is_not_taken_for_missing(tier_folders: TierFolders) -> None:
    """Otherwise its copy would count as done, and the memory would be freed."""
    save_in_memory(tier_folders)
    store = FailingStore(LocalStore(tier_folders.memory), "get", 1)
    empty = LocalStore(tier_folders.base / "empty")
    repo = TieredRepository([ckpt.repository.repository.Repository(store), ckpt.repository.repository.Repository(empty)])
    with pytest.raises(StoreError, match="injected"):
        repo.record(2)


@pytest.mark.parametrize("file", ["commit.json", "manifest/*.parquet", "manifest/*.json", "pack/*.pack"])
def test_a_step_whose_only_copy_is_unreadable_is_neither_skipped_nor_deleted(tier_folders: TierFolders, file: str) -> None:
    """The load fails, instead of taking the step for a damaged one. A later job finds it."""
    save_in_memory(tier_folders)
    path = next(tier_folders.memory.glob(f"steps/2/{file}"))
    data = path.read_bytes()
    path.unlink()
    path.symlink_to(path.name)  # each read of a link to itself fails, also for root
    with (
        pytest.raises(StoreError, match=re.escape(str(path))),
        ckpt.Checkpointer(tier_folders.run, every=None, tiers=[ckpt.Tier("memory")], group=None) as ck,
    ):
        ck.restore(state_of(0))
    path.unlink()
    path.write_bytes(data)
    with ckpt.Checkpointer(tier_folders.run, every=None, tiers=[ckpt.Tier("memory")], group=None) as ck:
        state, start = ck.restore(state_of(0))
    assert start == 3
    assert_same(state, state_of(2))


@pytest.mark.parametrize("is_readable_at_the_end", [True, False])
def test_memory_stays_if_it_has_a_newer_step_than_the_job_restored(
    tier_folders: TierFolders, is_readable_at_the_end: bool
) -> None:
    """The job could not read the newest step, and ends without a save. The next job continues from that step."""
    save_in_memory(tier_folders)
    saved = tier_folders.memory / "steps/2"
    record = (saved / "commit.json").read_bytes()
    saved.rename(tier_folders.base / "away")
    with ckpt.Checkpointer(tier_folders.run, every=None, tiers=[ckpt.Tier("memory")], group=None) as ck:
        assert ck.restore(state_of(0))[1] == 2
        (tier_folders.base / "away").rename(saved)
        if not is_readable_at_the_end:
            (saved / "commit.json").unlink()
            (saved / "commit.json").symlink_to("commit.json")
    (saved / "commit.json").unlink()
    (saved / "commit.json").write_bytes(record)
    assert ckpt.open(tier_folders.run).steps() == [1]
    with ckpt.Checkpointer(tier_folders.run, every=None, tiers=[ckpt.Tier("memory")], group=None) as ck:
        state, start = ck.restore(state_of(0))
    assert start == 3
    assert_same(state, state_of(2))
    assert ckpt.open(tier_folders.run).steps() == [1, 2]


def test_memory_stays_while_the_newest_step_of_record_is_damaged(tier_folders: TierFolders) -> None:
    ck = ckpt.Checkpointer(tier_folders.run, every=1, tiers=[ckpt.Tier("memory")], group=None)
    train(ck, range(3))
    ck.wait()
    flip_bit(tier_folders.run / "steps/2/commit.json", 20)
    ck._tiers._free_memory(2)  # type: ignore[union-attr]
    assert ckpt.open(tier_folders.memory).steps()[-1] == 2
    close_as_if_failed(ck)


def test_memory_stays_while_the_newer_step_of_record_lacks_a_pack(tier_folders: TierFolders) -> None:
    """The commit record alone does not prove that the step can be loaded."""
    save_in_memory(tier_folders)
    ckpt.save(state_of(7), tier_folders.run, step=7)
    next(iter(tier_folders.run.glob("steps/7/pack/*.pack"))).unlink()
    local.drain_folder(Path(os.environ["CKPT_MEMORY"]))
    assert_same(ckpt.load(tier_folders.run, step=2), state_of(2))


def test_a_later_save_without_its_packs_does_not_count_as_a_copy(tier_folders: TierFolders) -> None:
    save_in_memory(tier_folders)
    ckpt.save(state_of(5), tier_folders.run, step=2, overwrite=True)
    next(iter(tier_folders.run.glob("steps/2/pack/*.pack"))).unlink()
    result = local.drain_folder(Path(os.environ["CKPT_MEMORY"]))
    report = result.text
    assert result.has_failed
    assert NOT_DRAINED in report
    assert "without" in report
    assert_same(ckpt.load(tier_folders.memory, step=2), state_of(2))


def test_the_only_readable_record_of_a_step_stays_in_memory(tier_folders: TierFolders) -> None:
    """Its packs are in the repository of record, whose own record is damaged."""
    ck = ckpt.Checkpointer(tier_folders.run, every=1, tiers=[ckpt.Tier("memory")], group=None)
    train(ck, range(1))
    ck.wait()
    close_as_if_failed(ck)
    flip_bit(tier_folders.run / "steps/0/commit.json", 20)
    for name in ("pack", "manifest"):
        shutil.rmtree(tier_folders.memory / "steps/0" / name)
    remove_freed_commits(ckpt.open(tier_folders.memory), ckpt.open(tier_folders.run))
    assert (tier_folders.memory / "steps/0/commit.json").exists()


# --- records that are listed and missing ---------------------------------------------------------------------------


class _Forgetful(LocalStore):
    """A store that lists a record and then does not find it, like a cached listing or a stale file handle."""

    def get(self, name: str) -> bytes:
        if name == "steps/0/commit.json":
            raise NotFound(f"{self.url}/{name} does not exist")
        return super().get(name)


def test_a_step_whose_record_is_listed_but_missing_keeps_its_files(tmp_path: Path) -> None:
    ckpt.save(state_of(0), tmp_path, step=0)
    ckpt.save(state_of(1), tmp_path, step=1)
    repo = ckpt.Repository(_Forgetful(tmp_path))
    lease = acquire_lease(repo)
    sweep(repo, lease)
    lease.release()
    assert_same(ckpt.load(tmp_path, step=0), state_of(0))


@pytest.mark.parametrize("cut", ["list", "list_folders"])
def test_a_step_that_one_of_two_listings_lacks_keeps_its_packs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    """An object store or a proxy may answer with an empty page, which ends the listing. Steps 1 and 2 need packs of step 0."""
    with ckpt.Checkpointer(tmp_path, every=1, keep=ckpt.Keep(last=9), group=None) as ck:
        train(ck, range(3))
    (tmp_path / "steps/0/commit.json").unlink()
    repo, complete = ckpt.Repository(LocalStore(tmp_path)), getattr(LocalStore, cut)

    def only_step_0(self: LocalStore, prefix: str = "") -> Any:
        for each in complete(self, prefix):
            step = each if cut == "list_folders" else each.name.split("/")[1]
            if prefix != "steps" or step == "0":
                yield each

    lease = acquire_lease(repo)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, cut, only_step_0)
        sweep(repo, lease)
    lease.release()
    for step in (1, 2):
        assert_same(ckpt.load(tmp_path, step=step), state_of(step))


# --- a folder that a restore replaces -----------------------------------------------------------------------------


def test_a_failed_restore_puts_the_replaced_folder_back(tmp_path: Path) -> None:
    dest = tmp_path / "out"
    dest.mkdir()
    (dest / ".zgroup").write_text("{}")
    (dest / "precious").write_text("old")
    set_failpoints("restore.replace=error")
    try:
        with pytest.raises(ckpt.CkptError), atomic_destination(dest, "zarr", True) as temporary:
            temporary.mkdir()
    finally:
        set_failpoints("")
    assert (dest / "precious").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# --- a copy that was not read ------------------------------------------------------------------------------------


def test_a_damaged_near_copy_stays_while_the_farther_one_is_damaged_elsewhere(tier_folders: TierFolders) -> None:
    """Each copy has blocks that the other does not have."""
    ck = ckpt.Checkpointer(tier_folders.run, every=1, tiers=[ckpt.Tier("memory")], group=None)
    train(ck, range(1))
    ck.wait()
    close_as_if_failed(ck)
    near, far = (next(iter(tier.glob("steps/0/pack/*.pack"))) for tier in (tier_folders.memory, tier_folders.run))
    flip_bit(near, 0)
    flip_bit(far, far.stat().st_size - 4096)
    with ckpt.Checkpointer(tier_folders.run, every=None, tiers=[ckpt.Tier("memory")], group=None) as ck:
        assert_same(ck.restore(state_of(0))[0], state_of(0))
        assert near.exists(), "the near copy was deleted, although the farther one was never read whole"
        assert bad_files(tier_folders.memory.as_uri())
        close_as_if_failed(ck)
    assert_same(
        ckpt.Checkpointer(tier_folders.run, tiers=[ckpt.Tier("memory")], group=None).restore(state_of(0))[0], state_of(0)
    )


# --- listings that leave out unreadable folders --------------------------------------------------------------


class _Closed(LocalFileSystem):  # type: ignore[misc]
    """A file system in which no user can list one folder."""

    protocol = "closed"

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        if path.rstrip("/").endswith("/secret"):
            raise PermissionError(13, "Permission denied", path)
        return super().ls(path, detail=detail, **options)


def test_a_listing_through_fsspec_fails_at_an_unreadable_folder(tmp_path: Path) -> None:
    """The walk of fsspec leaves the folder out: a sweep would delete the packs to which its records refer."""
    (tmp_path / "steps/secret").mkdir(parents=True)
    (tmp_path / "steps/secret/commit.json").write_bytes(b"{}")
    (tmp_path / "steps/seen").mkdir()
    (tmp_path / "steps/seen/a").write_bytes(b"{}")
    fsspec.register_implementation("closed", _Closed, clobber=True)
    store = FsspecStore(f"closed://{tmp_path}")
    with pytest.raises(StoreError, match="Permission denied"):
        list(store.list("steps"))
    shutil.rmtree(tmp_path / "steps/secret")
    assert [entry.name for entry in store.list("steps")] == ["steps/seen/a"]


def test_a_rendezvous_with_a_damaged_record_is_not_deleted(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put(f"{RENDEZVOUS_FOLDER}/other-2-aa/open", own_hello().encode()[:-5])
    store.put(f"{RENDEZVOUS_FOLDER}/left-2-bb/hello-1-cc", own_hello().encode())
    rendezvous = StoreRendezvous.__new__(StoreRendezvous)
    rendezvous._store, rendezvous._own_hello = store, own_hello()
    rendezvous._job_id = type("Job", (), {"is_named": False, "digest": "mine"})()
    rendezvous._remove_stale(f"{RENDEZVOUS_FOLDER}/mine")
    assert set(store.list_folders(RENDEZVOUS_FOLDER)) == {"other-2-aa"}


def test_nodes_with_steps_are_found_without_a_run_log(tmp_path: Path) -> None:
    """An empty run log does not prove that no run needs them."""
    from ckpt.recovery.memory_tier.memory_nodes import nodes_with_steps

    assert nodes_with_steps(tmp_path / "none") == []
    (tmp_path / "7001" / "objects").mkdir(parents=True)
    (tmp_path / "7002" / "objects" / "a").mkdir(parents=True)
    (tmp_path / "7002" / "objects" / "a" / "b").write_bytes(b"x")
    assert nodes_with_steps(tmp_path) == [tmp_path / "7002"]
    (tmp_path / "7003").mkdir()
    (tmp_path / "7003" / "registers.sqlite").write_bytes(b"")
    assert nodes_with_steps(tmp_path) == [tmp_path / "7002", tmp_path / "7003"], "small steps are in registers alone"
