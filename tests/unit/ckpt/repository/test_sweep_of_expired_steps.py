"""The sweep of expired steps: which steps count, and what an invalid record protects."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.lease_writers import Events, eventful_store
from helpers.swept_repositories import events, files, files_of, lease, messages, repo
from helpers.written_steps import FIRST_LINE, attempt_files, commit_of, put_attempt, put_step

from ckpt.format.json_records import StepFile, encode_commit
from ckpt.format.signature import as_keys
from ckpt.format.training_lines import TrainingLine
from ckpt.repository.file_names import commit_name
from ckpt.repository.repository import Repository
from ckpt.repository.retention import Keep, has_all_files, sweep
from ckpt.repository.writer_lease import WriterLease, acquire_lease
from ckpt.storage.base.conditional_store import new_reservation
from ckpt.storage.base.errors import StoreError
from ckpt.storage.base.store import Store

__all__ = ["events", "lease", "repo"]


# --- expired steps -------------------------------------------------------------------------------------------------


def test_without_a_rule_no_step_is_deleted(repo: Repository, lease: WriterLease) -> None:
    for step in (1, 2, 3):
        put_step(repo.store, step)
    sweep(repo, lease)
    assert files(repo) == files_of(1, 2, 3)


def test_expired_steps_are_deleted_with_their_files(repo: Repository, lease: WriterLease) -> None:
    for step in (1, 2, 3, 4, 5, 6):
        put_step(repo.store, step)
    sweep(repo, lease, Keep(2, every=3))
    assert files(repo) == files_of(1, 3, 5, 6)


def test_a_pack_to_which_a_kept_step_refers_stays(repo: Repository, lease: WriterLease) -> None:
    for step in (1, 2):
        put_step(repo.store, step)
    pack = attempt_files(1, "0-1-0")[2]
    put_step(repo.store, 3, packs=(StepFile(pack, len(pack)),))
    sweep(repo, lease, Keep(1))
    assert files(repo) == files_of(3) | {pack}


def test_a_spared_step_stays(repo: Repository, lease: WriterLease) -> None:
    for step in (1, 2, 3):
        put_step(repo.store, step)
    sweep(repo, lease, Keep(1), spared_steps=[1])
    assert files(repo) == files_of(1, 3)


def test_a_step_that_was_found_damaged_does_not_count(repo: Repository, lease: WriterLease) -> None:
    for step in (1, 2, 3):
        put_step(repo.store, step)
    sweep(repo, lease, Keep(1), damaged_steps=[3])
    assert files(repo) == files_of(2, 3)


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_step_without_all_of_its_bytes_does_not_count(repo: Repository, lease: WriterLease, kind: int, damage: str) -> None:
    for step in (1, 2, 3):
        put_step(repo.store, step)
    name = attempt_files(3, "0-1-0")[kind]
    repo.store.delete([name])
    if damage == "short":
        repo.store.put(name, b"x")
    sweep(repo, lease, Keep(1))
    assert repo.step_numbers() == [2, 3]


def test_a_step_has_all_files_if_each_has_its_length() -> None:
    commit = commit_of(3, "0-1-0", (StepFile("steps/1/pack/0-1-0-0.pack", 7),))
    sizes = {name: len(name) for name in attempt_files(3, "0-1-0")} | {"steps/1/pack/0-1-0-0.pack": 7, "steps/9/x": 1}
    assert has_all_files(commit, sizes)
    for name in [*attempt_files(3, "0-1-0"), "steps/1/pack/0-1-0-0.pack"]:
        assert not has_all_files(commit, {other: nbytes for other, nbytes in sizes.items() if other != name})
        assert not has_all_files(commit, sizes | {name: sizes[name] - 1})


def put_incomplete_step(store: Store, step: int, line: TrainingLine = FIRST_LINE) -> None:
    """Write a step whose files have their lengths, but are not a manifest and a tree."""
    put_attempt(store, step, "0-1-0")
    commit = commit_of(step, "0-1-0", line=line)
    other = StepFile(f"steps/{step}/manifest/0-1-0.json", 9, "0" * 32)
    store.put(other.name, b"not a map")
    store.put(commit_name(step), encode_commit(replace(commit, trees=(other,))))


def test_a_step_that_is_not_complete_does_not_count(
    repo: Repository, lease: WriterLease, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        put_step(repo.store, step)
    put_incomplete_step(repo.store, 3)
    sweep(repo, lease, Keep(1))
    assert repo.step_numbers() == [2, 3]
    assert "step 3 counts as damaged" in caplog.text


def test_only_so_many_steps_are_read_as_are_kept(repo: Repository, lease: WriterLease, events: Events) -> None:
    """And none is read while none expires."""
    put_incomplete_step(repo.store, 1)
    for step in (2, 3, 4):
        put_step(repo.store, step)
    sweep(repo, lease, Keep(4))
    sweep(repo, lease, Keep(3))
    assert repo.step_numbers() == [2, 3, 4]
    assert not [operation for operation in events.seen if operation.startswith("get steps/1/manifest")]


def test_the_first_step_of_a_window_must_be_complete_and_is_read_only_if_another_one_would_expire(
    repo: Repository, lease: WriterLease, events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    put_incomplete_step(repo.store, 103)
    for step in (205, 207, 306, 307):
        put_step(repo.store, step)
    sweep(repo, lease, Keep(1, every=100))
    assert repo.step_numbers() == [103, 205, 306, 307]
    assert not [operation for operation in events.seen if operation.startswith("get steps/103/manifest")]
    for step in (104, 105):
        put_step(repo.store, step)
    sweep(repo, lease, Keep(1, every=100))
    assert repo.step_numbers() == [103, 104, 205, 306, 307]
    assert "step 103 counts as damaged" in caplog.text


# --- invalid records ----------------------------------------------------------------------------------------------


ADVICE = "is damaged or on a bad sector; restore it from a copy, or delete it if nobody needs this step"


def test_a_damaged_record_protects_its_files_and_all_packs(
    repo: Repository, lease: WriterLease, caplog: pytest.LogCaptureFixture
) -> None:
    """It may refer to any pack."""
    for step in (1, 2, 3):
        put_step(repo.store, step)
    leftover = put_attempt(repo.store, 4, "0-1-7")
    repo.store.put(commit_name(3), b"damaged")
    sweep(repo, lease, Keep(1))
    assert files(repo) == files_of(2, 3) | {leftover[2], attempt_files(1, "0-1-0")[2]}
    assert messages(caplog) == [f"no pack of {repo.url} is deleted, since step 3 may need any: {commit_name(3)} {ADVICE}"]


def test_a_damaged_record_that_expires_is_deleted_with_its_files(
    repo: Repository, lease: WriterLease, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        put_step(repo.store, step)
    repo.store.put(commit_name(1), b"damaged")
    sweep(repo, lease, Keep(2))
    assert files(repo) == files_of(2, 3)
    assert messages(caplog) == []


def test_a_record_on_a_bad_sector_protects_its_files_and_all_packs_and_other_steps_expire(
    repo: Repository, lease: WriterLease, events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk may read it again one day, so it does not expire."""
    for step in (1, 2, 3, 4):
        put_step(repo.store, step)

    def fail() -> None:
        raise StoreError("a bad sector") from OSError(errno.EIO, "Input/output error")

    events.before(f"get {commit_name(2)}", fail)
    sweep(repo, lease, Keep(1))
    packs = {attempt_files(step, "0-1-0")[2] for step in (1, 3)}
    assert files(repo) == files_of(2, 4) | packs
    assert messages(caplog) == [f"no pack of {repo.url} is deleted, since step 2 may need any: {commit_name(2)} {ADVICE}"]


@pytest.mark.parametrize("expired", [True, False])
def test_a_record_that_can_not_be_read_now_protects_its_files_and_all_packs(
    repo: Repository, lease: WriterLease, events: Events, expired: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        put_step(repo.store, step)
    leftover = put_attempt(repo.store, 4, "0-1-7")
    unread = 1 if expired else 3

    def fail() -> None:
        raise StoreError("no answer")

    events.before(f"get {commit_name(unread)}", fail)
    sweep(repo, lease, Keep(1))
    packs = {leftover[2], attempt_files(1, "0-1-0")[2], attempt_files(2, "0-1-0")[2]}
    assert files(repo) == (files_of(1, 3) if expired else files_of(2, 3)) | packs
    assert messages(caplog) == [f"nothing that step {unread} may need is deleted: no answer"]


def test_a_listed_record_that_is_missing_protects_its_files_and_all_packs(
    repo: Repository, lease: WriterLease, events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    """No other process deletes here, so the listing or the file system is wrong."""
    for step in (1, 2):
        put_step(repo.store, step)
    leftover = put_attempt(repo.store, 3, "0-1-7")
    events.before(f"get {commit_name(1)}", lambda: repo.store.delete([commit_name(1)]))
    sweep(repo, lease)
    assert files(repo) == (files_of(1, 2) - {commit_name(1)}) | {leftover[2]}
    (message,) = messages(caplog)
    assert message.startswith("nothing that step 1 may need is deleted: ")
    assert commit_name(1) in message


def test_a_reservation_expires_like_a_step(tmp_path: Path, events: Events, caplog: pytest.LogCaptureFixture) -> None:
    """It stays in a bucket where a publication was given up, and protects nothing."""
    repo = Repository(eventful_store("bucket", tmp_path / "run", events))
    lease = acquire_lease(repo)
    put_step(repo.store, 2)
    for step in (1, 3):
        repo.store.put(commit_name(step), new_reservation())
    leftover = put_attempt(repo.store, 1, "0-1-7")
    sweep(repo, lease)
    assert files(repo) == files_of(2) | {commit_name(1), commit_name(3)}
    assert not files(repo) & {*leftover}
    sweep(repo, lease, Keep(1, every=10))
    assert files(repo) == files_of(2) | {commit_name(3)}, "nothing was saved as step 1, so it is not the first of its window"
    assert messages(caplog) == []


def test_an_unsigned_step_does_not_count_and_keeps_its_files(repo: Repository, events: Events) -> None:
    keys = as_keys(bytes(32))
    for step in (1, 2):
        put_step(repo.store, step, keys=keys)
    put_step(repo.store, 3)
    signed = Repository(repo.store, keys)
    lease = acquire_lease(signed)
    leftover = put_attempt(repo.store, 4, "0-1-7")
    sweep(signed, lease, Keep(1))
    assert files(repo) == files_of(2, 3)
    assert not files(repo) & {*leftover}, "an unsigned record is not damaged"


def test_an_unsigned_step_expires(repo: Repository) -> None:
    keys = as_keys(bytes(32))
    put_step(repo.store, 1)
    put_step(repo.store, 2, keys=keys)
    signed = Repository(repo.store, keys)
    sweep(signed, acquire_lease(signed), Keep(1))
    assert files(repo) == files_of(2)


def test_an_unsigned_step_may_be_that_of_another_run(repo: Repository) -> None:
    """Nothing proves the training line in its record."""
    keys = as_keys(bytes(32))
    put_step(repo.store, 1, keys=keys)
    put_step(repo.store, 2)
    for step in (3, 4):
        put_step(repo.store, step, line=TrainingLine(1, ()), keys=keys)
    signed = Repository(repo.store, keys)
    sweep(signed, acquire_lease(signed), Keep(1))
    assert files(repo) == files_of(1, 2, 4)


def test_steps_of_another_run_never_expire(repo: Repository, lease: WriterLease) -> None:
    """The record of step 2 is damaged, so it may be one of them."""
    for step in (1, 2):
        put_step(repo.store, step)
    for step in (3, 4, 5):
        put_step(repo.store, step, line=TrainingLine(1, ()))
    repo.store.put(commit_name(2), b"damaged")
    sweep(repo, lease, Keep(1))
    assert repo.step_numbers() == [1, 2, 3, 4, 5], "a damaged record protects packs"
    assert {name for name in files(repo) if name.endswith("commit.json")} == {commit_name(step) for step in (1, 2, 5)}


def test_abandoned_steps_expire_before_the_steps_of_the_history(repo: Repository, lease: WriterLease) -> None:
    for step in (10, 20, 30):
        put_step(repo.store, step)
    put_step(repo.store, 12, line=TrainingLine(1, ((0, 10),)))
    sweep(repo, lease, Keep(2))
    assert files(repo) == files_of(10, 12)


def test_no_step_expires_while_the_only_step_after_a_roll_back_is_unreadable(
    repo: Repository, lease: WriterLease, caplog: pytest.LogCaptureFixture
) -> None:
    """Its history is the step 10, which would expire first if the steps were ordered by the other records."""
    for step in (10, 20, 30):
        put_step(repo.store, step)
    line = TrainingLine(1, ((0, 10),))
    repo.record_line(line)
    put_step(repo.store, 12, line=line)
    repo.store.put(commit_name(12), b"damaged")
    before = files(repo)
    sweep(repo, lease, Keep(1))
    assert files(repo) == before
    assert "step 12, whose record can't be read, may be the newest after a roll-back" in caplog.text
    put_step(repo.store, 13, line=line)
    sweep(repo, lease, Keep(1))
    assert {name for name in files(repo) if name.endswith("commit.json")} == {commit_name(13)}


def test_after_a_roll_back_the_kept_steps_must_be_complete(repo: Repository, lease: WriterLease) -> None:
    """Step 20 was abandoned. By their numbers, no step would expire."""
    put_step(repo.store, 11)
    put_step(repo.store, 20)
    put_incomplete_step(repo.store, 12, TrainingLine(1, ((0, 11),)))
    sweep(repo, lease, Keep(2, every=11))
    assert repo.step_numbers() == [11, 12, 20]


def test_a_step_of_another_run_is_no_good_step(repo: Repository, lease: WriterLease) -> None:
    put_step(repo.store, 1)
    for step in (3, 4):
        put_step(repo.store, step, line=TrainingLine(1, ()))
    sweep(repo, lease, Keep(3))
    assert files(repo) == files_of(1, 3, 4)
