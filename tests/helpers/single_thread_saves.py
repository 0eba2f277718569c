"""Saves and loads of small steps in one thread, with the `Committer` of the product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ckpt.block_io.replicated_store import from_nearest
from ckpt.block_io.stored_block_check import is_good_block
from ckpt.format.difference_choice import AutomaticChoices
from ckpt.format.digest import digest
from ckpt.format.json_records import CommitRecord
from ckpt.format.manifest import Row
from ckpt.format.manifest_encoding import PlannedColumns, StoredBlock, build_table
from ckpt.loading.rank_agreement import LoadRequest
from ckpt.repository.attempt import Attempt
from ckpt.repository.checkpoint import Checkpoint
from ckpt.saving.committer import Committer
from ckpt.saving.dedup import PreviousBlock, StepBlocks
from ckpt.saving.handle import SaveHandle
from ckpt.saving.options import Options
from ckpt.saving.save_plan import flatten_state
from ckpt.saving.writer_session import WriterSession
from ckpt.storage.base.errors import CkptError, IntegrityError, NotFound
from ckpt.storage.base.store import Store

_ALGORITHM = "xxh3-128"
_NEVER = np.arange(8.0)
"""An array that never changes, so that a step refers to the pack of the step before."""


def state_of_save(commit: CommitRecord) -> dict[str, bytes]:
    """Return the bytes of each array that a step must have."""
    return {"never": _NEVER.tobytes(), "now": _now(commit.step, *commit.save_order).tobytes()}


def _now(step: int, generation: int, serial: int) -> np.ndarray[Any, Any]:
    return np.array([step, generation, serial, *range(5)], np.float64)


def save(session: WriterSession, state: Any, step: int, options: Options, blocking: bool) -> SaveHandle:
    """Do what `pipeline.save` does, in the thread of the caller. The state is that of `state_of_save`, whatever is given."""
    handle = SaveHandle(step)
    attempt = session.group_lease.begin_attempt(step)
    session.note_save_began(step)
    session.raise_failed()
    arrays = {"never": _NEVER, "now": _now(step, *attempt.serial)}
    flat = flatten_state(arrays, session.group)
    committer = Committer(session, attempt, step, options, flat, None)  # type: ignore[arg-type]  # no other rank compares
    session.add_save(handle, 1)
    checkpoint, error = None, None
    try:
        session.sweep_temporaries()
        previous = session.previous_blocks(_ALGORITHM, attempt)
        try:
            blocks = _write_blocks(session.repo.store, attempt, arrays, previous)
            checkpoint = _commit(committer, blocks)
        except BaseException as failed:
            committer.discard(failed)
            raise
        _finish(session, attempt, checkpoint, blocks, options, committer)
    except (CkptError, OSError) as failed:
        checkpoint, error = None, failed
    session.writer_lease.end_attempt(attempt)
    if error is not None:
        session.forget_previous()
    handle.end(checkpoint, session.writer_lease.explain_failure(error))
    return handle


def _write_blocks(
    store: Store, attempt: Attempt, arrays: dict[str, np.ndarray[Any, Any]], previous: StepBlocks
) -> list[StoredBlock]:
    """Write each array into a pack of its own, unless the step before has it."""
    blocks = []
    for number, array in enumerate(arrays.values()):
        data = array.tobytes()
        key = digest(_ALGORITHM, data), len(data)
        if (before := previous.blocks.get(key)) is not None:
            name, position = before.pack, before.position
        else:
            name, position = f"steps/{attempt.step}/pack/{attempt.name}-{number}.pack", 0
            with store.create(name, len(data)) as writer:
                writer.append(memoryview(data))
                writer.commit()
        blocks.append(StoredBlock(name, position, len(data), len(data), None, key[0], None, b""))
    return blocks


def _commit(committer: Committer, blocks: list[StoredBlock]) -> Checkpoint:
    names, whole = ["never", "now"], ((0,), (8,))
    columns = PlannedColumns(names, ["float64"] * 2, [(8,)] * 2, [whole] * 2, [0, 0], [64, 64], [0, 1])  # type: ignore[list-item]
    return committer.commit(
        build_table(columns, blocks), _ALGORITHM, {block.pack: 64 for block in blocks}, 64, sharded=False,
        choices=AutomaticChoices((), ()),
    )  # fmt: skip


def _finish(
    session: WriterSession,
    attempt: Attempt,
    checkpoint: Checkpoint,
    blocks: list[StoredBlock],
    options: Options,
    committer: Committer,
) -> None:
    """Do what `SaveRun` does after a commit."""
    found = {(b.digest, b.raw): PreviousBlock(b.pack, b.position, b.stored, None, None, None, True) for b in blocks}
    packs = {file.name: file.nbytes for file in checkpoint.commit.packs}
    session.remember_blocks(attempt, _ALGORITHM, StepBlocks(found, packs))
    session.note_committed(attempt.step, checkpoint.commit.files(), 1)
    session.writer_lease.end_attempt(attempt)
    session.sweep(options.keep, {attempt.step}, committer.replaced_files)


def load_checkpoint(open_checkpoint: Callable[[], Checkpoint], request: LoadRequest) -> tuple[CommitRecord, dict[str, bytes]]:
    """Return the commit record of a step and the bytes of its arrays, each from the nearest good copy."""
    checkpoint = open_checkpoint()
    checkpoint.require_complete()
    return checkpoint.commit, {row.leaf: _read_block(checkpoint, row) for row in checkpoint.manifest().rows}


def _read_block(checkpoint: Checkpoint, row: Row) -> bytes:
    assert row.pack is not None
    name = row.pack

    def read(copy: Store) -> bytes:
        stored = memoryview(bytearray(row.stored))
        try:
            with copy.open_once(name) as reader:
                count = reader.read_into(row.position, stored)
        except NotFound as error:
            raise IntegrityError(f"{copy.url}/{name} is missing") from error
        if count != row.stored or not is_good_block(_ALGORITHM, row, stored):
            raise IntegrityError(f"{copy.url}/{name} is damaged")
        return bytes(stored)

    return from_nearest(checkpoint.store, read, name, row.position)
