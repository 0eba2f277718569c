"""A deletion knows whether it has deleted a file, whatever the members answer in later tries."""

from __future__ import annotations

from pathlib import Path

from helpers.nodes import directories

from ckpt.aggregator.file_io.deletion import Deletion
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.records.file_record import FileRecord, RecordHead, decode_record, encode_record, next_head


def record(version: str, previous: FileRecord | None = None, kind: str = "file") -> FileRecord:
    """Return the record of a small file, or of another kind, after the previous record of its path."""
    return FileRecord(next_head(RecordHead(kind, 1, 0.0, 0.0, version), previous), b"x" if kind == "file" else None)


def test_a_member_with_an_older_tombstone_does_not_hide_what_was_deleted() -> None:
    """The first try is accepted by a quorum, and no answer arrives. The second asks a member that missed the file before."""
    deletion = Deletion(lambda file: file.exists)
    older = record("1", kind="deleted")
    file = record("2", older)
    tombstone = deletion.decide("/x", encode_record(file))
    assert tombstone is not None
    assert not decode_record("x", tombstone).exists
    assert deletion.decide("/x", encode_record(older)) is None
    assert deletion.decide("/x", tombstone) is None
    assert deletion.deleted_files({"/x": tombstone}) == {"x": file}
    assert deletion.possibly_deleted({"/x": tombstone}) == set()


def test_a_collected_tombstone_may_have_been_that_of_this_deletion() -> None:
    deletion = Deletion(lambda file: file.exists)
    assert deletion.decide("/x", encode_record(record("1"))) is not None
    assert deletion.possibly_deleted({"/x": None}) == set(), "no member has accepted it"
    deletion.on_outdated(True, 2)
    assert deletion.decide("/x", None) is None
    assert deletion.deleted_files({"/x": None}) == {}
    assert deletion.possibly_deleted({"/x": None}) == {"x"}


def test_a_path_without_a_file_is_not_deleted() -> None:
    deletion = Deletion(lambda file: file.exists)
    older = encode_record(record("1", kind="deleted"))
    assert deletion.decide("/x", older) is None
    deletion.on_outdated(True, 2)
    assert deletion.deleted_files({"/x": older}) == {}
    assert deletion.possibly_deleted({"/x": None}) == set()


def test_a_deletion_creates_no_namespace(tmp_path: Path) -> None:
    """Only a write does: a mistyped URL leaves nothing behind."""
    namespace = Namespace(directories(tmp_path, 3))
    assert namespace.delete(["x"]) == []
    assert not namespace.exists()
    namespace.close()
