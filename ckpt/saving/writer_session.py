"""A process that writes to a repository: its lease, its saves under way, and what it remembers of the last steps.

All savers of one process share one session for a URL (`session_registry.py`); the last to leave releases the lease. The ranks
of a group meet once, when their session begins (`session_start.py`). Nothing later talks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING

from ckpt.block_io.replicated_store import bad_files
from ckpt.errors import SaveFailed
from ckpt.format.pack import file_lengths
from ckpt.format.training_lines import TrainingLine
from ckpt.groups.base import Group
from ckpt.repository.damage_registry import clear_damaged, damaged_steps
from ckpt.repository.repository import Repository
from ckpt.repository.retention import Keep, sweep
from ckpt.repository.writer_lease import Attempt
from ckpt.saving.dedup import StepBlocks
from ckpt.saving.lineage import Lineage
from ckpt.saving.previous_steps import CommittedFiles, PreviousSteps
from ckpt.saving.session_start import RequestedStep, SessionStart, next_step_number
from ckpt.saving.step_drift import DriftDetector
from ckpt.storage.base.errors import CkptError, InvalidArgument

if TYPE_CHECKING:
    from ckpt.saving.handle import SaveHandle

log = logging.getLogger("ckpt")


class Session:
    """Shared by all that save to one repository from this process. Owns its lease."""

    def __init__(self, repo: Repository, group: Group, start: SessionStart) -> None:
        self.repo = repo
        self.group = group
        self.lease = start.lease
        self.url_and_rank = repo.url, group.rank
        self.spared_steps: Callable[[], Collection[int]] = tuple
        """Steps that no sweep deletes, for they are still to be copied from here."""
        self.user_count = 0
        """Kept by the registry, under its lock."""
        self.drift = DriftDetector()
        self.lineage = Lineage(repo, self.lease.writer.generation, partial(damaged_steps, repo))
        self.excused_save: SaveHandle | None = None
        """A save that failed, and that a later save makes up for: none has followed yet."""
        self._next_step = start.next_step
        self._rank_0_requested_step = start.rank_0_requested_step
        self._noted_lines: set[TrainingLine] = set()
        self._previous_steps = PreviousSteps(repo, group)
        self._lock = threading.Lock()
        """Guards `_pending_saves`."""
        self._pending_saves: list[SaveHandle] = []
        self._recent_commits: list[CommittedFiles] = []
        """The last commits, whose packs other ranks may refer to; guarded by the sweep lock of the lease."""
        self._commits_in_use = 1

    def require_same_keys(self, repo: Repository) -> None:
        """Raise InvalidArgument where who joins would sign with another key, or with none."""
        if repo.keys != self.repo.keys:
            raise InvalidArgument(
                f"this process saves to {repo.url} already, with another key or with none; give each saver of one URL the same "
                "key="
            )

    def next_step(self) -> int:
        """The number after the newest step, the same on all ranks."""
        if self._next_step is None:
            return next_step_number(self.repo)
        return self._next_step

    def take_rank_0_requested_step(self) -> RequestedStep:
        """What rank 0 was asked to save when the session began; only the first call returns it."""
        requested, self._rank_0_requested_step = self._rank_0_requested_step, ()
        return requested

    def note_save_began(self, step: int) -> None:
        """A save of this step begins."""
        if self._next_step is not None:
            self._next_step = max(self._next_step, step + 1)

    # --- the saves under way -----------------------------------------------------------------------------------

    def add_save(self, handle: SaveHandle, limit: int) -> None:
        """Note a new save; first wait until fewer than `limit` are under way."""
        while True:
            with self._lock:
                busy = [h for h in self._pending_saves if not h.done()]
                if len(busy) < limit:
                    self._pending_saves.append(handle)
                    return
            busy[0].require_end()

    def raise_failed(self) -> None:
        """Raise SaveFailed for the first save of the background that failed and whose error nobody has seen."""
        if not self._pending_saves:  # as it is at most steps
            return
        with self._lock:
            failed = [h for h in self._pending_saves if h.done() and h.unseen()]
            self._pending_saves = [h for h in self._pending_saves if not h.done() or h in failed[1:]]
        if failed:
            error = failed[0].take_error()
            raise SaveFailed(f"saving step {failed[0].step} to {self.repo.url} in the background failed: {error}") from error

    def raise_excused(self) -> None:
        """At the end: raise SaveFailed where the last save failed and no later save made up for it."""
        handle, self.excused_save = self.excused_save, None
        if handle is not None and handle.unasked():
            error = handle.take_error()
            raise SaveFailed(f"saving step {handle.step}, the last of the run, to {self.repo.url} failed: {error}") from error

    def wait(self) -> None:
        """Wait for all saves under way; raise SaveFailed where one makes no progress any more."""
        with self._lock:
            pending = list(self._pending_saves)
        for handle in pending:
            handle.require_end()

    def wait_staged(self) -> None:
        """Wait until no save under way reads the state any more."""
        with self._lock:
            pending = list(self._pending_saves)
        for handle in pending:
            handle.require_staged()

    def has_stuck_save(self) -> bool:
        """Whether a save under way makes no progress any more."""
        return any(h.is_stuck() for h in self._pending_saves)

    def has_unseen_error(self) -> bool:
        """Whether a save failed and nobody has its error yet."""
        return any(h.unseen() for h in self._pending_saves)

    def unreported_failures(self) -> list[SaveHandle]:
        """At the end of the program: the saves that failed and whose error nobody has seen, excused or not."""
        excused = [self.excused_save] if self.excused_save is not None else []
        handles = {*self._pending_saves, *excused}
        return [h for h in handles if h.unseen() or (h in excused and h.unasked())]

    # --- what the last steps consist of ------------------------------------------------------------------------

    def prepare(self) -> None:
        """Before the first file is written."""
        if self.group.size == 1:  # a group has done it before it met
            self.lease.writer.sweep_temporaries_once()

    def previous_blocks(self, algorithm: str, attempt: Attempt, copies: int = 1) -> StepBlocks:
        """Blocks that the attempt may refer to, whose packs exist, and the lengths of those packs: of the newest committed
        step, or with several copies of one before it (`dedup.referable_blocks`).

        Nothing of them is deleted before the attempt, which may refer to them, has ended.
        """
        blocks, packs = self._previous_steps.referable_blocks(algorithm, copies, self.lineage, self._note_previous)
        with self.lease.writer.sweep_lock:
            self.lease.writer.pin_packs(attempt, packs)
            sizes = file_lengths(self.repo.store, packs)
        unusable = {name for name, nbytes in packs.items() if sizes.get(name) != nbytes} | bad_files(self.repo.url)
        if unusable:
            blocks = {k: b for k, b in blocks.items() if b.pack not in unusable}
        return StepBlocks(blocks, packs)

    def remember_blocks(self, attempt: Attempt, algorithm: str, step_blocks: StepBlocks, copies: int = 1) -> None:
        """Keep the blocks of a step just committed, for a later one to refer to; not those of an older save that ends late."""
        self._previous_steps.remember(attempt, algorithm, step_blocks, copies, self.lineage)
        clear_damaged(self.repo, attempt.step)

    def forget_previous(self) -> None:
        """A save failed, or its end was not seen: look again at what is committed before the next one."""
        self._previous_steps.forget()

    def note_line(self, line: TrainingLine) -> None:
        """Before the first commit here on a line that is not the first one."""
        if line not in self._noted_lines:
            self.repo.note_line(line)
            self._noted_lines.add(line)

    def pin_packs(self, attempt: Attempt, packs: Iterable[str]) -> None:
        """No sweep takes these packs before the attempt has ended."""
        with self.lease.writer.sweep_lock:
            self.lease.writer.pin_packs(attempt, packs)

    def note_committed(self, step: int, files: Iterable[str], commits_in_use: int) -> None:
        """For rank 0 of a group: another rank may refer to the packs of the last `commits_in_use` commits. It has seen
        one of the last that are in flight, and refers to it, or with several copies to one before it."""
        with self.lease.writer.sweep_lock:
            self._commits_in_use = max(self._commits_in_use, commits_in_use)
            self._recent_commits = [*self._recent_commits, CommittedFiles(step, files)][-self._commits_in_use :]

    def _note_previous(self, read: list[CommittedFiles]) -> None:
        if self.group.size > 1:
            with self.lease.writer.sweep_lock:
                self._recent_commits = self._recent_commits or read

    def sweep(self, keep: Keep | None, saved_step: int, replaced_files: set[str]) -> None:
        """Delete what is not needed after the commit of a step. A failure here loses nothing and is only logged."""
        if self.lease.rank:
            return
        try:
            with self.lease.writer.sweep_lock:
                recent = self._recent_commits if self.group.size > 1 else []
                protected_packs = set[str]().union(*(each.names for each in recent))
                spared_steps = {saved_step, *(each.step for each in recent), *self.spared_steps()}
                damaged = damaged_steps(self.repo)
                sweep(self.repo, self.lease.writer, keep, spared_steps, damaged, protected_packs, replaced_files)
        except (CkptError, OSError) as error:
            log.warning("cleaning %s failed, the next save tries again: %s", self.repo.url, error)
