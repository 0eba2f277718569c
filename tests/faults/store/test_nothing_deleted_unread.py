"""Nothing is deleted because of a record that was damaged, missing, or could not be read."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from helpers.failing_store import FailingStore
from helpers.states import assert_same, state_of
from helpers.tier_places import Places, flip, leave, places, train

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
from ckpt.tiers.manager import NOT_DRAINED, _remove_freed_commits, drain
from ckpt.tools.restore import _atomic_destination

__all__ = ["places"]


def saved_in_memory(places: Places, steps: range = range(3)) -> None:
    ck = ckpt.Checkpointer(places.run, every=None, tiers=[ckpt.Tier("memory")], group=None)
    train(ck, steps)
    ck.wait()
    leave(ck)


def damage(path: Path, how: str) -> None:
    if how == "flip":
        flip(path, 20)
    elif how == "truncate":
        path.write_bytes(path.read_bytes()[:20])
    elif how == "missing":
        path.unlink()
    else:  # reading it fails, whoever reads: a folder in its place
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize("how", ["flip", "truncate", "missing", "unreadable"])
def test_memory_whose_note_is_damaged_counts_as_not_drained(places: Places, how: str) -> None:
    saved_in_memory(places)
    damage(places.memory / "tier.json", how)
    said = local.drain_folder(Path(os.environ["CKPT_MEMORY"]))
    assert NOT_DRAINED in said
    assert "tier.json" in said
    assert_same(ckpt.load(places.memory, step=2), state_of(2))


@pytest.mark.parametrize("how", ["flip", "truncate"])
def test_memory_whose_newest_record_is_damaged_counts_as_not_drained(places: Places, how: str) -> None:
    saved_in_memory(places)
    damage(places.memory / "steps/2/commit.json", how)
    assert NOT_DRAINED in local.drain_folder(Path(os.environ["CKPT_MEMORY"]))
    assert (places.memory / "steps/2").is_dir()


def test_files_of_an_attempt_that_never_committed_do_not_replace_an_older_memory(places: Places) -> None:
    saved_in_memory(places)
    newer = Path(f"{os.environ['CKPT_MEMORY']}-newer")
    unfinished = newer / places.memory.name / "steps" / "3" / "pack"
    unfinished.mkdir(parents=True)
    (unfinished / "0-9-0.pack").write_bytes(b"x")
    assert "step 2 was brought" in drain(str(newer), os.environ["CKPT_MEMORY"])


def test_a_tier_on_disk_with_a_damaged_note_is_taken_only_with_proof(places: Places) -> None:
    """Else the `keep` of this job would delete steps of another repository."""
    ck = ckpt.Checkpointer(places.base / "other", every=100, tiers=[ckpt.Tier(places.nvme, keep=5)], group=None)
    train(ck, range(3))
    ck.wait()
    leave(ck)
    flip(places.nvme / "tier.json", 20)
    with pytest.raises(ckpt.InvalidArgument, match=r"tier\.json"):
        ckpt.Checkpointer(places.run, every=100, tiers=[ckpt.Tier(places.nvme, keep=1)], group=None)
    assert ckpt.open(places.nvme).steps() == [0, 1, 2]


def test_a_step_that_could_not_be_read_is_not_taken_for_missing(places: Places) -> None:
    """Else its copy would count as done, and the memory would be given free."""
    saved_in_memory(places)
    store = FailingStore(LocalStore(places.memory), "get", 1)
    empty = LocalStore(places.base / "empty")
    repo = TieredRepository([ckpt.repository.repository.Repository(store), ckpt.repository.repository.Repository(empty)])
    with pytest.raises(StoreError, match="injected"):
        repo.record(2)


def test_memory_stays_where_the_repository_of_record_lost_the_newest_step(places: Places) -> None:
    ck = ckpt.Checkpointer(places.run, every=1, tiers=[ckpt.Tier("memory")], group=None)
    train(ck, range(3))
    ck.wait()
    flip(places.run / "steps/2/commit.json", 20)
    ck._tiers._free_memory(2)  # type: ignore[union-attr]
    assert ckpt.open(places.memory).steps()[-1] == 2
    leave(ck)


def test_memory_stays_where_the_newer_step_of_record_lacks_a_pack(places: Places) -> None:
    """Its record alone does not prove that it can be loaded."""
    saved_in_memory(places)
    ckpt.save(state_of(7), places.run, step=7)
    next(iter(places.run.glob("steps/7/pack/*.pack"))).unlink()
    local.drain_folder(Path(os.environ["CKPT_MEMORY"]))
    assert_same(ckpt.load(places.run, step=2), state_of(2))


def test_a_later_save_without_its_packs_does_not_count_as_a_copy(places: Places) -> None:
    saved_in_memory(places)
    ckpt.save(state_of(5), places.run, step=2, overwrite=True)
    next(iter(places.run.glob("steps/2/pack/*.pack"))).unlink()
    said = local.drain_folder(Path(os.environ["CKPT_MEMORY"]))
    assert NOT_DRAINED in said
    assert "without" in said
    assert_same(ckpt.load(places.memory, step=2), state_of(2))


def test_the_only_readable_record_of_a_step_stays_in_memory(places: Places) -> None:
    """Its packs are in the repository of record, whose own record is damaged."""
    ck = ckpt.Checkpointer(places.run, every=1, tiers=[ckpt.Tier("memory")], group=None)
    train(ck, range(1))
    ck.wait()
    leave(ck)
    flip(places.run / "steps/0/commit.json", 20)
    for name in ("pack", "manifest"):
        shutil.rmtree(places.memory / "steps/0" / name)
    _remove_freed_commits(ckpt.open(places.memory), ckpt.open(places.run))
    assert (places.memory / "steps/0/commit.json").exists()


# --- what is listed and then not found ---------------------------------------------------------------------------


class _Forgetful(LocalStore):
    """A store that lists a record and then does not find it, as behind a cached listing or a file handle that is stale."""

    def get(self, name: str) -> bytes:
        if name == "steps/0/commit.json":
            raise NotFound(f"{self.url}/{name} does not exist")
        return super().get(name)


def test_a_step_whose_record_is_listed_and_not_found_keeps_its_files(tmp_path: Path) -> None:
    ckpt.save(state_of(0), tmp_path, step=0)
    ckpt.save(state_of(1), tmp_path, step=1)
    repo = ckpt.Repository(_Forgetful(tmp_path))
    mine = acquire_lease(repo)
    sweep(repo, mine)
    mine.release()
    assert_same(ckpt.load(tmp_path, step=0), state_of(0))


# --- a folder that is to be replaced -----------------------------------------------------------------------------


def test_the_folder_that_a_restore_replaces_comes_back_where_it_fails(tmp_path: Path) -> None:
    dest = tmp_path / "out"
    dest.mkdir()
    (dest / ".zgroup").write_text("{}")
    (dest / "precious").write_text("old")
    set_failpoints("restore.replace=error")
    try:
        with pytest.raises(ckpt.CkptError), _atomic_destination(dest, "zarr", True) as temporary:
            temporary.mkdir()
    finally:
        set_failpoints("")
    assert (dest / "precious").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# --- a copy that was not read ------------------------------------------------------------------------------------


def test_a_bad_near_copy_stays_where_the_further_one_is_rotten_elsewhere(places: Places) -> None:
    """Each copy has blocks that the other has not."""
    ck = ckpt.Checkpointer(places.run, every=1, tiers=[ckpt.Tier("memory")], group=None)
    train(ck, range(1))
    ck.wait()
    leave(ck)
    near, far = (next(iter(place.glob("steps/0/pack/*.pack"))) for place in (places.memory, places.run))
    flip(near, 0)
    flip(far, far.stat().st_size - 4096)
    with ckpt.Checkpointer(places.run, every=None, tiers=[ckpt.Tier("memory")], group=None) as ck:
        assert_same(ck.restore(state_of(0))[0], state_of(0))
        assert near.exists(), "the further copy was never read as a whole"
        assert bad_files(places.memory.as_uri())
        leave(ck)
    assert_same(ckpt.Checkpointer(places.run, tiers=[ckpt.Tier("memory")], group=None).restore(state_of(0))[0], state_of(0))


# --- listings that leave out what could not be read --------------------------------------------------------------


class _Closed(LocalFileSystem):  # type: ignore[misc]
    """A file system in which one folder can't be listed, whoever asks."""

    protocol = "closed"

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        if path.rstrip("/").endswith("/secret"):
            raise PermissionError(13, "Permission denied", path)
        return super().ls(path, detail=detail, **options)


def test_a_listing_through_fsspec_fails_where_a_folder_cannot_be_read(tmp_path: Path) -> None:
    """fsspec's own walk leaves it out: a sweep would delete the packs that the records in there refer to."""
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


def test_a_meeting_whose_record_is_damaged_is_left_alone(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put(f"{RENDEZVOUS_FOLDER}/other-2-aa/open", own_hello().encode()[:-5])
    store.put(f"{RENDEZVOUS_FOLDER}/left-2-bb/hello-1-cc", own_hello().encode())
    meeting = StoreRendezvous.__new__(StoreRendezvous)
    meeting._store, meeting._own_hello = store, own_hello()
    meeting._job_id = type("Job", (), {"is_named": False, "digest": "mine"})()
    meeting._remove_stale(f"{RENDEZVOUS_FOLDER}/mine")
    assert set(store.list_folders(RENDEZVOUS_FOLDER)) == {"other-2-aa"}


def test_nodes_that_hold_steps_are_found(tmp_path: Path) -> None:
    """An empty log of the run does not prove that nobody needs them."""
    from ckpt.recovery.memory_tier.memory_nodes import nodes_with_objects

    assert nodes_with_objects(tmp_path / "none") == []
    (tmp_path / "7001" / "objects").mkdir(parents=True)
    (tmp_path / "7002" / "objects" / "a").mkdir(parents=True)
    (tmp_path / "7002" / "objects" / "a" / "b").write_bytes(b"x")
    assert nodes_with_objects(tmp_path) == [tmp_path / "7002"]
