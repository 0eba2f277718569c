"""Publishes a commit record in such a way that a fenced writer can't replace a record of its successor.

`Store.publish` confirms the lease after the record is prepared and before it becomes visible. A successor takes the lease
first, then revokes prepared records of its predecessors (`Store.revoke`), and only then deletes their files. In either order
of the two, a record that becomes visible has all its files.
"""

from __future__ import annotations

from collections.abc import Callable

from ckpt.errors import StepNotFound
from ckpt.format.json_records import MAX_RECORD_BYTES, CommitRecord, decode_commit, encode_commit
from ckpt.repository.attempt import Attempt
from ckpt.repository.file_names import commit_name, step_folder
from ckpt.repository.repository import Repository
from ckpt.repository.writer_lease import WriterLease
from ckpt.storage.base.conditional_store import MAX_TRIES
from ckpt.storage.base.errors import AlreadyExists, Changed, IntegrityError, NotFound, Unavailable
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.store import Version


def publish_commit(
    repo: Repository, lease: WriterLease, commit: CommitRecord, require_replaceable: Callable[[CommitRecord | None], None]
) -> None:
    """Write a commit record, which makes the step exist, and replace an existing record if `require_replaceable` allows that.

    require_replaceable: raises if the existing record must stay; it gets None for a damaged record.

    After an error, the record may still be written later, so it stays among `WriterLease.unsettled_commits`.

    Raises Fenced if this writer does not have the newest lease before and after; the step may still exist, complete. Raises
    Unavailable if another writer changes the record each time.
    """
    store, name, data = repo.store, commit_name(commit.step), encode_commit(commit)
    replaces: Version | None = None
    has_failed = False

    def confirm() -> None:
        if has_failed:  # the caller did not wait for a call that hung, and the files may be deleted by now
            raise Unavailable(f"{repo.url}/{name} was not published in time; save again")
        lease.require_newest()

    lease.begin_publication(commit)
    with lease.publish_lock:
        for _ in range(MAX_TRIES):
            try:
                store.publish(name, data, confirm, replaces)
                break
            except (AlreadyExists, Changed):
                lease.require_newest()
                try:
                    existing, replaces = store.get_versioned(name, MAX_RECORD_BYTES)
                except NotFound:
                    replaces = None
                    continue
                if existing == data:  # the store retried a write that had already succeeded
                    break
                require_replaceable(_decode_undamaged(existing, f"{repo.url}/{name}"))
            except BaseException:
                has_failed = True
                raise
        else:
            raise Unavailable(f"{repo.url}/{name} changes all the time; let one job save there")
    failpoint("save.published")
    lease.require_newest()
    lease.settle(commit.attempt_name)


def _decode_undamaged(data: bytes, where: str) -> CommitRecord | None:
    try:
        return decode_commit(data, where)
    except IntegrityError:
        return None


def settle_attempt(repo: Repository, lease: WriterLease, attempt: Attempt) -> bool:
    """Return whether a step is committed with the files of this attempt, after its publication has failed.

    The reply may have been lost, or the record may be written later. This function prevents that later write if the store
    allows it.

    Raises NotFound if the whole repository was removed, so that nothing is written there.
    """
    is_certain = attempt.name not in lease.unsettled_commits() or repo.store.revoke(commit_name(attempt.step))
    try:
        is_committed = any(map(attempt.has_file, repo.commit(attempt.step).files()))  # the manifests are those of rank 0
    except (StepNotFound, NotFound):
        repo.identity()
        is_committed = False
    if is_committed or is_certain:
        lease.settle(attempt.name)
    return is_committed


def delete_files(repo: Repository, lease: WriterLease, attempt: Attempt) -> None:
    """Delete the files of an attempt that is not committed; reports of failures stay, since other ranks read them.

    Nothing is deleted where the step may still be committed. Raises Fenced if a newer writer exists: the step may have been
    committed, and the newer writer may have deleted its record and refer to its packs.
    """
    listed = repo.store.list(step_folder(attempt.step))
    names = [e.name for e in listed if attempt.has_file(e.name) and not e.name.endswith("-failed.json")]
    if attempt.name not in lease.unsettled_commits():
        lease.require_newest()  # after the record was read: nobody else has changed it until then
        repo.store.delete(names)
