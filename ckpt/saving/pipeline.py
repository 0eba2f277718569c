"""The save pipeline: state → leaves → blocks → arena → (codec, digest) → pack → manifest → commit.

One way through for every kind of save. A blocking save is an asynchronous one with a small arena whose caller waits:
staging and writing overlap, and the ring holds the memory down. An asynchronous one stages all of the state first, or
as much as the budget holds, and writes from the arena in the background.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any, NamedTuple

from ckpt.block_io import staging_arena as arenas
from ckpt.block_io.staging_arena import Arena, ArenaAbandoned, Region, round_up
from ckpt.errors import MORE_MEMORY_ADVICE, NotFinite, SaveFailed, StagingFailed, StateChanged
from ckpt.format import codec, manifest
from ckpt.format.digest import checksum, choose_algorithm, digest_and_cells
from ckpt.format.limits import BLOCK_BYTES
from ckpt.format.manifest import StoredBlock
from ckpt.format.pack import PackFile, PackWriter
from ckpt.groups.base import Group, step_mismatch_error
from ckpt.repository.checkpoint import Checkpoint
from ckpt.repository.repository import step_folder
from ckpt.repository.writer_lease import Attempt
from ckpt.saving import rank_parts
from ckpt.saving.change_detection import BlockSample, can_be_sampled, first_changed_leaf, sample_block
from ckpt.saving.changing_leaves import changing_leaves_of
from ckpt.saving.committer import Committer
from ckpt.saving.dedup import PreviousBlock, PreviousBlocks, StepBlocks, is_block_intact
from ckpt.saving.handle import SaveHandle
from ckpt.saving.local_shards import leaf_specs, local_shards
from ckpt.saving.nan_check import checked_ranges, checked_ranges_of_plan, first_nan
from ckpt.saving.options import Options
from ckpt.saving.replica_check import compute_digests
from ckpt.saving.write_plan import Block, plan_blocks, stage_block
from ckpt.saving.writer_session import Session
from ckpt.state.leaves.base import ArrayLeaf, Bytes
from ckpt.state.tree import FlatState, flatten
from ckpt.storage.base.errors import CkptError, StoreError, first_line
from ckpt.storage.base.failpoints import failpoint
from ckpt.support.runtime import collector_paused, lower_thread_priority, processor_count

log = logging.getLogger("ckpt")

_ENCODERS = 8
"""Threads that encode and write, where a codec was asked for. Else there are as many as the store takes appends at once."""

_MIN_ARENA_BYTES = 32 << 20
"""That of a small state, a quarter of it at most: memory touched for the first time costs more than the disk."""

_YIELD_SECONDS = 0.05
"""For so long, and no longer than half of what its own copying took, a rank lets the others of its host end theirs before it
takes processors and memory from them: their training waits for it, and niceness may not count between processes (autogroup,
sched(7)). Of four ranks on two processors the slowest then takes 1.2 times as long as a plain copy, without it 1.35."""

_warned_of_nan: set[str] = set()
"""Repositories of which this process has warned of a NaN."""

_MAX_STORED_FRACTION = 0.98  # a block that a codec shrinks by less is stored as it is, and can then be read in parts


def flatten_state(state: Any, group: Group) -> FlatState:
    """The leaves of a state, before anything is written; raise UnsupportedLeaf."""
    with collector_paused():
        return flatten(state, group.rank if group.size > 1 else None)


def save(session: Session, state: Any, step: int | None, options: Options, blocking: bool) -> SaveHandle:
    """Save a state (or one that was taken apart) as `step`. Returns when committed (`blocking`), else when staged.

    Every call takes its number and its try of the step, also one that fails at once: ranks learn of what went wrong at
    different calls, and would count differently from then on. For that reason a rank of a group that is told here of an
    earlier failure takes part in this save all the same: else the others would fail for it, be told one call later, and so on.
    """
    if step is None:
        step = session.next_step()
    lease = session.lease
    handle = SaveHandle(step, lambda: lease.progress_count)
    attempt = lease.begin_attempt(step)
    session.note_save_began(step)
    failed: SaveFailed | None = None
    try:
        try:
            session.raise_failed()
        except SaveFailed as error:
            if session.group.size == 1:
                raise
            failed = error
        flat = state if isinstance(state, FlatState) else flatten_state(state, session.group)
        with collector_paused():
            pipeline = _SavePipeline(session, handle, attempt, flat, options)
        if not options.overwrite:
            pipeline.committer.refuse_existing()
    except BaseException as error:
        give_up_attempt(session, attempt, error)
        raise
    try:
        session.add_save(handle, options.in_flight)
    except SaveFailed:
        lease.writer.end_attempt(attempt)  # the other ranks are not told: the store that would tell them does not answer
        raise
    except BaseException as error:
        give_up_attempt(session, attempt, error)
        raise
    if blocking:
        pipeline.run_blocking()
        handle.result()
    else:
        pipeline.run_in_background()
    if failed is not None:
        raise failed
    return handle


def require_same_step_as_rank_0(session: Session, step: int | None) -> None:
    """Raise InvalidArgument where rank 0 has been asked to save another step, or none was named on one of the two.

    That is known of the first save of a group, for which its ranks talk. Later ones are only seen not to come.
    """
    for requested in session.take_rank_0_requested_step():
        if requested != step:
            error = step_mismatch_error("save", session.group.rank, session.group.size, step, requested)
            skip_step(session, session.next_step() if requested is None else requested, error)
            raise error


def skip_step(session: Session, step: int, error: BaseException) -> None:
    """This rank does not save a step that the others may save: they need not wait for it."""
    attempt = session.lease.begin_attempt(step)
    session.note_save_began(step)
    give_up_attempt(session, attempt, error)


def give_up_attempt(session: Session, attempt: Attempt, error: BaseException) -> None:
    """End an attempt that has written nothing, and tell the other ranks."""
    session.lease.writer.end_attempt(attempt)
    if session.group.size > 1:
        with suppress(CkptError, OSError):
            rank_parts.publish_failure(session.repo.store, session.lease, session.group, attempt, error)


def staging_bytes(state: Any, options: Options, group: Group) -> int:
    """The size of the arena that an asynchronous save of `state` will take."""
    return _arena_bytes(planned_bytes(state, options, group), options)


def planned_bytes(state: Any, options: Options, group: Group) -> int:
    """What this rank writes of a state where nothing of it is known yet, before any codec."""
    flat = flatten_state(state, group)
    with collector_paused():
        blocks = plan_blocks(leaf_specs(flat, local_shards(flat, group), options.codec, group)).blocks
    return sum(round_up(b.nbytes) for b in blocks)


def _arena_bytes(total: int, options: Options) -> int:
    return min(total, options.memory or int(arenas.available_memory() * 0.8))


class _SavePipeline:
    """One attempt. Threads: the caller stages, helpers of it stage too, writers write, one of the background commits."""

    def __init__(self, session: Session, handle: SaveHandle, attempt: Attempt, flat: FlatState, options: Options) -> None:
        self._session = session
        self._attempt = attempt
        self._group = session.group
        self._store = session.repo.store
        self._handle = handle
        self._step = handle.step
        self._options = options
        self._algorithm = choose_algorithm(options.digest, bool(session.repo.keys))
        self._flat = flat
        shards = local_shards(flat, session.group)
        self._leaves = [h.leaf for h in shards]
        self._leaf_names = [h.name for h in shards]
        self._has_shards = any(h.part is not None for h in shards)
        self._changing_leaves = changing_leaves_of(session.url_and_rank)
        specs = self._specs = leaf_specs(flat, shards, options.codec, session.group, self._changing_leaves.changing)
        verify = options.verify_replicas if session.group.size > 1 else False
        digests = compute_digests(flat, specs, self._leaves, verify)
        self.committer = Committer(session, attempt, handle.step, options, flat, digests)
        self._blocks, self._planned_columns = plan_blocks(specs)
        self._checks_nan = options.nan != "allow"
        self._checked_ranges = checked_ranges_of_plan(self._blocks)
        self._tuner = codec.codec_tuner(self._store.url)
        self._started_at = time.monotonic()
        self._error: BaseException | None = None
        self._arena: Arena | None = None
        self._staged_blocks: queue.SimpleQueue[_StagedBlock | None] = queue.SimpleQueue()
        self._stored_blocks: list[StoredBlock | None] = [None] * len(self._blocks)
        self._step_blocks: PreviousBlocks = {}
        self._previous_blocks: PreviousBlocks = {}
        self._previous_packs: dict[str, int] = {}
        self._referenced_packs: set[str] = set()
        self._bad_blocks: set[tuple[bytes, int]] = set()  # blocks that were found bad
        self._unreadable_packs: set[str] = set()  # packs
        self._samples: dict[int, BlockSample] = {}  # of the blocks that are staged late
        self._writing_allowed = threading.Event()  # the writers may begin
        self._eager_staged = threading.Event()
        self._copied_seconds = 0.0
        self._append_began = threading.Event()
        encodes = any(block.codec not in (None, "auto") for block in self._blocks)
        self._writer_count = _ENCODERS if encodes else self._store.parallel_appends
        self._processor_slots = threading.Semaphore(max(1, processor_count() - 1))  # processors, while training goes on
        self._checkpoint: Checkpoint | None = None

    # --- the two ways ------------------------------------------------------------------------------------------

    def run_blocking(self) -> None:
        total = sum(round_up(b.nbytes) for b in self._blocks)
        most = (
            self._writer_count * BLOCK_BYTES * 3 // 2
        )  # half as many are staged as are written: what is small stays in the caches
        budget = min(max(_MIN_ARENA_BYTES, min(most, total // 4)), self._options.memory or most)
        self._writing_allowed.set()
        all_blocks = range(len(self._blocks))
        stager = threading.Thread(target=self._stage, args=(all_blocks, True, True), name="ckpt-stage", daemon=True)
        try:
            self._borrow_arena(min(total, budget))
            self._prepare()
            stager.start()
            self._write_and_commit(stager)
        except BaseException as error:
            self._fail(error)
            if stager.ident is not None:
                stager.join()
        finally:
            self._end()

    def run_in_background(self) -> None:
        total = sum(round_up(b.nbytes) for b in self._blocks)
        deferred = [i for i, block in enumerate(self._blocks) if self._is_deferred(block)]
        deferred_set = set(deferred)
        eager = [i for i in range(len(self._blocks)) if i not in deferred_set]
        versions = self._leaf_versions(deferred)
        self._samples = {i: sample_block(self._blocks[i], self._leaves) for i in deferred}
        thread = threading.Thread(
            target=self._run_in_thread, args=(deferred, versions), name=f"ckpt-save-{self._step}", daemon=True
        )
        try:
            self._borrow_arena(_arena_bytes(total, self._options))
            if self._arena is not None and total > self._arena.capacity_bytes:
                self._writing_allowed.set()
            thread.start()
        except BaseException as error:
            self._fail(error)
            self._end()
            self._handle.take_error()
            raise
        try:
            began = time.monotonic()
            self._stage_in_parallel(eager)
            self._copied_seconds = time.monotonic() - began
        except BaseException as error:  # interrupted while it waited for its helpers
            self._fail(error)
        finally:
            self._eager_staged.set()
        if not deferred:
            self._handle.staged.set()
        self._writing_allowed.set()
        if self._error is not None:  # found while the caller is still here: tell it now
            thread.join()
            failed = self._handle.take_error()
            assert failed is not None
            raise failed

    def _run_in_thread(self, deferred: list[int], versions: dict[int, tuple[str, ArrayLeaf, int]]) -> None:
        lower_thread_priority()
        try:
            self._writing_allowed.wait()
            if self._group.size > 1 and not deferred:
                time.sleep(min(_YIELD_SECONDS, self._copied_seconds / 2))  # none where the arena is full already
            self._prepare()
            stager = threading.Thread(target=self._stage_deferred, args=(deferred, versions), name="ckpt-stage", daemon=True)
            stager.start()
            self._write_and_commit(stager)
        except BaseException as error:
            self._fail(error)
        finally:
            self._eager_staged.wait()  # before the arena goes back: the caller may still be copying into it
            self._end()

    def _borrow_arena(self, nbytes: int) -> None:
        largest = max((round_up(b.nbytes) for b in self._blocks), default=0)
        if nbytes or largest:
            # Twice the largest block: a ring that a block nearly fills could otherwise never turn.
            arena_bytes = max(nbytes, min(2 * largest, 2 * BLOCK_BYTES))
            try:
                self._arena = arenas.pool.borrow(arena_bytes)
            except (MemoryError, OSError) as error:
                raise StagingFailed(
                    f"saving step {self._step} to {self._store.url}: no {arena_bytes >> 20} MiB for staging "
                    f"({first_line(error)}): "
                    f"{MORE_MEMORY_ADVICE}"
                ) from error
            if any(leaf.flat is None and leaf.is_on_cuda() for leaf in self._flat.leaves.values()):
                self._arena.pin()

    def _is_deferred(self, block: Block) -> bool:
        is_deferrable = self._options.deferrable
        leaves = [self._leaves[p.leaf] for p in block.pieces]
        return all(
            leaf.is_frozen() or (is_deferrable is not None and is_deferrable(leaf) and can_be_sampled(leaf)) for leaf in leaves
        )

    def _leaf_versions(self, deferred: list[int]) -> dict[int, tuple[str, ArrayLeaf, int]]:
        """The leaves of these blocks that count their changes, by number, each with its count now."""
        found: dict[int, tuple[str, ArrayLeaf, int]] = {}
        for i in deferred:
            for piece in self._blocks[i].pieces:
                leaf = self._leaves[piece.leaf]
                if (version := leaf.version()) is not None:
                    found[piece.leaf] = (self._leaf_names[piece.leaf], leaf, version)
        return found

    def _fail(self, error: BaseException) -> None:
        """Remember the first error and wake everyone."""
        if self._error is None and not isinstance(error, ArenaAbandoned):
            self._error = error
        if self._arena is not None:
            self._arena.abandon()
        self._writing_allowed.set()

    def _end(self) -> None:
        self._append_began.set()  # or never will be
        self._session.lease.writer.end_attempt(self._attempt)
        if self._arena is not None:
            arenas.pool.give_back(self._arena)
        error = self._error
        if error is not None:
            self._session.forget_previous()
            if not self.committer.is_outcome_reported:
                give_up_attempt(self._session, self._attempt, error)
        if isinstance(error, OSError):
            store_error = StoreError(f"saving step {self._step} to {self._store.url} failed: {error}")
            store_error.__cause__ = error
            error = store_error
        self._handle.end(self._checkpoint, self._session.lease.writer.explain_failure(error))

    # --- staging -----------------------------------------------------------------------------------------------

    def _stage(self, indices: Iterable[int], is_last: bool, with_digests: bool) -> None:
        """Copy blocks into the arena and pass them on; `end` tells the writers that there are no more.

        `summing`: digest each at once, while it is still in the cache. Not where the training loop waits for the copy.
        """
        try:
            arena = self._arena
            for i in indices:
                if self._error is not None or arena is None:
                    break
                block = self._blocks[i]
                region = arena.take(block.nbytes, wait=False)
                if region is None:
                    self._writing_allowed.set()  # full: only the writers can make room
                    region = arena.take(block.nbytes)
                    assert region is not None
                failpoint("save.stage")
                self._copy(block, region)
                if (earlier := self._samples.get(i)) and (
                    changed := first_changed_leaf(block, earlier, region.data)
                ) is not None:
                    raise self._changed_error(self._leaf_names[changed])
                sums = digest_and_cells(self._algorithm, region.data[: block.nbytes].data) if with_digests else None
                self._session.lease.progress_count += 1
                self._staged_blocks.put(_StagedBlock(i, region, sums))
        except BaseException as error:
            self._fail(error)
        finally:
            if is_last:
                for _ in range(self._writer_count):
                    self._staged_blocks.put(None)

    def _copy(self, block: Block, region: Region) -> None:
        try:
            stage_block(block, self._leaves, region.data)
        except CkptError:
            raise
        except Exception as error:  # frameworks raise what they like
            others = " or another one of its block" if len(block.pieces) > 1 else ""
            raise StagingFailed(
                f"leaf {self._leaf_names[block.pieces[0].leaf]}{others} could not be copied for step {self._step} "
                f"({type(error).__name__}: {first_line(error)}): {MORE_MEMORY_ADVICE}"
            ) from error

    def _stage_in_parallel(self, indices: list[int]) -> None:
        """Stage with as many threads as copy faster than one, the caller among them."""
        threads = max(1, min(4, processor_count(), len(indices) // 4))
        share = _SharedIterator(indices)
        args = (share, False, False)
        helpers = [threading.Thread(target=self._stage, args=args, name="ckpt-stage", daemon=True) for _ in range(threads - 1)]
        for helper in helpers:
            helper.start()
        self._stage(*args)
        for helper in helpers:
            helper.join()

    def _stage_deferred(self, deferred: list[int], versions: dict[int, tuple[str, ArrayLeaf, int]]) -> None:
        """Stage what may be read later, and prove that it was not changed meanwhile."""
        self._stage(deferred, False, True)
        self._eager_staged.wait()
        for name, leaf, version in versions.values():
            if leaf.version() != version:
                self._fail(self._changed_error(name))
                break
        self._handle.staged.set()
        for _ in range(self._writer_count):
            self._staged_blocks.put(None)

    def _changed_error(self, name: str) -> StateChanged:
        return StateChanged(
            f"leaf {name} was changed while step {self._step} was being staged; this save is given up. "
            "Change attached parameters only through the optimizer's step(), or save without attach()"
        )

    # --- writing -----------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        self._session.prepare()
        self._previous_blocks, self._previous_packs = self._session.previous_blocks(
            self._algorithm, self._attempt, self._options.copies
        )

    def _write_and_commit(self, stager: threading.Thread) -> None:
        if "pyarrow.parquet" not in sys.modules:  # its import takes longer than a commit: let it overlap with writing
            threading.Thread(target=self._import_for_commit, name="ckpt-import", daemon=True).start()
        prefix = f"{step_folder(self._step)}/pack/{self._attempt.name}"
        total = sum(round_up(b.nbytes) for b in self._blocks)
        packs: list[PackFile] = []
        try:
            with PackWriter(self._store, lambda n: f"{prefix}-{n}.pack", total) as writer:
                writers = [
                    threading.Thread(target=self._write_blocks, args=(writer,), name="ckpt-write", daemon=True)
                    for _ in range(self._writer_count - 1)
                ]
                try:
                    for thread in writers:
                        thread.start()
                    self._write_blocks(writer)
                    for thread in [*writers, stager]:
                        thread.join()
                except BaseException as error:  # interrupted: no thread may outlive the pack and the arena it uses
                    self._fail(error)
                    for thread in [*writers, stager]:
                        if thread.ident is not None:
                            thread.join()
                    raise
                if self._error is not None:
                    raise self._error
                packs = writer.close()
            checkpoint = self._commit(packs)
        except BaseException as error:
            self.committer.discard(error)
            raise
        blocks = StepBlocks(self._step_blocks, {f.name: f.nbytes for f in checkpoint.commit.packs})
        self._session.remember_blocks(self._attempt, self._algorithm, blocks, self._options.copies)
        self._checkpoint = checkpoint
        log.info(
            "saved step %d to %s: %.3f GB, %.3f GB written, %.2f s",
            self._step, self._store.url, checkpoint.commit.raw_bytes / 1e9,
            checkpoint.commit.written_bytes / 1e9, time.monotonic() - self._started_at,
        )  # fmt: skip
        self._session.lease.progress_count += 1
        in_use = self._options.in_flight + self._options.copies - 1
        self._session.note_committed(self._step, checkpoint.commit.files(), in_use)
        self._session.lease.writer.end_attempt(self._attempt)  # its files belong to the step now
        self._session.sweep(self._options.keep, self._step, self.committer.replaced_files)

    def _import_for_commit(self) -> None:
        """What the commit needs, once the disk is busy: before that it would only keep the first blocks from it."""
        self._append_began.wait()
        manifest.import_parquet()

    def _write_blocks(self, packs: PackWriter) -> None:
        try:
            while (item := self._staged_blocks.get()) is not None:
                try:
                    if self._error is None:
                        self._stored_blocks[item.number] = self._store_block(packs, self._blocks[item.number], item)
                finally:
                    self._session.lease.progress_count += 1
                    if self._arena is not None:
                        self._arena.give_back(item.region)
        except BaseException as error:
            self._fail(error)  # nothing more is taken: where an interrupt came after the word of the end, the next is another's

    def _store_block(self, packs: PackWriter, block: Block, staged: _StagedBlock) -> StoredBlock:
        region = staged.region
        if staged.sums is not None:
            block_digest, cells = staged.sums
        else:
            with self._compute_slot():
                block_digest, cells = digest_and_cells(self._algorithm, region.data[: block.nbytes].data)
        if self._checks_nan:
            self._check_nan(staged.number, block, region.data)
        key = (block_digest, block.nbytes)
        location = self._previous_blocks.get(key)
        if location is not None and not location.is_verified:
            location = self._verified_previous(key, location)
        if location is None:
            with self._compute_slot():
                self._changing_leaves.compare_block(block, self._specs, region.data)
            location = self._append(packs, block, region)
        else:
            self._referenced_packs.add(location.pack)
        self._step_blocks[key] = location
        if location.codec is not None:
            cells = b""
        return StoredBlock(
            location.pack,
            location.position,
            location.stored,
            block.nbytes,
            location.codec,
            block_digest,
            location.checksum,
            cells,
        )

    def _check_nan(self, number: int, block: Block, data: Bytes) -> None:
        pieces_and_ranges = self._checked_ranges.get(number)
        if pieces_and_ranges is None:
            pieces = [(self._leaves[p.leaf].dtype, p.start, p.start + p.nbytes) for p in block.pieces]
            pieces_and_ranges = self._checked_ranges[number] = pieces, checked_ranges(pieces)
        with self._compute_slot():
            found = first_nan(data, *pieces_and_ranges)
        if found is None:
            return
        name, url = self._leaf_names[block.pieces[found].leaf], self._store.url
        if self._options.nan == "refuse":
            raise NotFinite(
                f"leaf {name} has a NaN, and step {self._step} is not saved to {url} (nan='refuse'): go on from an earlier "
                "step with restore(), or save with nan='allow' where it belongs there"
            )
        self._checks_nan = False
        if url not in _warned_of_nan:
            _warned_of_nan.add(url)
            log.warning(
                "leaf %s has a NaN in step %d, which is saved to %s all the same; there is no further warning. nan='refuse' "
                "keeps such steps from being saved, nan='allow' is for a NaN that belongs there", name, self._step, url,
            )  # fmt: skip

    def _verified_previous(self, key: tuple[bytes, int], previous: PreviousBlock) -> PreviousBlock | None:
        """A block that another process has written, read once; None where it may not be referred to."""
        if key in self._bad_blocks or previous.pack in self._unreadable_packs:
            return None
        try:
            if is_block_intact(self._store, self._algorithm, key, previous, self._compute_slot):
                previous = self._previous_blocks[key] = replace(previous, is_verified=True)
                return previous
            self._bad_blocks.add(key)
        except StoreError as error:
            if previous.pack not in self._unreadable_packs:
                log.warning("%s; nothing of %s is referred to, but written again", error, previous.pack)
            self._unreadable_packs.add(previous.pack)
        return None

    def _compute_slot(self) -> AbstractContextManager[object]:
        """In it a writer hashes or encodes. Once the caller trains on, one processor is its: two writers that hash at once
        would take turns with it."""
        return self._processor_slots if self._eager_staged.is_set() else nullcontext()

    def _append(self, packs: PackWriter, block: Block, region: Region) -> PreviousBlock:
        raw = region.data[: block.nbytes]
        config = block.codec
        if config == "auto":
            config = self._tuner.pick(self._leaves[block.pieces[0].leaf].dtype, raw, block.itemsize)
        stored, padded, check = block.nbytes, region.data[: round_up(block.nbytes)], None
        if config is not None:
            with self._compute_slot():
                encoded = codec.encode(config, raw, block.itemsize)
                if len(encoded) > _MAX_STORED_FRACTION * block.nbytes:
                    config = None
                else:
                    stored, check = len(encoded), checksum(encoded)
            if config is not None:
                padded = region.data[: round_up(stored)]  # the raw bytes are not needed any more
                padded[:stored] = encoded
                padded[stored:] = 0
        self._append_began.set()
        self._tuner.write_began()
        try:
            pack, position = packs.append(padded.data)
        finally:
            self._tuner.write_ended(len(padded))
        return PreviousBlock(pack, position, stored, config, check, is_verified=True)

    def _commit(self, packs: list[PackFile]) -> Checkpoint:
        blocks = [stored for stored in self._stored_blocks if stored is not None]
        assert len(blocks) == len(self._blocks)  # else a writer failed, and the save has ended there
        with collector_paused():
            rows = manifest.build_table(self._planned_columns, blocks)
        sizes = {**self._previous_packs, **{p.name: p.nbytes for p in packs}}
        referenced_packs = {name: sizes[name] for name in sorted(self._referenced_packs | {p.name for p in packs})}
        written = sum(p.nbytes for p in packs)
        return self.committer.commit(rows, self._algorithm, referenced_packs, written, sharded=self._has_shards)


class _StagedBlock(NamedTuple):
    """A block in the arena, with its digest and cells if they are known already."""

    number: int
    region: Region
    sums: tuple[bytes, bytes] | None


class _SharedIterator:
    """One iteration shared by several threads."""

    def __init__(self, items: Iterable[int]) -> None:
        self._items = iter(items)
        self._lock = threading.Lock()

    def __iter__(self) -> _SharedIterator:
        return self

    def __next__(self) -> int:
        with self._lock:
            return next(self._items)
