"""Making a commit record visible, so that a writer which was succeeded meanwhile can't replace what its successor wrote.

The lease is confirmed when all is prepared (`Store.publish`). A successor first takes the lease, and then revokes what its
predecessors may have prepared (`Store.revoke`), before it deletes a file of theirs: whichever comes first, the files that the
record names are there, or the record does not come.
"""

from __future__ import annotations

from collections.abc import Callable

from ckpt.format.json_records import MAX_RECORD_BYTES, CommitRecord, decode_commit, encode_commit
from ckpt.repository.repository import Repository, commit_name
from ckpt.repository.writer_lease import WriterLease
from ckpt.storage.base.errors import AlreadyExists, Changed, IntegrityError, NotFound, Unavailable
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.store import Version

_TRIES = 20


def publish_commit(
    repo: Repository, lease: WriterLease, commit: CommitRecord, require_replaceable: Callable[[CommitRecord | None], None]
) -> None:
    """Make a step exist, in place of what is at its name where `may_replace` allows that.

    may_replace: raises where a record has to stay; None: a damaged one.

    Raises Fenced where the lease of this writer could not be proved before and after: the step may exist nevertheless, whole.
    """
    store, name, data = repo.store, commit_name(commit.step), encode_commit(commit)
    replaces: Version | None = None
    with lease.publish_lock:
        for _ in range(_TRIES):
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
                if existing == data:  # a retry inside the store: the first try had arrived
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
