"""Copies a committed step from nearer tiers to a further one, without changing its files.

The order is packs, manifests, commit record. A crash before the commit record leaves unreachable files, which the next attempt
uses or a sweep deletes. The commit record makes the step exist. Every block is verified before it is written, so that damage
does not spread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from ckpt.block_io.replicated_store import bad_files, clear_bad, from_nearest
from ckpt.block_io.stored_block_check import is_good_block
from ckpt.errors import DAMAGE_ADVICE, Fenced, bad_sectors_as_damage
from ckpt.format.json_records import CommitRecord, StepFile
from ckpt.format.limits import MAX_BLOCK_BYTES
from ckpt.format.manifest import Row
from ckpt.format.pack import file_lengths
from ckpt.repository import commit_publication
from ckpt.repository.checkpoint import Checkpoint
from ckpt.repository.damage_registry import clear_damaged, damaged_steps
from ckpt.repository.file_names import commit_name
from ckpt.repository.repository import Repository
from ckpt.repository.retention import Keep
from ckpt.saving.writer_session import WriterSession
from ckpt.storage.base.errors import IntegrityError, NoSpace, NotFound, StoreError
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.huge_pages import map_huge_pages
from ckpt.storage.base.store import ALIGNMENT, Reader, Store

log = logging.getLogger("ckpt")

_PIECE_BYTES = 16 << 20
"""The most bytes that are copied at once: a large block."""
_ONE_WRITER_ADVICE = "check that no other program writes there, and save again"


def promote(
    source: Repository, step: int, target: WriterSession, keep: Keep | None = None, orphaned_files: set[str] | None = None,
    progress: Callable[[], None] = lambda: None, line: int = 0,
) -> bool:  # fmt: skip
    """Copy `step` from `source` to `target`, and return whether it was copied. It may be called again after any failure.

    keep: which steps the sweep of the target keeps; None deletes none.
    orphaned_files: files that were copied for steps whose copy failed. The caller passes the same set to the next call.
    progress: called for each range that was copied.
    line: the training line of the step. After a roll-back, tiers may also have a save of this number on an earlier line.

    Returns False if the target already has this save of the step, or a later one, with all its packs.

    Raises StepNotFound if the source no longer has the step, IntegrityError if no tier of the source has undamaged bytes or a
    later save in the target lacks packs, Fenced if a newer writer has taken over the target, and StoreError if a store failed
    or the save on this line can't be read now.
    """
    files_to_sweep = set() if orphaned_files is None else orphaned_files
    while True:
        commit = source.commit(step)
        if commit.line < line:  # the tier that has the later save could not be read, as the log says
            raise StoreError(
                f"no tier in front of {target.repo.url} can read step {step} of training line {line} now, and an earlier save "
                "of this number does not replace it; look in the log for the reason"
            )
        try:
            return _promote_save(source, commit, target, keep, files_to_sweep, progress)
        except IntegrityError:
            if source.commit(step) == commit:
                raise
            log.info("step %d was saved again while it was copied to %s; copying the later save", step, target.repo.url)


def _promote_save(
    source: Repository, commit: CommitRecord, target: WriterSession, keep: Keep | None, files_to_sweep: set[str],
    progress: Callable[[], None],
) -> bool:  # fmt: skip
    """Copy one save of a step; see `promote`. A later save of the step may remove its files meanwhile."""
    began, step = time.monotonic(), commit.step
    missing: list[StepFile] = []
    with suppress(NotFound, IntegrityError):
        existing = target.repo.record(step)
        is_newer = existing.save_order > commit.save_order
        missing = missing_packs(target.repo, existing) if is_newer or existing == commit else []
        if (is_newer or existing == commit) and not missing:
            return False
        if not is_newer:
            missing = []
            files_to_sweep.update(existing.files())
    if missing:
        raise IntegrityError(
            f"{target.repo.url} has a later save of step {step} without {missing[0].name}, and the copy in {source.url} is "
            f"kept; {DAMAGE_ADVICE}"
        )
    files_to_sweep.update(commit.files())
    target.sweep_temporaries()
    attempt = target.group_lease.begin_own_attempt(step)
    try:
        target.pin_packs(attempt, [*commit.files(), commit_name(step)])
        try:
            copied = _copy_files(Checkpoint(source.store, commit), target, progress)
        except NoSpace:
            # After a roll-back, the steps to keep are known only once the target has a step on the new training line.
            newest_line = max(target.repo.line_numbers(), default=0)
            target.make_room(keep if commit.line == newest_line else None, files_to_sweep)
            copied = _copy_files(Checkpoint(source.store, commit), target, progress)
        failpoint("promote.commit")
        if commit.line:
            target.record_line(commit.training_line)
        commit_publication.publish_commit(
            target.repo, target.writer_lease, commit, partial(_require_not_superseded, target.repo, commit)
        )
        failpoint("promote.committed")
    finally:
        target.writer_lease.end_attempt(attempt)
    if any(step not in damaged_steps(tier) for tier in source.tiers):  # otherwise it is the save that was found bad
        clear_damaged(target.repo, step)
    target.forget_previous()  # the next direct save to the target must not refer to blocks of an older step
    log.info(
        "promoted step %d from %s to %s: %.3f GB copied, %.2f s",
        step,
        source.tiers[0].url,
        target.repo.url,
        copied / 1e9,
        time.monotonic() - began,
    )
    target.sweep(keep, {step}, files_to_sweep)
    files_to_sweep.clear()
    return True


def _copy_files(checkpoint: Checkpoint, target: WriterSession, progress: Callable[[], None]) -> int:
    """Copy the files that the target lacks; return the bytes of the copied packs."""
    commit, store = checkpoint.commit, target.repo.store
    small = {file.name: checkpoint.verified(file) for file in (*commit.manifests, *commit.trees)}
    missing = missing_packs(target.repo, commit)
    if missing:
        blocks: dict[str | None, list[Row]] = {}
        for row in checkpoint.manifest().by_block():
            blocks.setdefault(row.pack, []).append(row)
        buffer = memoryview(map_huge_pages(_PIECE_BYTES))  # aligned, as O_DIRECT needs it
        for file in missing:
            failpoint("promote.pack")
            _copy_pack(checkpoint, file, blocks.get(file.name, []), store, buffer, progress)
            clear_bad(store.url, file.name)
    for name, data in small.items():
        failpoint("promote.manifest")
        store.put(name, data)
    return sum(file.nbytes for file in missing)


def missing_packs(repo: Repository, commit: CommitRecord) -> list[StepFile]:
    """Return the packs of a step that a repository lacks, or has with another length, or that this process found damaged."""
    have, bad = file_lengths(repo.store, [file.name for file in commit.packs]), bad_files(repo.url)
    return [file for file in commit.packs if have.get(file.name) != file.nbytes or file.name in bad]


def _copy_ranges(blocks: list[Row], nbytes: int) -> Iterator[tuple[int, int, Row | None]]:
    """Yield the ranges of a whole pack as (begin, end, row of the block), with None for a gap between the step's blocks."""
    at = 0
    for row in blocks:
        yield from _gap_ranges(at, row.position)
        at = min(nbytes, row.position + -(-row.stored // ALIGNMENT) * ALIGNMENT)
        yield row.position, at, row
    yield from _gap_ranges(at, nbytes)


def _gap_ranges(begin: int, end: int) -> Iterator[tuple[int, int, None]]:
    for at in range(begin, end, _PIECE_BYTES):
        yield at, min(end, at + _PIECE_BYTES), None


def _copy_pack(
    checkpoint: Checkpoint, file: StepFile, blocks: list[Row], store: Store, buffer: memoryview,
    progress: Callable[[], None],
) -> None:  # fmt: skip
    algorithm = checkpoint.manifest().digest_algorithm
    absent: set[tuple[str, str]] = set()
    with _PackCopies(checkpoint.where, file.name) as source, store.create(file.name, file.nbytes) as writer:
        for begin, end, row in _copy_ranges(blocks, file.nbytes):
            if end - begin > len(buffer):
                raise IntegrityError(
                    f"{file.name} of {checkpoint.where} has a block of {end - begin} bytes, and blocks have at most "
                    f"{MAX_BLOCK_BYTES}; {DAMAGE_ADVICE}"
                )
            view = buffer[: end - begin]

            def read(copy: Store, begin: int = begin, row: Row | None = row, view: memoryview = view) -> None:
                source.read(copy, begin, view)
                if row is not None and not is_good_block(algorithm, row, view[: row.stored]):
                    raise IntegrityError(
                        f"leaf {row.leaf} of {checkpoint.where}: {copy.url}/{file.name}, block at byte {begin}, is damaged; "
                        f"{DAMAGE_ADVICE}"
                    )

            from_nearest(checkpoint.store, read, file.name, begin, absent)
            if writer.append(view) != begin:
                raise StoreError(
                    f"copying {file.name} to {store.url}: a range was not written at byte {begin}; {_ONE_WRITER_ADVICE}"
                )
            progress()
        if writer.commit() != file.nbytes:
            raise StoreError(
                f"copying {file.name} to {store.url}: the copy does not have {file.nbytes} bytes; {_ONE_WRITER_ADVICE}"
            )


class _PackCopies:
    """The open copies of one pack."""

    def __init__(self, where: str, name: str) -> None:
        self._where = where
        self._name = name
        self._readers: dict[str, Reader] = {}

    def read(self, copy: Store, position: int, buffer: memoryview) -> None:
        """Fill `buffer` from one copy at a byte position; raise IntegrityError if the copy is missing or damaged there."""
        pack_name = f"{copy.url}/{self._name} of {self._where}"
        try:
            with bad_sectors_as_damage(f"byte {position} of {pack_name}"):
                if (reader := self._readers.get(copy.url)) is None:
                    reader = self._readers[copy.url] = copy.open_once(self._name)
                count = reader.read_into(position, buffer)
        except NotFound as error:
            raise IntegrityError(f"{pack_name} is missing; {DAMAGE_ADVICE}") from error
        if count != len(buffer):
            raise IntegrityError(
                f"{pack_name} ends at byte {position + count}, {len(buffer) - count} bytes early; {DAMAGE_ADVICE}"
            )

    def __enter__(self) -> _PackCopies:
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._readers.values():
            reader.close()


def _require_not_superseded(repo: Repository, commit: CommitRecord, existing: CommitRecord | None) -> None:
    """Raise Fenced if the existing record belongs to a later save."""
    if existing is not None and existing.save_order > commit.save_order:
        raise Fenced(f"a newer job has saved step {commit.step} of {repo.url}; stop this job")
