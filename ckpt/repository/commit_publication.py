"""Publishes a commit record in such a way that a fenced writer can't replace a record of its successor.

`Store.publish` confirms the lease after the record is prepared and before it becomes visible. A successor takes the lease
first, then revokes prepared records of its predecessors (`Store.revoke`), and only then deletes their files. In either order
of the two, a record that becomes visible has all its files.
"""

from __future__ import annotations

from collections.abc import Callable

from ckpt.format.json_records import MAX_RECORD_BYTES, CommitRecord, decode_commit, encode_commit
from ckpt.repository.repository import Repository, commit_name
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

    Raises Fenced if this writer does not have the newest lease before and after; the step may still exist, complete. Raises
    Unavailable if another writer changes the record each time.
    """
    store, name, data = repo.store, commit_name(commit.step), encode_commit(commit)
    replaces: Version | None = None
    with lease.publish_lock:
        for _ in range(MAX_TRIES):
            try:
                store.publish(name, data, lease.require_newest, replaces)
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
        else:
            raise Unavailable(f"{repo.url}/{name} changes all the time; let one job save there")
    failpoint("save.published")
    lease.require_newest()


def _decode_undamaged(data: bytes, where: str) -> CommitRecord | None:
    try:
        return decode_commit(data, where)
    except IntegrityError:
        return None
