"""Streams leaves of a step one after the other, in the order of the packs, while threads read the next ones.

The leaves are divided into batches. The next batch is begun only while it, the batches that are being read, and those that
wait for the consumer fit into a limit of bytes together. Leaves that share a block are in one batch, so that each block is
read once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpt.block_io.block_reader import BlockReader
from ckpt.block_io.read_plan import BlockRead, Target, plan_reads
from ckpt.block_io.tuned_read_threads import ReadKind, most_threads
from ckpt.format.manifest import Manifest, Row, Saved
from ckpt.repository.checkpoint import Checkpoint
from ckpt.state.dtype_names import numpy_dtype
from ckpt.state.leaves.base import ArrayLeaf
from ckpt.storage.base.errors import CkptError, StoreError
from ckpt.storage.base.threads import DaemonThreadPool

_BATCH_BYTES = 16 << 20
_JOB_BYTES = 16 << 20
_THREADS = 4
"""The threads that read through the page cache. A tuner decides how many read a store that is remote."""

MakeLeaf = Callable[[Saved], ArrayLeaf]
"""Returns the leaf of a new array of a dtype and shape."""


class StreamedLeaf(NamedTuple):
    """A leaf with all its elements."""

    name: str
    leaf: ArrayLeaf


@dataclass(slots=True)
class _Batch:
    """Adjacent leaves that are read together."""

    names: list[str]
    nbytes: int
    leaves: list[ArrayLeaf] = field(default_factory=list)
    jobs: list[Future[None]] = field(default_factory=list)


def stream_leaves(checkpoint: Checkpoint, names: Sequence[str], make: MakeLeaf, max_bytes: int) -> Iterator[StreamedLeaf]:
    """Yield leaves in the order of the packs, each verified.

    names: the leaves to read.
    max_bytes: how many bytes of leaves may be read and not yet consumed. One batch is read, however large its leaf.

    Raises IntegrityError or StoreError at the first leaf that can't be read; those before it were verified.
    """
    manifest = checkpoint.manifest().select(names)
    saved = manifest.leaves()
    waiting = deque(_batches(ordered_leaves(manifest), saved))
    started: deque[_Batch] = deque()
    reader = _Reader(checkpoint, manifest, make)
    nbytes = 0
    try:
        while waiting or started:
            while waiting and (not started or nbytes + waiting[0].nbytes <= max_bytes):
                reader.start(waiting[0], saved)
                started.append(waiting.popleft())
                nbytes += started[-1].nbytes
            batch = started.popleft()
            for job in batch.jobs:
                job.result()
            while batch.names:  # the consumer may drop each leaf before the next
                yield StreamedLeaf(batch.names.pop(0), batch.leaves.pop(0))
            nbytes -= batch.nbytes
    finally:
        reader.stop()


def ordered_leaves(manifest: Manifest) -> list[tuple[str, Row]]:
    """Return the leaves in the order in which their first bytes lie in the packs, each with the row of those bytes."""
    names = list(manifest.leaves())
    rows = manifest.find([(name, None) for name in names])
    first = [min(found, key=_place) for found in rows]
    return sorted(zip(names, first, strict=True), key=lambda leaf: _place(leaf[1]))


def _place(row: Row) -> tuple[str, int, int]:
    return row.pack or "", row.position, row.start


def _batches(leaves: Sequence[tuple[str, Row]], saved: Mapping[str, Saved]) -> Iterator[_Batch]:
    batch = _Batch([], 0)
    block = None
    for name, row in leaves:
        if batch.nbytes >= _BATCH_BYTES and (row.pack, row.position) != block:
            yield batch
            batch = _Batch([], 0)
        block = row.pack, row.position
        batch.names.append(name)
        batch.nbytes += nbytes_of(saved[name])
    if batch.names:
        yield batch


def nbytes_of(saved: Saved) -> int:
    """Return the bytes of a saved array in memory."""
    total: int = numpy_dtype(saved.dtype).itemsize
    for length in saved.shape:
        total *= length
    return total


class _Reader:
    """The threads that read the blocks of batches."""

    def __init__(self, checkpoint: Checkpoint, manifest: Manifest, make: MakeLeaf) -> None:
        self._checkpoint = checkpoint
        self._manifest = manifest
        self._make = make
        self._kind: ReadKind | None = "whole" if checkpoint.store.is_remote else None
        self._threads = DaemonThreadPool(most_threads(checkpoint.store, self._kind) or _THREADS, "ckpt-read")
        self._of_thread = threading.local()

    def start(self, batch: _Batch, saved: Mapping[str, Saved]) -> None:
        """Make the arrays of a batch and begin to read them."""
        batch.leaves = [self._make(saved[name]) for name in batch.names]
        targets = [Target(name, leaf, None) for name, leaf in zip(batch.names, batch.leaves, strict=True)]
        blocks = plan_reads(self._manifest, targets, self._checkpoint.where)
        job_bytes = 1 if self._kind else _JOB_BYTES  # a remote block is a job of its own: each waits for a round trip
        batch.jobs = [self._submit(job) for job in _jobs(blocks, job_bytes)]

    def _submit(self, job: list[BlockRead]) -> Future[None]:
        try:
            return self._threads.submit(self._read, job)
        except StoreError:  # the system refuses all threads, so this one reads
            done: Future[None] = Future()
            try:
                self._read(job)
            except CkptError as error:
                done.set_exception(error)
            else:
                done.set_result(None)
            return done

    def _read(self, blocks: list[BlockRead]) -> None:
        reader = getattr(self._of_thread, "reader", None)
        if reader is None:
            checkpoint = self._checkpoint
            algorithm = checkpoint.manifest().digest_algorithm
            reader = BlockReader(checkpoint.store, algorithm, checkpoint.where, None, self._kind)
            self._of_thread.reader = reader
        reader.read_all(blocks)

    def stop(self) -> None:
        """Wait for the reads that are running, and drop the others."""
        self._threads.shutdown(wait=True, cancel_futures=True)


def _jobs(blocks: Sequence[BlockRead], job_bytes: int) -> Iterator[list[BlockRead]]:
    job: list[BlockRead] = []
    nbytes = 0
    for block in blocks:
        job.append(block)
        nbytes += block.planned_bytes()
        if nbytes >= job_bytes:
            yield job
            job, nbytes = [], 0
    if job:
        yield job
