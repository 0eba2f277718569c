"""The commit of a step by a process alone: its record, what it replaces, and when it is refused."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from helpers.failing_store import failing
from helpers.folders import fast_folder
from helpers.lease_writers import Events, elsewhere, eventful_store, put_lease_record
from helpers.messages import one_line
from helpers.repositories import assert_clean, files
from helpers.states import assert_same

import ckpt
from ckpt.errors import Fenced, StepRefused
from ckpt.format import json_records, manifest_encoding
from ckpt.format.codec_choice import CodecChoice
from ckpt.format.difference_choice import AutomaticChoices, DifferenceChoice
from ckpt.format.json_records import CommitRecord, encode_commit
from ckpt.groups.base import SingleProcessGroup
from ckpt.repository import completeness
from ckpt.repository.completeness import is_complete
from ckpt.repository.file_names import commit_name
from ckpt.repository.repository import Repository
from ckpt.saving import committer as committer_module
from ckpt.saving.committer import Committer
from ckpt.saving.options import Options
from ckpt.saving.replica_check import compute_digests
from ckpt.saving.save_plan import flatten_state, plan_save
from ckpt.saving.session_start import start_alone
from ckpt.saving.writer_session import WriterSession
from ckpt.storage.base.errors import AlreadyExists, StoreError
from ckpt.storage.base.store import Store
from ckpt.storage.local.directory import LocalStore
from ckpt.version import __version__


@pytest.fixture
def events() -> Events:
    """Return what happens before operations of the store."""
    return Events()


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Yield the folder of a repository that nobody has written."""
    with fast_folder(tmp_path) as folder:
        yield folder / "run"


@pytest.fixture
def store(root: Path, events: Events) -> Store:
    """Return the store of the repository."""
    return eventful_store("local", root, events)


def state(number: int) -> dict[str, Any]:
    """Return a state of 407 bytes, in two leaves, that a number determines."""
    return {"n": number, "w": np.full(100, number, np.float32), "b": [np.full(7, number, np.int8)]}


def save(url: Any, step: int, number: int | None = None, **options: Any) -> CommitRecord:
    """Save the state of a number, or else of the step, and return the record."""
    saved = ckpt.save(state(step if number is None else number), url, step, group=None, **options)
    assert isinstance(saved, ckpt.Checkpoint)
    return saved.commit


# --- the record ----------------------------------------------------------------------------------------------------


def test_the_record_counts_what_the_step_has(root: Path) -> None:
    commit = save(root, 3, codec="none")
    assert ckpt.open(root)[3].commit == commit
    assert (commit.step, commit.generation, commit.world_size, commit.attempt) == (3, 1, 1, 0)
    assert (commit.leaves, commit.raw_bytes) == (2, 407)
    assert commit.written_bytes == sum(path.stat().st_size for path in root.glob("steps/3/pack/*"))
    assert (commit.next_save, commit.version, commit.line, commit.left, commit.signature) == (None, __version__, 0, (), None)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", commit.created)


def test_the_record_names_the_files_of_the_step_with_their_lengths_and_digests(root: Path) -> None:
    commit = save(root, 3)
    assert [file.name for file in commit.manifests] == ["steps/3/manifest/0-1-0.parquet"]
    assert [file.name for file in commit.trees] == ["steps/3/manifest/0-1-0.json"]
    for file in (*commit.manifests, *commit.trees):
        assert file.matches((root / file.name).read_bytes())
    assert {file.name: file.nbytes for file in commit.packs} == {
        str(path.relative_to(root)): path.stat().st_size for path in root.glob("steps/3/pack/*")
    }


@pytest.mark.parametrize(("algorithm", "digits"), [("xxh3-128", 32), ("blake3", 64)])
def test_the_manifest_names_its_format_digest_and_step(root: Path, algorithm: str, digits: int) -> None:
    commit = save(root, 3, digest=algorithm)
    metadata = pyarrow.parquet.read_schema(root / commit.manifests[0].name).metadata
    assert {key: metadata[key] for key in (b"format", b"digest", b"step")} == {
        b"format": b"1", b"digest": algorithm.encode(), b"step": b"3",
    }  # fmt: skip
    assert [len(str(file.digest)) for file in (*commit.manifests, *commit.trees)] == [digits, digits]


def test_attempts_of_a_step_are_counted_in_its_record(root: Path) -> None:
    with ckpt.Checkpointer(root, every=None, group=None):  # keeps the lease
        assert [save(root, 3, number, overwrite=True).attempt for number in range(3)] == [0, 1, 2]


def test_the_record_keeps_what_automatic_encoding_chose(root: Path) -> None:
    repo, alone = Repository(LocalStore(root)), SingleProcessGroup()
    session = WriterSession(repo, alone, start_alone(repo, None, None))
    flat = flatten_state({"n": 3}, alone)
    plan = plan_save(3, "xxh3-128", flat, "auto", (), alone)
    digests = compute_digests(flat, plan.specs, plan.leaves, False, plan.buffers, 0)
    codec = CodecChoice("float32", None, "faster", None, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0)
    difference = DifferenceChoice("int8", True, "faster", 0.5, 1.0, None, 1.0, 1.0, 0.0)
    committer = Committer(session, session.group_lease.begin_attempt(3), 3, Options(), flat, digests)
    rows = manifest_encoding.build_table(plan.columns, [])
    committer.commit(rows, "xxh3-128", {}, 0, sharded=False, choices=AutomaticChoices((codec,), (difference,)))
    commit = ckpt.open(root)[3].commit
    assert (commit.codec_choices, commit.difference_choices) == ((codec,), (difference,))
    assert (commit.leaves, commit.raw_bytes, commit.written_bytes) == (0, 0, 0)
    session.group_lease.release()


def test_a_step_that_this_process_has_committed_counts_as_complete(root: Path) -> None:
    commit = save(root, 3)
    shutil.rmtree(root / "steps/3/manifest")
    assert is_complete(ckpt.open(root).store, commit)


def test_manifest_and_tree_are_written_before_the_record(store: Store, events: Events) -> None:
    save(store, 3)
    written = [operation for operation in events.seen if operation.startswith(("put steps", "prepare steps"))]
    assert written == [
        "put steps/3/manifest/0-1-0.parquet",
        "put steps/3/manifest/0-1-0.json",
        "prepare steps/3/commit.json",
    ]


@pytest.mark.parametrize("point", ["save.manifest", "save.commit"])
def test_a_failure_before_the_record_leaves_no_step_and_no_file(root: Path, point: str) -> None:
    save(root, 1)
    with failing(f"{point}=error"), pytest.raises(StoreError, match="injected"):
        save(root, 2)
    assert ckpt.open(root).steps() == [1]
    assert_clean(root, folders=False)


def test_a_failure_after_the_record_leaves_the_step(root: Path) -> None:
    with failing("save.committed=error"), pytest.raises(StoreError, match="injected"):
        save(root, 2)
    assert_same(ckpt.load(root, strict=True), state(2))
    assert_clean(root, folders=False)


# --- a step that exists --------------------------------------------------------------------------------------------


def test_a_step_is_not_saved_twice(root: Path) -> None:
    first = save(root, 3)
    with pytest.raises(AlreadyExists) as error:
        save(root, 3, 4)
    url = ckpt.open(root).url
    assert str(error.value) == f"step 3 of {url} is committed already; use another number, or overwrite=True"
    assert ckpt.open(root)[3].commit == first
    assert_clean(root)


def test_a_step_is_replaced_with_overwrite_and_its_files_are_deleted(root: Path) -> None:
    save(root, 3)
    save(root, 3, 4, overwrite=True)
    assert_same(ckpt.load(root, strict=True), state(4))
    assert_clean(root)


@pytest.mark.parametrize("damage", ["record", "manifest", "tree", "pack", "short pack"])
def test_a_damaged_step_is_replaced_with_a_warning(root: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    commit = save(root, 3)
    completeness._complete_steps.clear()
    if damage == "record":
        (root / commit_name(3)).write_bytes(b"damaged")
    elif damage == "short pack":
        os.truncate(root / commit.packs[0].name, 5)
    else:
        kinds = {"manifest": commit.manifests, "tree": commit.trees, "pack": commit.packs}
        (root / kinds[damage][0].name).unlink()
    caplog.clear()
    save(root, 3, 4)
    assert_same(ckpt.load(root, strict=True), state(4))
    warnings = [text for record in caplog.records if "is damaged and will be replaced" in (text := record.getMessage())]
    if "pack" not in damage:
        assert warnings
        assert warnings[0].startswith("step 3 is damaged and will be replaced: ")
        assert "steps/3/" in warnings[0]


def test_a_step_that_can_not_be_read_now_is_not_replaced(store: Store, events: Events) -> None:
    save(store, 3)

    def fail() -> None:
        raise StoreError("no answer")

    events.before("get steps/3/commit.json", fail)
    with pytest.raises(StoreError, match="no answer"):
        save(store, 3, 4)
    assert_same(ckpt.load(store, strict=True), state(3))


def test_a_step_without_a_signature_is_not_replaced(root: Path) -> None:
    save(root, 3)
    with pytest.raises(ckpt.SignatureError):
        save(root, 3, 4, key=bytes(32))
    assert_same(ckpt.load(root, strict=True), state(3))
    signed = save(root, 4, key=bytes(32))
    assert signed.signature is not None
    assert ckpt.open(root, key=bytes(32))[4].commit == signed


def test_a_record_of_another_step_is_replaced_and_its_files_stay(root: Path) -> None:
    """Somebody has copied it. The files belong to the other step."""
    save(root, 3)
    (root / "steps/4").mkdir()
    shutil.copy(root / commit_name(3), root / commit_name(4))
    save(root, 4)
    for step in (3, 4):
        assert_same(ckpt.load(root, step=step, strict=True), state(step))


def test_a_number_that_a_roll_back_has_abandoned_is_free(root: Path) -> None:
    with ckpt.Checkpointer(root, every=None, group=None) as saver:
        for step in (10, 20):
            save(root, step)
        saver.restore(state(0), step=10)
        save(root, 12)
        commit = save(root, 20, 21)
        with pytest.raises(AlreadyExists):
            save(root, 20, 22)
    assert (commit.line, commit.left) == (1, ((0, 10),))
    assert ckpt.open(root).line_numbers() == [1]
    assert_same(ckpt.load(root, step=20, strict=True), state(21))


def test_the_first_line_of_training_needs_no_record(store: Store, events: Events) -> None:
    save(store, 3)
    assert not [operation for operation in events.seen if operation.startswith(("put lines", "put new lines"))]


def test_the_line_of_training_is_recorded_before_the_step(store: Store, events: Events) -> None:
    save(store, 10)
    with ckpt.Checkpointer(store, every=None, group=None) as saver:
        saver.save(20, state(20), blocking=True)
        saver.restore(state(0), step=10)
        events.seen.clear()
        saver.save(12, state(12), blocking=True)
    written = [each for each in events.seen if each.startswith(("put new lines", "prepare steps"))]
    assert written == ["put new lines/00000002.json", "prepare steps/12/commit.json"]


# --- another writer ------------------------------------------------------------------------------------------------


def test_a_fenced_writer_does_not_report_a_step_of_its_successor_as_its_own(store: Store, events: Events) -> None:
    """It must stop, and not use another number."""
    save(store, 3)
    events.before("get steps/3/commit.json", lambda: put_lease_record(store, 9, elsewhere()))
    with pytest.raises(Fenced):
        save(store, 3, 4)
    assert_same(ckpt.load(store, strict=True), state(3))


def test_a_repository_that_was_deleted_is_not_taken_for_one_without_the_step(store: Store, events: Events, root: Path) -> None:
    save(store, 3)
    events.before("get steps/4/commit.json", lambda: shutil.rmtree(root))
    with pytest.raises(StoreError, match="was deleted or emptied during a save"):
        save(store, 4)
    assert not root.exists() or not files(root)


def test_a_step_of_a_newer_writer_is_not_replaced(store: Store, events: Events) -> None:
    first = save(store, 3)
    newer = encode_commit(replace(first, generation=9))
    events.before("prepare steps/3/commit.json", lambda: store.put(commit_name(3), newer))
    with pytest.raises(Fenced) as error:
        save(store, 3, 4, overwrite=True)
    assert str(error.value) == f"a newer job has saved step 3 of {store.url}; stop this job"
    assert store.get(commit_name(3)) == newer


def test_a_step_that_appears_during_the_save_is_not_replaced(store: Store, events: Events, root: Path, tmp_path: Path) -> None:
    """Another thread of this process may save it."""
    save(store, 2)
    save(tmp_path / "other", 3)
    events.before("prepare steps/3", lambda: shutil.copytree(tmp_path / "other/steps/3", root / "steps/3", dirs_exist_ok=True))
    with pytest.raises(AlreadyExists, match="step 3 of"):
        save(store, 3, 4)
    assert_same(ckpt.load(store, strict=True), state(3))


def test_a_damaged_record_that_appears_during_the_save_is_replaced(store: Store, events: Events) -> None:
    save(store, 2)
    events.before("prepare steps/3/commit.json", lambda: store.put(commit_name(3), b"{" * 200))
    save(store, 3)
    assert_same(ckpt.load(store, strict=True), state(3))


# --- limits, and shards --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "kind", "what"), [
    ("MAX_MANIFEST_BYTES", "manifests", "manifest"), ("MAX_TREE_BYTES", "trees", "description of the state"),
])  # fmt: skip
def test_a_step_that_no_load_would_accept_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch, limit: str, kind: str, what: str
) -> None:
    nbytes = getattr(save(root, 3), kind)[0].nbytes
    monkeypatch.setattr(committer_module, limit, nbytes)
    save(root, 4, 3)
    monkeypatch.setattr(committer_module, limit, nbytes - 1)
    with pytest.raises(StepRefused) as error:
        save(root, 5, 3)
    assert str(error.value) == (
        f"step 5: its {what} has {nbytes} bytes, more than the limit of {nbytes - 1}: put long lists and dicts of plain values "
        "into arrays"
    )
    assert ckpt.open(root).steps() == [3, 4]
    assert_clean(root, folders=False)


def test_a_commit_record_that_no_load_would_accept_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names each pack to which the step refers, so it grows with the ranks, and with the steps that share blocks."""
    save(root, 3)
    nbytes = (root / "steps/3/commit.json").stat().st_size
    for module in (json_records, committer_module):
        monkeypatch.setattr(module, "MAX_RECORD_BYTES", 2 * nbytes, raising=False)
    save(root, 4, 3)
    for module in (json_records, committer_module):
        monkeypatch.setattr(module, "MAX_RECORD_BYTES", nbytes // 2, raising=False)
    with pytest.raises(StepRefused) as error:
        save(root, 5, 4)
    assert "more than the limit of" in one_line(error, "step 5: its commit record has", "save to a new URL")
    monkeypatch.undo()
    assert ckpt.open(root).steps() == [3, 4]
    assert_clean(root, folders=False)


def test_shards_of_one_process_must_cover_their_array(root: Path) -> None:
    with pytest.raises(StepRefused) as error:
        ckpt.save({"w": ckpt.Shard(np.ones((2, 5), np.int16), (4, 5), (0, 0))}, root, 3, group=None)
    one_line(error, "step 3: leaf w: no rank stored [2:4, 0:5] of shape (4, 5)")
    whole = ckpt.save({"w": ckpt.Shard(np.ones((4, 5), np.int16), (4, 5), (0, 0))}, root, 4, group=None)
    assert (whole.commit.leaves, whole.commit.raw_bytes) == (1, 40)
