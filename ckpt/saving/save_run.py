"""The class SaveRun, which runs one save attempt from the plan to the commit, and owns its threads."""

from __future__ import annotations

import logging
import sys
import threading
import time

from ckpt.errors import StepSkipped
from ckpt.format import manifest_encoding
from ckpt.format.difference_choice import automatic_range
from ckpt.format.digest import is_cryptographic
from ckpt.format.pack import PackWriter
from ckpt.repository.attempt import Attempt
from ckpt.repository.checkpoint import Checkpoint
from ckpt.repository.file_names import step_folder
from ckpt.saving.attempt_failure import AttemptFailure
from ckpt.saving.block_writer import BlockWriter, WritingParts, WrittenBlocks, join_written
from ckpt.saving.buffer_shares import BufferDigests
from ckpt.saving.changing_leaves import ChangingLeaves
from ckpt.saving.codec_tuner import SaveCodecs, SaveConditions, codec_tuner, ranks_on_host
from ckpt.saving.committer import Committer
from ckpt.saving.compute_slots import ComputeSlots
from ckpt.saving.dedup import PreviousBlockIndex, StepBlocks
from ckpt.saving.deferred_blocks import DeferredBlocks, find_deferred_blocks
from ckpt.saving.difference_encoder import DifferenceSource, difference_history_of, newest_step
from ckpt.saving.failure_reports import lacks_space
from ckpt.saving.handle import SaveHandle
from ckpt.saving.nan_guard import NanGuard
from ckpt.saving.options import Options
from ckpt.saving.save_plan import SavePlan
from ckpt.saving.skipped_step import give_up_attempt
from ckpt.saving.staging import StagedBlocks, Stager
from ckpt.saving.staging_memory import StagingMemory, background_arena_bytes, blocking_arena_bytes
from ckpt.saving.writer_session import WriterSession
from ckpt.storage.base.errors import StoreError
from ckpt.storage.base.threads import WorkerThread, join_all, start_available, try_start
from ckpt.support.runtime import collector_paused, lower_thread_priority

log = logging.getLogger("ckpt")

_ENCODERS = 8
"""The number of writer threads if a codec was requested. Otherwise it is the number of parallel appends of the store."""

_YIELD_SECONDS = 0.05
"""The longest pause of a rank between staging and writing; it is at most half the time of its staging. Meanwhile the other
ranks of the host can end their staging, for which their training waits. Niceness may have no effect between processes
(autogroup, sched(7)). With four ranks on two processors, the slowest takes 1.2 times as long as a plain copy, and 1.35 times
without the pause."""


class SaveRun:
    """One save attempt. The caller and its helper threads stage, writer threads write, and one thread commits.

    *Deferred* blocks are copied after a background save has returned: nothing can change them, or the optimizer waits for this
    copy before it does (`Checkpointer.attach`, `deferred_blocks.py`). All other blocks are *eager*: they are copied before the
    save returns.

    The threads share only objects that are safe to use from many threads: the failure, the arena, the queue of staged blocks,
    and events. All other attributes are set in `__init__`, except `_background_thread`, which only the caller uses, and
    `_copied_seconds`, which it sets for the committing thread.
    """

    def __init__(
        self, session: WriterSession, handle: SaveHandle, attempt: Attempt, plan: SavePlan, options: Options,
        committer: Committer, changing: ChangingLeaves, buffers: BufferDigests,
    ) -> None:  # fmt: skip
        self._session = session
        self._handle = handle
        self._attempt = attempt
        self._plan = plan
        self._options = options
        self._committer = committer
        self._changing = changing
        self._buffers = buffers
        self._store = session.repo.store
        self._where = f"saving step {plan.step} to {self._store.url}"
        self._started_at = time.monotonic()
        encodes = options.full_every not in (None, "auto") or any(block.codec not in (None, "auto") for block in plan.blocks)
        self._writer_count = _ENCODERS if encodes else self._store.parallel_appends
        self._failure = AttemptFailure()
        self._memory = StagingMemory()
        self._failure.on_error(self._memory.abandon)
        self._staged = StagedBlocks(self._writer_count)
        self._stager = Stager(plan, self._memory, self._staged, self._failure, session.group_lease.count_progress)
        self._eager_staged = threading.Event()
        """For a save in the background: set when all blocks but the deferred ones are staged, and the caller continues."""
        self._append_began = threading.Event()
        self._background_thread: WorkerThread | None = None
        self._has_made_room = False
        self._copied_seconds = 0.0
        """How long the caller copied. Set before the writers of a group begin, unless the arena was full before."""

    # --- blocking and in the background ------------------------------------------------------------------------

    def run_blocking(self) -> None:
        """Save while the caller waits. Staging and writing overlap, in a small arena. On errors, call `abandon`."""
        staging_thread = WorkerThread(target=self._stager.stage_all, name="ckpt-stage", daemon=True)
        checkpoint: Checkpoint | None = None
        self._memory.writing_allowed.set()
        try:
            arena_bytes = blocking_arena_bytes(self._plan.total_bytes, self._writer_count, self._options.memory)
            self._memory.borrow(arena_bytes, self._plan, self._where)
            previous = self._find_previous_blocks()
            staging_thread.start()
            checkpoint = self._write_and_commit(previous, staging_thread, caller_waits=True)
        except BaseException as error:
            self._failure.report(error)
            join_all([staging_thread], self._failure.report)
        finally:
            self._end_attempt(checkpoint)

    def run_in_background(self) -> None:
        """Stage while the caller waits: all blocks, or as many as fit in the memory. A thread writes and commits them.

        On errors, call `abandon`.
        """
        total = self._plan.total_bytes
        deferred = find_deferred_blocks(self._plan, self._options.deferrable)
        deferred_numbers = set(deferred.numbers)
        eager = [i for i in range(len(self._plan.blocks)) if i not in deferred_numbers]
        thread = WorkerThread(target=self._run_in_thread, args=(deferred,), name=f"ckpt-save-{self._plan.step}", daemon=True)
        self._background_thread = thread
        self._memory.borrow(background_arena_bytes(total, self._options.memory), self._plan, self._where)
        if self._memory.is_less_than(total):
            self._memory.writing_allowed.set()
        thread.start()
        began = time.monotonic()
        self._stager.stage_in_parallel(eager)
        self._copied_seconds = time.monotonic() - began
        self._eager_staged.set()
        if not deferred.numbers:
            self._handle.staged.set()
        self._memory.writing_allowed.set()
        if self._failure.error is not None and not isinstance(self._failure.error, StepSkipped):
            # The caller has not returned yet: raise it now.
            thread.join()
            failed = self._handle.take_error()
            assert failed is not None
            raise failed

    def abandon(self, error: BaseException) -> None:
        """End the attempt and its handle after an error in the thread of the caller, unless they have ended.

        If all eager blocks are staged, the save in the background continues instead.
        """
        thread = self._background_thread
        if self._handle.done():
            self._handle.take_error()
        elif thread is None or thread.cancel():
            self._failure.report(error)
            self._end_attempt(None)
            self._handle.take_error()
        elif self._eager_staged.is_set():  # from now on, the thread may return the staging memory at any time
            self._memory.writing_allowed.set()
        else:
            self._failure.report(error)
            self._eager_staged.set()
            thread.join()
            self._handle.take_error()

    def _run_in_thread(self, deferred: DeferredBlocks) -> None:
        lower_thread_priority()
        args = (deferred, self._eager_staged, self._handle.staged.set)
        staging_thread = WorkerThread(target=self._stager.stage_deferred, args=args, name="ckpt-stage", daemon=True)
        checkpoint: Checkpoint | None = None
        try:
            self._memory.writing_allowed.wait()
            if self._session.group.size > 1 and not deferred.numbers:
                time.sleep(min(_YIELD_SECONDS, self._copied_seconds / 2))  # no pause if a full arena started the writers early
            previous = self._find_previous_blocks()
            staging_thread.start()
            checkpoint = self._write_and_commit(previous, staging_thread, caller_waits=False)
        except BaseException as error:
            self._failure.report(error)
        finally:  # before the arena is returned: the caller and the stager may still copy into it
            self._eager_staged.wait()
            join_all([staging_thread], self._failure.report)
            if isinstance(self._failure.error, StepSkipped):
                log.warning("%s", self._failure.error)
            self._end_attempt(checkpoint)

    def _end_attempt(self, checkpoint: Checkpoint | None) -> None:
        """End the attempt, and then the handle, for which threads wait: also if the end of the attempt fails."""
        error = self._failure.error
        try:
            error = self._release_attempt(error)
        except Exception as failed:  # e.g. no memory, or no thread for a call of the store
            log.warning("%s: the end of the attempt failed: %s", self._where, failed, exc_info=True)
            if error is None and checkpoint is None:
                error = failed
        finally:
            self._handle.end(checkpoint, error)

    def _release_attempt(self, error: BaseException | None) -> BaseException | None:
        """Release the packs and the staging memory of the attempt, and report a failure to the other ranks.

        Returns the error that the caller of the save gets; None if there is none.
        """
        self._append_began.set()  # also after a failure before the first append, so that no thread waits for it
        self._session.writer_lease.end_attempt(self._attempt)
        self._memory.close()
        if error is not None:
            self._session.forget_previous()
            if lacks_space(error):
                self._make_room()
            if self._committer.needs_failure_report:
                give_up_attempt(self._session, self._attempt, error)
        if isinstance(error, OSError):
            store_error = StoreError(f"{self._where} failed ({error}); check the store, and save again")
            store_error.__cause__ = error
            error = store_error
        return self._session.writer_lease.explain_failure(error)

    # --- writing and the commit, in one thread -----------------------------------------------------------------

    def _find_previous_blocks(self) -> StepBlocks:
        """Return the blocks to which the step may refer, after a sweep of temporary files: nothing is written before it."""
        self._session.sweep_temporaries()
        return self._session.previous_blocks(self._plan.algorithm, self._attempt, self._options.copies)

    def _write_and_commit(self, previous: StepBlocks, staging_thread: threading.Thread, *, caller_waits: bool) -> Checkpoint:
        if "pyarrow.parquet" not in sys.modules:  # its import takes longer than a commit, so it overlaps with writing
            try_start(WorkerThread(target=self._import_for_commit, name="ckpt-import", daemon=True))
        codecs = codec_tuner(self._store.url).begin_save(
            SaveConditions(self._plan.total_bytes, self._writer_count, caller_waits, ranks_on_host(self._session.group.size))
        )
        try:
            try:
                written = self._write_blocks(previous, staging_thread, codecs)
            finally:
                codecs.end()
            checkpoint = self._commit(written, previous.packs, codecs)
        except BaseException as error:
            self._committer.discard(error)
            raise
        self._clean_up_after_commit(checkpoint, written)
        return checkpoint

    def _import_for_commit(self) -> None:
        """Import what the commit needs, after the first append: before that, the import would delay the first blocks."""
        self._append_began.wait()
        manifest_encoding.import_parquet()

    def _write_blocks(self, previous: StepBlocks, staging_thread: threading.Thread, codecs: SaveCodecs) -> WrittenBlocks:
        """Write the staged blocks with several threads, of which this is one; return when all are durable."""
        prefix = f"{step_folder(self._plan.step)}/pack/{self._attempt.name}"
        slots = ComputeSlots(self._eager_staged)
        index = PreviousBlockIndex(self._store, self._plan.algorithm, previous.blocks, slots.slot)
        nan = NanGuard(self._plan, self._options.nan, self._store.url)
        make_room = self._make_room if self._session.group.rank == 0 else None  # the holder of the lease sweeps
        with PackWriter(self._store, lambda n: f"{prefix}-{n}.pack", self._plan.total_bytes, make_room) as packs:
            parts = WritingParts(
                plan=self._plan,
                packs=packs,
                previous=index,
                changing=self._changing,
                buffers=self._buffers,
                nan=nan,
                codecs=codecs,
                slots=slots,
                append_began=self._append_began,
                differences=self._difference_source(previous, slots),
            )
            own, *others = [BlockWriter(parts) for _ in range(self._writer_count)]
            threads = [
                WorkerThread(target=self._write_staged, args=(writer,), name="ckpt-write", daemon=True) for writer in others
            ]
            try:
                start_available(threads)
                self._write_staged(own)
            except BaseException as error:
                self._failure.report(error)
                raise
            finally:  # no thread may outlive the pack and the arena that it uses
                join_all([*threads, staging_thread], self._failure.report)
            self._failure.raise_error()
            with codecs.waiting_for_store():
                files = packs.close()
            return join_written(self._plan, [own, *others], files)

    def _write_staged(self, writer: BlockWriter) -> None:
        try:
            while (staged := self._staged.take()) is not None:
                try:
                    if self._failure.error is None:
                        writer.write(staged)
                finally:
                    self._session.group_lease.count_progress()
                    self._memory.give_back(staged.region)
        except BaseException as error:
            # Take nothing more: if the interrupt came after the sentinel, the next queue item belongs to another writer.
            self._failure.report(error)
        finally:
            writer.close()

    def _difference_source(self, previous: StepBlocks, slots: ComputeSlots) -> DifferenceSource | None:
        """Return where the writers find bases of differences; None if all blocks are stored in full."""
        plan, full_every, keep = self._plan, self._options.full_every, self._options.keep
        if full_every is None or is_cryptographic(plan.algorithm):  # the format has none then: docs/design/differences.md
            return None
        is_automatic = full_every == "auto"
        if full_every == "auto":
            if self._options.copies > 1 or not any(block.codec == "auto" for block in plan.blocks):
                return None
            full_every = automatic_range(plan.step, newest_step(previous.packs), None if keep is None else keep.every)
            if full_every is None:
                return None
        history = difference_history_of(self._session.url_and_rank)
        return DifferenceSource(
            store=self._store,
            algorithm=plan.algorithm,
            step=plan.step,
            full_every=full_every,
            previous=previous,
            history=history,
            compute_slot=slots.slot,
            is_automatic=is_automatic,
        )

    def _commit(self, written: WrittenBlocks, previous_packs: dict[str, int], codecs: SaveCodecs) -> Checkpoint:
        with collector_paused():
            rows = manifest_encoding.build_table(self._plan.columns, written.rows)
        sizes = {**previous_packs, **{p.name: p.nbytes for p in written.packs}}
        names = written.referenced_packs | {p.name for p in written.packs}
        written_bytes = sum(p.nbytes for p in written.packs)
        return self._committer.commit(
            rows, self._plan.algorithm, {name: sizes[name] for name in sorted(names)}, written_bytes,
            sharded=self._plan.has_shards, choices=codecs.choices(),
        )  # fmt: skip

    def _make_room(self) -> None:
        """Delete files that no step needs before the commit, because the store is full. Only the first call does.

        For another rank that lacks space, rank 0 does this when the attempt has failed, so that the next save has room.
        """
        if self._session.group.rank or self._has_made_room:
            return
        self._has_made_room = True
        self._session.group_lease.count_progress()
        self._session.make_room(self._committer.keep_before_commit())
        self._session.group_lease.count_progress()

    def _clean_up_after_commit(self, checkpoint: Checkpoint, written: WrittenBlocks) -> None:
        """After the commit: remember the blocks to which the next step may refer, and delete files that no step needs."""
        plan, commit, options = self._plan, checkpoint.commit, self._options
        step_blocks = StepBlocks(written.blocks, {f.name: f.nbytes for f in commit.packs}, written.positions)
        self._session.remember_blocks(self._attempt, plan.algorithm, step_blocks, options.copies)
        log.info(
            "saved step %d to %s: %.3f GB, %.3f GB written, %.2f s",
            plan.step, self._store.url, commit.raw_bytes / 1e9, commit.written_bytes / 1e9, time.monotonic() - self._started_at,
        )  # fmt: skip
        self._session.group_lease.count_progress()
        self._session.note_committed(plan.step, commit.files(), options.in_flight + options.copies - 1)
        self._session.writer_lease.end_attempt(self._attempt)  # its files belong to the step now
        self._session.sweep(options.keep, {plan.step}, self._committer.replaced_files)
