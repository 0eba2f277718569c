"""A process that writes to a repository: its claim, its saves under way, and what it remembers of the last step.

All savers of one process share one session for a URL; the last to leave gives the claim up. The ranks of a group meet once,
when their session begins: rank 0 takes the claim and tells the others its generation. Nothing later talks.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt import errors
from ckpt.block_io.replicated_store import bad_files
from ckpt.errors import SaveFailed, StepNotFound
from ckpt.format.pack import file_lengths
from ckpt.format.training_lines import TrainingLine
from ckpt.groups.base import Group
from ckpt.groups.process_identity import ProcessIdentity, this_process
from ckpt.repository.checkpoint import Checkpoint
from ckpt.repository.damage_registry import clear_damaged, damaged_steps
from ckpt.repository.repository import Repository
from ckpt.repository.retention import Keep, sweep
from ckpt.repository.writer_lease import Attempt, SerialCounter, WriterLease, acquire_lease
from ckpt.saving import rank_parts
from ckpt.saving.dedup import PreviousBlock, PreviousBlocks, StepBlocks, referable_blocks
from ckpt.saving.exit_status import fail_cleanup, register_before_thread_shutdown
from ckpt.saving.lineage import Lineage
from ckpt.saving.step_drift import DriftDetector
from ckpt.storage.base.checked_decode import decode
from ckpt.storage.base.errors import CkptError, InvalidArgument
from ckpt.storage.base.store import Store

if TYPE_CHECKING:
    from ckpt.saving.handle import SaveHandle

log = logging.getLogger("ckpt")


RequestedStep = tuple[int | None, ...]
"""The step that the first save of a session was given, None for the one after the newest; empty where that is not known."""


class _PreviousSteps(NamedTuple):
    """The last steps, whose blocks may be referred to."""

    algorithm: str
    copies: int
    steps: tuple[StepBlocks, ...]
    """The newest first."""


class Session:
    """Shared by all that save to one repository from this process."""

    def __init__(
        self, repo: Repository, group: Group, shared_lease: WriterLease | None = None, serials: SerialCounter | None = None,
        rendezvous_store: Store | None = None, requested_step: RequestedStep = (),
    ) -> None:  # fmt: skip
        self.repo = repo
        self.group = group
        self.url_and_rank = repo.url, group.rank
        self.spared_steps: Callable[[], Collection[int]] = tuple
        """Steps that no sweep deletes, for they are still to be copied from here."""
        self.user_count = 0
        self._next_step: int | None = None  # agreed by a group, whose ranks see commits at different moments
        self._rank_0_requested_step: RequestedStep = ()
        if group.size == 1:
            repo.ensure()
            self.lease = shared_lease or acquire_lease(repo, serials=serials)
        else:
            self.lease, self._next_step, self._rank_0_requested_step = _begin_in_group(
                repo, group, serials, rendezvous_store or repo.store, shared_lease, requested_step
            )
        self.drift = DriftDetector()
        self.lineage = Lineage(repo, self.lease.generation, partial(damaged_steps, repo))
        self._noted_lines: set[TrainingLine] = set()
        self._lock = threading.Lock()
        self._previous_steps: _PreviousSteps | None = None
        self._pending_saves: list[SaveHandle] = []
        self._previous_serial: tuple[int, int] = (-1, -1)
        self._recent_commits: list[tuple[int, Iterable[str]]] = []
        self._commits_in_use = 1
        self.excused_save: SaveHandle | None = None
        """A save that failed, and that a later save makes up for: none has followed yet."""

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
            return _next_step_number(self.repo)
        return self._next_step

    def take_rank_0_requested_step(self) -> RequestedStep:
        """What rank 0 was asked to save when the session began; told once."""
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

    # --- what the last step holds ------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Before the first file is written."""
        if self.group.size == 1:  # a group has done it before it met
            self.lease.sweep_temporaries_once()

    def previous_blocks(self, algorithm: str, attempt: Attempt, copies: int = 1) -> StepBlocks:
        """Blocks that the attempt may refer to, whose packs are there, and the lengths of those packs: of the newest committed
        step, or with several copies of one before it (`known.referable`).

        Nothing of them is deleted before the attempt, which may refer to them, has ended.
        """
        with self._lock:
            if self._previous_steps is None or (self._previous_steps.algorithm, self._previous_steps.copies) != (
                algorithm,
                copies,
            ):
                self._previous_steps = _PreviousSteps(algorithm, copies, self._read_previous_steps(algorithm, copies))
            blocks, packs = referable_blocks(self._previous_steps.steps, copies)
        with self.lease.sweep_lock:
            self.lease.pin_packs(attempt, packs)
            sizes = file_lengths(self.repo.store, packs)
        unusable = {name for name, nbytes in packs.items() if sizes.get(name) != nbytes} | bad_files(self.repo.url)
        if unusable:
            blocks = {k: b for k, b in blocks.items() if b.pack not in unusable}
        return StepBlocks(blocks, packs)

    def remember_blocks(self, attempt: Attempt, algorithm: str, step_blocks: StepBlocks, copies: int = 1) -> None:
        """Keep the blocks of a step just committed, for a later one to refer to; not those of an older save that ends late."""
        with self._lock:
            if attempt.serial > self._previous_serial:
                self._previous_serial = attempt.serial
                self.lineage.base_step = None
                previous, self._previous_steps = self._previous_steps, None
                if copies == 1:
                    self._previous_steps = _PreviousSteps(algorithm, 1, (step_blocks,))
                elif previous is not None and (previous.algorithm, previous.copies) == (algorithm, copies):
                    self._previous_steps = _PreviousSteps(algorithm, copies, (step_blocks, *previous.steps)[:copies])
                _remember_blocks(self.url_and_rank, step_blocks.blocks, copies)
        clear_damaged(self.repo, attempt.step)

    def note_line(self, line: TrainingLine) -> None:
        """Before the first commit here on a line that is not the first one."""
        if line not in self._noted_lines:
            self.repo.note_line(line)
            self._noted_lines.add(line)

    def pin_packs(self, attempt: Attempt, packs: Iterable[str]) -> None:
        """No sweep takes these packs before the attempt has ended."""
        with self.lease.sweep_lock:
            self.lease.pin_packs(attempt, packs)

    def note_committed(self, step: int, files: Iterable[str], commits_in_use: int) -> None:
        """For rank 0 of a group: a rank that saves beside us may refer to the packs of the last `in_use` commits. It has seen
        one of the last that are in flight, and refers to it, or with several copies to one before it."""
        with self.lease.sweep_lock:
            self._commits_in_use = max(self._commits_in_use, commits_in_use)
            self._recent_commits = [*self._recent_commits, (step, files)][-self._commits_in_use :]

    def forget_previous(self) -> None:
        """A save failed, or its end was not seen: look again at what is committed before the next one."""
        with self._lock:
            self._previous_steps = None

    def _read_previous_steps(self, algorithm: str, copies: int) -> tuple[StepBlocks, ...]:
        """The last `copies` whole steps, the newest first; fewer where there are no more."""
        found: list[StepBlocks] = []
        recent: list[tuple[int, Iterable[str]]] = []
        try:
            checkpoint = self._previous_checkpoint()
            while checkpoint is not None:
                found.append(self._blocks_of(checkpoint, algorithm))
                recent.insert(0, (checkpoint.step, checkpoint.commit.files()))
                if len(found) == copies:
                    break
                checkpoint = self.repo.latest({*damaged_steps(self.repo), *(step for step, _ in recent)})
        except CkptError as error:
            log.warning("nothing is referenced: %s", error)
            return ()
        if self.group.size > 1 and not self._recent_commits:
            self._recent_commits = recent
        return tuple(found)

    def _blocks_of(self, checkpoint: Checkpoint, algorithm: str) -> StepBlocks:
        """What this rank has written of a step; nothing where its digests are of another algorithm."""
        manifest = checkpoint.manifest()
        if manifest.digest_algorithm != algorithm:
            return StepBlocks({}, {})
        mine = None if self.group.size == 1 else self.group.rank
        before = _remembered_blocks.get(self.url_and_rank, ())
        blocks = {}
        for key, at in manifest.blocks(mine).items():
            verified = PreviousBlock(*at, is_verified=True)
            blocks[key] = verified if any(known.get(key) == verified for known in before) else PreviousBlock(*at)
        return StepBlocks(blocks, {f.name: f.nbytes for f in checkpoint.commit.packs})

    def _previous_checkpoint(self) -> Checkpoint | None:
        """The step that the next save goes on from."""
        if (base := self.lineage.base_step) is None or base in damaged_steps(self.repo):
            return self.repo.latest(damaged_steps(self.repo))
        try:
            return self.repo[base]
        except StepNotFound:  # this tier does not have it
            return None

    def sweep(self, keep: Keep | None, saved_step: int, replaced_files: set[str]) -> None:
        """Delete what is not needed after the commit of a step. A failure here loses nothing and is only logged."""
        if self.lease.rank:
            return
        try:
            with self.lease.sweep_lock:
                recent = self._recent_commits if self.group.size > 1 else []
                protected_packs = set[str]().union(*(names for _, names in recent))
                spared_steps = {saved_step, *(step for step, _ in recent), *self.spared_steps()}
                sweep(self.repo, self.lease, keep, spared_steps, damaged_steps(self.repo), protected_packs, replaced_files)
        except (CkptError, OSError) as error:
            log.warning("cleaning %s failed, the next save tries again: %s", self.repo.url, error)


def _next_step_number(repo: Repository) -> int:
    return repo.newest()[1] + 1


def _begin_in_group(
    repo: Repository,
    group: Group,
    serials: SerialCounter | None,
    rendezvous_store: Store,
    shared_lease: WriterLease | None,
    requested_step: RequestedStep,
) -> tuple[WriterLease, int, RequestedStep]:
    """Begin a session together; the one time that the ranks talk. All raise the same error where rank 0 can't begin.

    shared: the claim that rank 0 has for another group. A new one would end the saves of that group for good.
    Returns the claim, the number of the next step, and what rank 0 is asked to save.
    """
    if group.rank:
        announcement, ranks = _announce_and_gather(rendezvous_store, group, None)
        if "error" in announcement:
            kind = getattr(errors, announcement["error"], CkptError)
            raise kind(announcement["message"])
        rank_lease = WriterLease(
            repo, announcement["generation"], group.rank, group.size, serials, announcement["lane"], announcement["token"]
        )
        rank_lease.rank_processes = ranks
        return rank_lease, announcement["next"], tuple(announcement["asked"])
    lease: WriterLease | None = None
    try:
        repo.ensure()
        if shared_lease is not None and shared_lease.lease_error() is None:
            lease = shared_lease.lease_for_group(group.size)
        else:
            lease = acquire_lease(repo, group.size, serials)
            lease.sweep_temporaries_once()  # now, while nobody of this generation writes
        announcement = {"generation": lease.generation, "lane": lease.group_number, "token": lease.token}
        announcement |= {"next": _next_step_number(repo), "asked": requested_step}
    except BaseException as error:
        if lease is not None:
            _release_if_unused(lease)
        kind = type(error).__name__ if isinstance(error, CkptError) else "GroupError"
        _announce_and_gather(rendezvous_store, group, {"error": kind, "message": f"rank 0 could not begin to save: {error}"})
        raise
    try:
        _, lease.rank_processes = _announce_and_gather(rendezvous_store, group, announcement)
    except BaseException:
        _release_if_unused(lease)
        raise
    return lease, announcement["next"], requested_step


def _announce_and_gather(
    rendezvous_store: Store, group: Group, announcement: dict[str, Any] | None
) -> tuple[dict[str, Any], list[ProcessIdentity]]:
    """Meet; what rank 0 tells, and the processes of all ranks: one that has died is not waited for, where that can be seen."""
    group.meet_at(rendezvous_store)
    if not group.can_gather:
        return json.loads(group.broadcast(None if announcement is None else json.dumps(announcement).encode())), []
    gathered = group.all_gather(json.dumps({"told": announcement, "process": asdict(this_process())}).encode())
    messages = [json.loads(data) for data in gathered]
    return messages[0]["told"], [decode(ProcessIdentity, one["process"]) for one in messages]


_sessions: dict[tuple[str, Group | None], Session] = {}
_orphaned_sessions: list[Session] = []  # left with an error that nobody has seen
_lent_leases: list[WriterLease] = []  # to groups that meet just now
_registry_lock = threading.RLock()
_remembered_blocks: dict[tuple[str, int], tuple[PreviousBlocks, ...]] = {}
"""By URL and rank what the last saves of this process wrote or saw to be whole, the newest first: kept for a next one in a
session of its own. As many as there are copies."""
_MAX_REMEMBERED = 4


def _remember_blocks(url_and_rank: tuple[str, int], blocks: PreviousBlocks, copies: int) -> None:
    with _registry_lock:
        before = _remembered_blocks.pop(url_and_rank, ())
        _remembered_blocks[url_and_rank] = (blocks, *before)[:copies]
        while len(_remembered_blocks) > _MAX_REMEMBERED:
            del _remembered_blocks[next(iter(_remembered_blocks))]


def enter(
    repo: Repository,
    group: Group,
    serials: SerialCounter | None = None,
    rendezvous_store: Store | None = None,
    requested_step: RequestedStep = (),
) -> Session:
    """Join this process's session for a repository, or begin one: with a group, every rank must.

    where: a place that can be written to, for a group to meet at; else it is the repository.
    asked: the step to save at once.
    """
    key = _session_key(repo, group)
    if group.size > 1:
        with _registry_lock:
            session = _sessions.get(key)
            if session is not None:
                session.require_same_keys(repo)
                session.user_count += 1
                return session
        # Not under the lock: the ranks of a group of threads wait for each other here.
        with _lend_lease(repo, group, serials) as shared_lease:
            new_session = Session(repo, group, shared_lease, serials, rendezvous_store, requested_step)
            with _registry_lock:
                session = _sessions.setdefault(key, new_session)
                session.user_count += 1
                return session
    with _registry_lock:
        session = _sessions.get(key)
        if session is None:
            for orphan in [o for o in _orphaned_sessions if o.repo.url == repo.url]:
                _orphaned_sessions.remove(orphan)
                orphan.wait()
                orphan.raise_failed()
            # What tiers copy here has their own numbers, which are higher than those of a claim without tiers.
            shared_lease = _lease_of_this_process(repo) if serials is None else None
            session = _sessions[key] = Session(repo, group, shared_lease, serials)
        session.require_same_keys(repo)
        session.user_count += 1
        return session


def _lease_of_this_process(repo: Repository) -> WriterLease | None:
    """What it has already where it saves for a group as well: the newest claim, for that has ended the others."""
    leases = [s.lease for s in _sessions.values() if s.repo.url == repo.url and s.lease.rank == 0]
    return max(leases, key=lambda its: its.generation, default=None)


@contextmanager
def _lend_lease(repo: Repository, group: Group, serials: SerialCounter | None) -> Iterator[WriterLease | None]:
    """The claim of this process alone, or for another group, which rank 0 of this one may use as well; nobody gives it up
    meanwhile. Not where tiers count with the same numbers.
    """
    with _registry_lock:
        lease = _lease_of_this_process(repo)
        if lease is not None and (group.rank or lease.has_shared_serials or serials is not None):
            lease = None
        if lease is not None:
            _lent_leases.append(lease)
    try:
        yield lease
    finally:
        if lease is not None:
            with _registry_lock:
                _lent_leases.remove(lease)
                _release_if_unused(lease)


def _release_if_unused(lease: WriterLease) -> bool:
    """Let others write, unless another group of this process still saves with the same claim. False where the store can't be
    reached."""
    with _registry_lock:
        if any(lease.is_same_lease(c) for c in (*(s.lease for s in _sessions.values()), *_lent_leases)):
            return True
        return lease.release()


def _session_key(repo: Repository, group: Group) -> tuple[str, Group | None]:
    return repo.url, None if group.size == 1 else group


def leave(session: Session, keep: bool = False) -> None:
    """The counterpart of `enter`. keep: the ranks of a group stay together for the next save, until the process ends."""
    with _registry_lock:
        session.user_count -= 1
        if session.user_count or (keep and session.group.size > 1):
            return
        _sessions.pop(_session_key(session.repo, session.group), None)
        if any(h.is_stuck() for h in session._pending_saves):
            rank_parts.note_ended(session.lease, session.group)
            return  # the store would not answer; the next job sees when this process has ended
        if not session.lease.rank and not _release_if_unused(session.lease):
            rank_parts.note_ended(session.lease, session.group)
        if any(h.unseen() for h in session._pending_saves):
            _orphaned_sessions.append(session)
    if session.lease.rank and not session.lease.release():  # nobody shares it, and others need not wait while a store answers
        rank_parts.note_ended(session.lease, session.group)


def _after_fork() -> None:
    """A child holds no claims: they name the parent."""
    global _registry_lock
    _sessions.clear()
    _orphaned_sessions.clear()
    _lent_leases.clear()
    _registry_lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


_THREADS_OF_A_SAVE = ("ckpt-save", "ckpt-stage", "ckpt-write", "ckpt-import", "ckpt-notes")
_THREAD_JOIN_SECONDS = 20.0
"""For a thread of a save that has ended, at most: it has only to return."""


@register_before_thread_shutdown
def _wait_at_exit() -> None:
    """Wait for the saves under way, as long as they make progress: what they need must not end before.

    Their threads must have ended, too: Python ends a daemon thread where it next takes the interpreter's lock, and one that is
    in the code of a C++ library then (an import of pyarrow, a call of torch) takes the process down.
    """
    stuck = False
    for session in [*_sessions.values(), *_orphaned_sessions]:
        try:
            session.wait()
        except SaveFailed:
            stuck = True
    for thread in threading.enumerate():
        if thread.name.startswith(_THREADS_OF_A_SAVE):
            thread.join(0.1 if stuck else _THREAD_JOIN_SECONDS)


@atexit.register
def _report_at_exit() -> None:
    """A save that failed or makes no progress is logged, and ends the program with a status that is not 0."""
    failed = False
    for session in [*_sessions.values(), *_orphaned_sessions]:
        try:
            session.wait()
        except SaveFailed as error:
            failed = True
            log.error("%s", error)
            continue
        excused = [session.excused_save] if session.excused_save is not None else []
        for handle in {*session._pending_saves, *excused}:
            if handle.unseen() or (handle in excused and handle.unasked()):
                failed = True
                log.error("saving step %d to %s failed: %s", handle.step, session.repo.url, handle.take_error())
        if session.group.size > 1 and not session.lease.release():
            rank_parts.note_ended(session.lease, session.group)
    if failed:
        fail_cleanup()
