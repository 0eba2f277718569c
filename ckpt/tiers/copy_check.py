"""Checks that a copy of a file is intact, by the digests of every step that refers to the file.

Only an intact copy justifies the deletion of another one. A copy of the right length may still have damaged bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial

from ckpt.block_io.replicated_store import remove_bad_copies
from ckpt.block_io.stored_block_check import is_good_block
from ckpt.format.json_records import CommitRecord
from ckpt.format.limits import MAX_BLOCK_BYTES
from ckpt.format.manifest import Row
from ckpt.repository.checkpoint import Checkpoint
from ckpt.repository.repository import Repository
from ckpt.repository.tiered_repository import TieredRepository
from ckpt.storage.base.errors import CkptError, NotFound, StoreError
from ckpt.storage.base.store import Reader, Store
from ckpt.support.user_warning import warn_user

log = logging.getLogger("ckpt")


def remove_damaged_copies(repository: TieredRepository) -> None:
    """Remove the damaged copies that loads of this process have found, where a further tier has an intact copy."""
    try:
        for name in remove_bad_copies(repository.store, partial(is_intact_copy, repository)):
            message = f"{name} was damaged, and is removed: a further tier has an intact copy, which was read"
            log.error(message)
            warn_user(message)
    except StoreError as error:
        log.warning("a damaged copy can't be removed, and is not used: %s", error)


def is_intact_copy(repo: Repository, copy: Store, name: str) -> bool:
    """Return whether `copy` has an intact file of this name, by all commit records of the repository.

    False also if no step refers to the file, or if a record or manifest that may refer to it can't be read.
    """
    found = False
    try:
        for commit in _commits_of_all_tiers(repo):
            if name in commit.files():
                if not _is_intact_for(Checkpoint(repo.store, commit), copy, name):
                    return False
                found = True
    except CkptError as error:
        log.warning("can't check whether %s/%s is intact: %s", copy.url, name, error)
        return False
    return found


def _commits_of_all_tiers(repo: Repository) -> Iterator[CommitRecord]:
    """Yield the commit records of all tiers. After a roll-back, a near tier may have another save of the same step."""
    for tier in repo.tiers:
        for step in tier.step_numbers():
            try:
                yield tier.record(step)
            except NotFound:  # not committed in this tier
                continue


def _is_intact_for(checkpoint: Checkpoint, copy: Store, name: str) -> bool:
    commit = checkpoint.commit
    for file in (*commit.manifests, *commit.trees):
        if file.name == name:
            return file.matches(copy.get(name))
    manifest = checkpoint.manifest()
    rows = [row for row in manifest.by_block() if row.pack == name]
    with copy.open_once(name) as reader:
        return all(_is_intact_block(reader, manifest.digest_algorithm, row) for row in rows)


def _is_intact_block(reader: Reader, algorithm: str, row: Row) -> bool:
    if row.stored > MAX_BLOCK_BYTES:
        return False
    stored = memoryview(bytearray(row.stored))
    return reader.read_into(row.position, stored) == row.stored and is_good_block(algorithm, row, stored)
