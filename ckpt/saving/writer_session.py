"""The class WriterSession, the saves of one process to one repository: its lease, pending saves, previous blocks.

All savers of one process share one session for a URL (`session_registry.py`), and the last one to leave releases the lease.
The ranks of a group make collective calls only when their session begins (`session_start.py`). After that they exchange files
in the store, and notes about failures for which no rank waits (`failure_reports.py`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING

from ckpt.block_io.replicated_store import bad_files
from ckpt.errors import SaveFailed
from ckpt.format.pack import file_lengths
from ckpt.format.training_lines import TrainingLine
from ckpt.groups.base import Group
from ckpt.repository.attempt import Attempt
from ckpt.repository.damage_registry import clear_damaged, damaged_steps
from ckpt.repository.repository import Repository
from ckpt.repository.retention import Keep, sweep
from ckpt.saving.dedup import StepBlocks, without_packs
from ckpt.saving.lineage import Lineage
from ckpt.saving.previous_steps import CommittedFiles, PreviousSteps
from ckpt.saving.session_start import RequestedStep, SessionStart
from ckpt.saving.step_drift import DriftDetector
from ckpt.storage.base.errors import InvalidArgument

if TYPE_CHECKING:
    from ckpt.saving.handle import SaveHandle

log = logging.getLogger("ckpt")


class WriterSession:
    """Shared by all savers of this process to one repository. Owns the leases of the process and of its group."""

    def __init__(self, repo: Repository, group: Group, start: SessionStart) -> None:
        self.repo = repo
        self.group = group
        self.group_lease = start.lease
        self.writer_lease = start.lease.writer
        self.url_and_rank = repo.url, group.rank
        self.user_count = 0
        """The number of savers that share the session. Guarded by the lock of the registry."""
        self.drift = DriftDetector()
        self.lineage = Lineage(repo, self.writer_lease.generation, partial(damaged_steps, repo))
        self.superseded_failure: SaveHandle | None = None
        """The last failed save whose error a later save may supersede, until one succeeds."""
        self._next_step = start.next_step
        """In a group, the number after its newest save; None without a group. Only the thread that begins saves uses it."""
        self._rank_0_requested_step = start.rank_0_requested_step
        self._noted_lines: set[TrainingLine] = set()
        """The training lines that the repository has for certain. No lock: a line that is recorded twice does no harm."""
        self._previous_steps = PreviousSteps(repo, group)
        self._lock = threading.Lock()
        """Guards changes of `_pending_saves`. A method that only looks at it takes no lock: nothing is removed from it in
        place."""
        self._pending_saves: list[SaveHandle] = []
        self._recent_commits: list[CommittedFiles] = []
        """The last commits, to whose packs other ranks may refer. Guarded by the sweep lock of the lease."""
        self._commits_in_use = 1
        """How many of them ranks may refer to. Guarded by the same lock."""

    def require_same_keys(self, repo: Repository) -> None:
        """Raise InvalidArgument if a saver that joins the session signs with other keys than the session."""
        if repo.keys != self.repo.keys:
            raise InvalidArgument(
                f"this process saves to {repo.url} already, with another key or with none; give each saver of one URL the same "
                "key="
            )

    def next_step(self) -> int:
        """Return the number after the newest step and after all saves that have not ended, the same on all ranks."""
        return self.writer_lease.next_step() if self._next_step is None else self._next_step

    def begin_attempt(self, step: int | None) -> Attempt:
        """Return a new attempt at a step. Without a group, two saves that begin at once never get the same next step.

        step: None for the next step.
        """
        if step is None and self._next_step is None:
            return self.group_lease.begin_next_attempt()
        return self.group_lease.begin_attempt(self.next_step() if step is None else step)

    def take_rank_0_requested_step(self) -> RequestedStep:
        """Return the step that rank 0 was asked to save when the session began; after the first call, an empty tuple."""
        requested, self._rank_0_requested_step = self._rank_0_requested_step, ()
        return requested

    def note_save_began(self, step: int) -> None:
        """Record that a save of this step begins."""
        if self._next_step is not None:
            self._next_step = max(self._next_step, step + 1)

    # --- pending saves -----------------------------------------------------------------------------------------

    def add_save(self, handle: SaveHandle, limit: int) -> None:
        """Add a new save, after waiting until fewer than `limit` saves run, and none of the same step.

        Of two saves of one step that run at once, the older one could replace the newer one, and a rank could miss the record
        of the one that was replaced.

        Raises SaveFailed if a running save makes no progress any more.
        """
        while True:
            with self._lock:
                busy = [h for h in self._pending_saves if not h.done()]
                blockers = busy if len(busy) >= limit else [h for h in busy if h.step == handle.step]
                if not blockers:
                    self._pending_saves.append(handle)
                    return
            blockers[0].require_end()

    def raise_failed(self) -> None:
        """Raise SaveFailed for the first save in the background that failed and whose error the user has not seen."""
        if not self._pending_saves:  # true for most steps, and faster than the lock
            return
        with self._lock:
            ended = [h for h in self._pending_saves if h.done()]  # once: a save may fail meanwhile
            failed = [h for h in ended if h.has_error_to_raise()]
            self._pending_saves = [h for h in self._pending_saves if h not in ended or h in failed[1:]]
        if failed:
            error = failed[0].take_error()
            raise SaveFailed(f"saving step {failed[0].step} to {self.repo.url} in the background failed: {error}") from error

    def raise_last_failure(self) -> None:
        """At the end of the session: raise SaveFailed if the last save failed and none has superseded its error."""
        handle, self.superseded_failure = self.superseded_failure, None
        if handle is not None and handle.has_unseen_error():
            error = handle.take_error()
            raise SaveFailed(f"saving step {handle.step}, the last of the run, to {self.repo.url} failed: {error}") from error

    def wait(self) -> None:
        """Wait for all pending saves; raise SaveFailed if one makes no progress any more."""
        with self._lock:
            pending = list(self._pending_saves)
        for handle in pending:
            handle.require_end()

    def wait_staged(self) -> None:
        """Wait until no pending save reads the state any more; raise SaveFailed if one makes no progress any more."""
        with self._lock:
            pending = list(self._pending_saves)
        for handle in pending:
            handle.require_staged()

    def has_stalled_save(self) -> bool:
        """Return whether a pending save makes no progress any more."""
        return any(h.has_stalled() for h in self._pending_saves)

    def has_unseen_error(self) -> bool:
        """Return whether a save failed, the user has not seen its error, and no later save supersedes it."""
        return any(h.has_error_to_raise() for h in self._pending_saves)

    def unreported_failures(self) -> list[SaveHandle]:
        """Return the failed saves whose errors the user has not seen, for the end of the program, superseded ones too."""
        superseded = [self.superseded_failure] if self.superseded_failure is not None else []
        handles = dict.fromkeys([*superseded, *self._pending_saves])  # a save may be in both; in the order of the saves
        return [h for h in handles if h.has_error_to_raise() or (h in superseded and h.has_unseen_error())]

    # --- previous blocks, and the sweep ------------------------------------------------------------------------

    def sweep_temporaries(self) -> None:
        """Delete temporary files of killed writers, before this session writes its first file."""
        if self.group.size == 1:  # in a group, rank 0 has done this when the session began
            self.writer_lease.sweep_temporaries_once()

    def previous_blocks(self, algorithm: str, attempt: Attempt, copies: int = 1) -> StepBlocks:
        """Return the blocks to which the attempt may refer (`dedup.referable_blocks`), and the lengths of their packs.

        Blocks of missing or damaged packs are left out. No sweep deletes these packs before the attempt has ended.

        algorithm: the digest algorithm.
        copies: see `Keep`.
        """
        previous = self._previous_steps.referable_blocks(algorithm, copies, self.lineage, self._note_previous)
        packs = previous.packs
        with self.writer_lease.sweep_lock:
            self.writer_lease.pin_packs(attempt, packs)
            sizes = file_lengths(self.repo.store, packs)
        unusable = {name for name, nbytes in packs.items() if sizes.get(name) != nbytes} | bad_files(self.repo.url)
        return without_packs(previous, unusable)

    def remember_blocks(self, attempt: Attempt, algorithm: str, step_blocks: StepBlocks, copies: int = 1) -> None:
        """Keep the blocks of a committed step, to which the next one may refer. An older save that ends late is ignored."""
        self._previous_steps.remember(attempt, algorithm, step_blocks, copies, self.lineage)
        clear_damaged(self.repo, attempt.step)

    def forget_previous(self) -> None:
        """Read the committed steps again before the next save. Call it before a load, and if a save failed or its end is
        unknown."""
        self._previous_steps.forget()

    def record_line(self, line: TrainingLine) -> None:
        """Record a training line in the repository, once, before the first commit on it; not needed for the first line."""
        if line not in self._noted_lines:
            self.repo.record_line(line)
            self._noted_lines.add(line)

    def pin_packs(self, attempt: Attempt, packs: Iterable[str]) -> None:
        """Protect these packs from sweeps until the attempt has ended."""
        with self.writer_lease.sweep_lock:
            self.writer_lease.pin_packs(attempt, packs)

    def note_committed(self, step: int, files: Iterable[str], commits_in_use: int) -> None:
        """Record a commit, so that no sweep deletes packs to which another rank of the group may still refer.

        A rank refers to the newest commit that it has seen, or with several copies to an earlier one.

        files: the names of the files of the step.
        commits_in_use: the number of last commits to which a rank may refer.
        """
        with self.writer_lease.sweep_lock:
            self._commits_in_use = max(self._commits_in_use, commits_in_use)
            self._recent_commits = [*self._recent_commits, CommittedFiles(step, files)][-self._commits_in_use :]
            if self.group.size > 1:
                self.writer_lease.note_commits(self.group_lease.number, (each.step for each in self._recent_commits))

    def _note_previous(self, read: list[CommittedFiles]) -> None:
        if self.group.size > 1:
            with self.writer_lease.sweep_lock:
                self._recent_commits = self._recent_commits or read

    def make_room(self, keep: Keep | None, replaced_files: Collection[str] = ()) -> None:
        """Delete what no step needs because the store is full, without waiting for the next commit. Only rank 0 does.

        keep: which steps to keep; None for all.
        replaced_files: as for `sweep`.
        """
        if not self.group_lease.rank:
            log.warning("%s is full: files that no step needs are deleted", self.repo.url)
        self.sweep(keep, set(), replaced_files)

    def sweep(self, keep: Keep | None, saved_steps: set[int], replaced_files: Collection[str]) -> None:
        """Delete what is not needed any more after the commit of a step. Only rank 0 does. An error is logged, not raised.

        keep: which steps to keep; None for all.
        saved_steps: stay in any case.
        replaced_files: the files of an earlier save of the same step.
        """
        if self.group_lease.rank:
            return
        try:
            with self.writer_lease.sweep_lock:
                recent = self._recent_commits if self.group.size > 1 else []
                protected_packs = set[str]().union(*(each.names for each in recent))
                spared_steps = saved_steps.union({each.step for each in recent})
                spared_steps |= self.writer_lease.spared_steps(self.group_lease.number)
                damaged = damaged_steps(self.repo)
                sweep(self.repo, self.writer_lease, keep, spared_steps, damaged, protected_packs, replaced_files)
        except Exception as error:  # also MemoryError: the step is committed, whatever happens here
            log.warning("deleting old files of %s failed; the next save tries again: %s", self.repo.url, error)
