"""The commit of a step by rank 0 of a group, from the parts of all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from helpers.failing_store import failing
from helpers.folders import fast_folder
from helpers.rank_threads import all_well, on_ranks
from helpers.repositories import assert_clean, files

import ckpt
from ckpt.errors import RanksMissing, StepRefused
from ckpt.groups.base import Group
from ckpt.groups.threads import ThreadGroup
from ckpt.repository.attempt import Attempt
from ckpt.repository.group_lease import GroupLease
from ckpt.repository.lease_records import lease_holder
from ckpt.repository.writer_lease import WriterLease
from ckpt.saving import committer as committer_module
from ckpt.saving.failure_reports import noted_failure
from ckpt.storage.base.errors import StoreError
from ckpt.storage.base.store import Buffer, Entry
from ckpt.storage.local.directory import LocalStore


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Yield the folder of a repository that nobody has written."""
    with fast_folder(tmp_path) as folder:
        yield folder / "run"


def shards(rank: int, value: int = 0) -> dict[str, Any]:
    """Return the state of one of two ranks: half of an array each, and a number."""
    return {"w": ckpt.Shard(np.full((2, 5), 10 * value + rank, np.int16), (4, 5), (2 * rank, 0)), "n": value}


def save(root: Any, step: int, groups: list[Group] | None = None, **options: Any) -> list[Any]:
    """Save a step from two ranks, and return what each of them gets."""
    made = {"timeout": 20, **options}
    return on_ranks(2, lambda g: ckpt.save(shards(g.rank, step), root, step, group=g, **made), groups)


def test_the_record_counts_the_leaves_and_bytes_of_all_ranks(root: Path) -> None:
    checkpoints = all_well(save(root, 3, codec="none"))
    commit = checkpoints[0].commit
    assert checkpoints[1].commit == commit == ckpt.open(root)[3].commit
    assert (commit.step, commit.generation, commit.world_size, commit.attempt) == (3, 1, 2, 0)
    assert (commit.leaves, commit.raw_bytes) == (1, 40)
    assert commit.written_bytes == sum(path.stat().st_size for path in root.glob("steps/3/pack/*"))
    assert {file.name.split("/")[-1].split("-")[0] for file in commit.packs} == {"0", "1"}
    assert ckpt.load(root, group=None)["w"].tolist() == [[30] * 5] * 2 + [[31] * 5] * 2


@pytest.mark.parametrize("algorithm", ["xxh3-128", "blake3"])
def test_the_manifest_of_all_ranks_names_format_digest_and_step(root: Path, algorithm: str) -> None:
    commit = all_well(save(root, 3, digest=algorithm))[0].commit
    metadata = pyarrow.parquet.read_schema(root / commit.manifests[0].name).metadata
    assert {key: metadata[key] for key in (b"format", b"digest", b"step")} == {
        b"format": b"1", b"digest": algorithm.encode(), b"step": b"3",
    }  # fmt: skip
    assert [len(str(file.digest)) for file in (*commit.manifests, *commit.trees)] == [64 if algorithm == "blake3" else 32] * 2


def test_each_rank_gets_the_step_as_it_loads_it(root: Path) -> None:
    state = lambda g: {"mine": ckpt.PerRank(g.rank), "w": np.arange(3)}  # noqa: E731
    found = all_well(on_ranks(2, lambda g: ckpt.save(state(g), root, 3, group=g)))
    assert [json.dumps(checkpoint.tree()).count("mine") for checkpoint in found] == [1, 1]
    assert found[0].tree() != found[1].tree()


def test_nothing_is_left_of_the_parts(root: Path) -> None:
    all_well(save(root, 3))
    assert_clean(root)


class _KeepsParts(LocalStore):
    """A directory that deletes no part once `fails` is set."""

    fails = False

    def delete(self, names: Any) -> None:
        names = [*names]
        if self.fails and any("/part/" in name for name in names):
            raise StoreError("the store is busy")
        super().delete(names)


def test_parts_that_can_not_be_deleted_do_not_fail_the_step(root: Path) -> None:
    store = _KeepsParts(root)
    store.fails = True
    all_well(save(store, 3))
    assert len([name for name in files(root) if "/part/" in name]) == 2
    assert ckpt.load(root, group=None, strict=True)["n"] == 3


def test_a_step_of_a_group_is_replaced_with_the_files_of_all_ranks(root: Path) -> None:
    groups = ThreadGroup.make(2)
    all_well(save(root, 3, groups))
    all_well(save(root, 3, groups, overwrite=True))
    assert ckpt.open(root)[3].commit.attempt == 1
    assert ckpt.load(root, group=None, strict=True)["n"] == 3
    assert_clean(root)


def test_counters_that_drift_apart_are_reported(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are compared with the step before, whatever newer steps exist."""
    groups = ThreadGroup.make(2)
    state = lambda g, step, count: {"w": np.arange(3), "count": count}  # noqa: E731
    for step in (1, 2, 9):
        all_well(on_ranks(2, lambda g: ckpt.save(state(g, step, step), root, step, group=g), groups))  # noqa: B023
    all_well(on_ranks(2, lambda g: ckpt.save(state(g, 5, 5 - g.rank), root, 5, group=g), groups))
    (text,) = [record.getMessage() for record in caplog.records if "was the same on all ranks" in record.getMessage()]
    assert text.startswith("step 5: ")
    assert "in step 2 (2)" in text


def test_the_folder_of_a_failed_step_is_no_step_to_compare_with(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    groups = ThreadGroup.make(2)
    state = lambda g, count: {"w": np.arange(3), "count": count}  # noqa: E731
    for step in (1, 2):
        all_well(on_ranks(2, lambda g: ckpt.save(state(g, step), root, step, group=g), groups))  # noqa: B023
    (root / "steps/4/manifest").mkdir(parents=True)
    (root / "steps/4/manifest/0-1-9-failed.json").write_bytes(b"{}")
    all_well(on_ranks(2, lambda g: ckpt.save(state(g, 5 - g.rank), root, 5, group=g), groups))
    (text,) = [record.getMessage() for record in caplog.records if "was the same on all ranks" in record.getMessage()]
    assert "in step 2 (2)" in text


def test_the_first_step_of_a_group_is_compared_with_none(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    all_well(on_ranks(2, lambda g: ckpt.save({"w": np.arange(3), "count": g.rank}, root, 5, group=g)))
    assert "was the same" not in caplog.text


# --- failures ------------------------------------------------------------------------------------------------------


def test_other_ranks_wait_twice_as_long_for_the_commit(root: Path) -> None:
    """Rank 0 waits for the last part, and then needs time for the commit."""
    groups = ThreadGroup.make(2)
    all_well(save(root, 3, groups))
    with pytest.raises(RanksMissing, match=r"rank 0 of 2 has not committed step 4 within 0\.2 s"):
        ckpt.save(shards(1), root, 4, group=groups[1], timeout=0.1)


class _Unlisted(LocalStore):
    """A directory whose parts can't be listed some times after rank 1 has written its own."""

    def __init__(self, root: Path, times: int) -> None:
        super().__init__(root)
        self.times = times
        self.has_part = False

    def put(self, name: str, data: Buffer) -> None:
        super().put(name, data)
        self.has_part = self.has_part or "/part/1-" in name

    def list(self, prefix: str = "") -> Iterator[Entry]:
        if self.has_part and self.times and "/part" in prefix:
            self.times -= 1
            raise StoreError("no answer")
        return super().list(prefix)


def test_a_rank_whose_store_fails_for_a_moment_gets_the_commit(root: Path) -> None:
    """Rank 0 has its part, and commits the step."""
    store = _Unlisted(root, 3)
    found = on_ranks(2, lambda g: ckpt.save(shards(g.rank), store if g.rank else root, 0, group=g, timeout=300))
    first, second = all_well(found)
    assert store.times == 0
    assert second.commit == first.commit


def test_a_rank_whose_store_fails_gets_the_reason_of_rank_0_without_it(root: Path) -> None:
    store = _Unlisted(root, 10**9)
    with failing("save.commit=error"):
        found = on_ranks(2, lambda g: ckpt.save(shards(g.rank), store if g.rank else root, 0, group=g, timeout=300))
    assert isinstance(found[1], StepRefused)
    assert "rank 0 failed: " in str(found[1])


def test_a_rank_whose_store_fails_until_the_timeout_reports_that(root: Path) -> None:
    """It can't find out whether the step is committed, as rank 0 may still need its files."""
    store = _Unlisted(root, 10**9)
    found = on_ranks(2, lambda g: ckpt.save(
        shards(g.rank), store if g.rank else root, 0, group=g, timeout=1 if g.rank else 300
    ))  # fmt: skip
    assert isinstance(found[0], ckpt.Checkpoint)
    assert str(found[1]) == "no answer"
    assert ckpt.load(root, group=None, strict=True)["n"] == 0


def test_rank_0_waits_for_the_others_as_long_as_it_is_allowed(root: Path) -> None:
    groups = ThreadGroup.make(2)
    all_well(save(root, 3, groups))
    with pytest.raises(RanksMissing, match=r"rank 1 of 2 did not write its part of step 4 within 0\.2 s"):
        ckpt.save(shards(0), root, 4, group=groups[0], timeout=0.2)


class _LosesPack(LocalStore):
    """A directory that loses the pack of rank 1 before its part is written."""

    def put(self, name: str, data: Buffer) -> None:
        if "/part/1-" in name:
            self.delete([entry.name for entry in self.list("steps/3/pack") if "/1-" in entry.name])
        super().put(name, data)


@pytest.mark.parametrize("field", ["tree", "packs", "sharers"])
@pytest.mark.parametrize("change", ["lacks it", "has another type"])
def test_parts_of_another_structure_refuse_the_step_on_all_ranks(
    root: Path, monkeypatch: pytest.MonkeyPatch, field: str, change: str
) -> None:
    """The ranks have another version of ckpt than rank 0, or not all the same one."""
    write = committer_module.write_part

    def write_other_part(table: Any, metadata: dict[str, str]) -> bytes:
        others = {key: value for key, value in metadata.items() if key != field}
        return write(table, others if change == "lacks it" else others | {field: "[[3]]"})

    monkeypatch.setattr(committer_module, "write_part", write_other_part)
    outcomes = save(root, 3)
    assert isinstance(outcomes[0], StepRefused), outcomes[0]
    assert "run the same version of ckpt-store on all ranks" in str(outcomes[0])
    assert isinstance(outcomes[1], StepRefused), outcomes[1]
    assert ckpt.open(root).steps() == []


def test_a_pack_that_is_missing_refuses_the_step_on_all_ranks(root: Path) -> None:
    errors = save(_LosesPack(root), 3)
    assert all(isinstance(error, StepRefused) for error in errors)
    assert "step 3 refers to" in str(errors[0])
    assert "which is missing or has another length" in str(errors[0])
    assert str(errors[0]) in str(errors[1])
    assert ckpt.open(root).steps() == []


@pytest.mark.parametrize("point", ["save.manifest", "save.commit"])
def test_a_failure_of_rank_0_before_the_record_fails_the_step_on_all_ranks(root: Path, point: str) -> None:
    groups = ThreadGroup.make(2)
    all_well(save(root, 1, groups))
    with failing(f"{point}=error"):
        errors = save(root, 3, groups)
    assert "injected" in str(errors[0])
    assert isinstance(errors[1], StepRefused)
    assert "step 3 is given up because rank 0 failed: " in str(errors[1])
    all_well(save(root, 4, groups))
    assert ckpt.open(root).steps() == [1, 4]
    left = {name for name in files(root) if name.startswith("steps/3/")}
    assert all(name.startswith(("steps/3/pack/1-", "steps/3/part/")) for name in left), left


def test_a_failure_after_the_record_leaves_the_step_for_the_other_ranks(root: Path) -> None:
    with failing("save.committed=error"):
        errors = save(root, 3)
    assert isinstance(errors[0], StoreError)
    assert isinstance(errors[1], ckpt.Checkpoint)
    assert ckpt.load(root, group=None, strict=True)["n"] == 3


@pytest.mark.parametrize("point", ["save.manifest", "save.commit"])
def test_a_note_names_the_reason_why_rank_0_gave_the_step_up(root: Path, point: str) -> None:
    """They may find it before the file with the reason, as where the store is slow."""
    groups = ThreadGroup.make(2)
    all_well(save(root, 1, groups))
    with failing(f"{point}=error"):
        save(root, 3, groups)
    repo = ckpt.open(root)
    owner = lease_holder(repo, 1)
    assert owner is not None
    lease = GroupLease(WriterLease(repo, 1, owner.token), 1, 2)
    noted = noted_failure(lease, groups[1], Attempt("1-1-1", 1, 1, 3, 0))
    assert str(noted).startswith("step 3 is given up because rank 0 failed: ")


class _LosesReply(LocalStore):
    """A directory that publishes a record and then fails, as if the answer were lost."""

    def publish(self, name: str, data: Buffer, confirm: Callable[[], None], replaces: Any = None) -> None:
        super().publish(name, data, confirm, replaces)
        raise StoreError("no answer")


def test_a_step_whose_reply_was_lost_is_not_reported_as_failed(root: Path) -> None:
    store = _LosesReply(root)
    found = on_ranks(2, lambda g: ckpt.save(shards(g.rank, 3), root if g.rank else store, 3, group=g, timeout=20))
    assert isinstance(found[0], StoreError)
    assert isinstance(found[1], ckpt.Checkpoint)
    assert not [name for name in files(root) if name.endswith("-failed.json")]


class _Silent(LocalStore):
    """A directory that stops to answer once rank 0 has published its record, in part or not."""

    is_silent = False
    takes_effect: bool

    def publish(self, name: str, data: Buffer, confirm: Callable[[], None], replaces: Any = None) -> None:
        if self.takes_effect:
            super().publish(name, data, confirm, replaces)
        self.is_silent = True
        raise StoreError("no answer")

    def get_up_to(self, name: str, limit: int) -> bytes:
        if self.is_silent and name.endswith("commit.json"):
            raise StoreError("no answer")
        return super().get_up_to(name, limit)


def test_other_ranks_are_not_misled_where_rank_0_can_not_know_the_outcome(root: Path) -> None:
    """Each rank has its own connection: rank 1 sees the record that rank 0 can't see."""
    silent = _Silent(root)
    silent.takes_effect = True
    found = on_ranks(2, lambda g: ckpt.save(shards(g.rank, 3), root if g.rank else silent, 3, group=g, timeout=20))
    assert isinstance(found[0], StoreError)
    assert isinstance(found[1], ckpt.Checkpoint)
    assert ckpt.load(root, group=None, strict=True)["n"] == 3


def test_rank_0_reports_that_it_can_not_know_the_outcome(root: Path) -> None:
    silent = _Silent(root)
    silent.takes_effect = False
    found = on_ranks(2, lambda g: ckpt.save(shards(g.rank, 3), root if g.rank else silent, 3, group=g, timeout=20))
    assert isinstance(found[0], StoreError)
    assert isinstance(found[1], StepRefused)
    assert "rank 0 failed in the commit of step 3 of" in str(found[1])
    assert "the step may exist: no answer" in str(found[1])
    packs = {path.name.split("-")[0] for path in (root / "steps/3/pack").glob("*.pack")}
    assert packs == {"0", "1"}, "the record may still take effect"
