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

from ckpt import parts
from ckpt.checkpoint import Checkpoint
from ckpt.claim import Attempt, Claim, Series, claim
from ckpt.damage_registry import clear_damaged, damaged_steps
from ckpt.drift import Drift
from ckpt.exit_status import before_the_threads_end, fail_clean_up
from ckpt.groups.base import Group
from ckpt.known import KnownBlock, KnownBlocks, StepBlocks, referable
from ckpt.lineage import Lineage
from ckpt.lines import Line
from ckpt.pack import lengths
from ckpt.places import bad_packs
from ckpt.process_identity import Owner, this_process
from ckpt.repository import Repository
from ckpt.retention import Keep, sweep
from ckpt.storage import errors
from ckpt.storage.base import Store
from ckpt.storage.decode import decode
from ckpt.storage.errors import CkptError, InvalidArgument, SaveFailed, StepNotFound

if TYPE_CHECKING:
    from ckpt.handle import SaveHandle

log = logging.getLogger("ckpt")


Asked = tuple[int | None, ...]
"""The step that the first save of a session was given, None for the one after the newest; empty where that is not known."""


class _Known(NamedTuple):
    """The last steps, whose blocks may be referred to."""

    algorithm: str
    copies: int
    steps: tuple[StepBlocks, ...]
    """The newest first."""


class Session:
    """Shared by all that save to one repository from this process."""

    def __init__(
        self, repo: Repository, group: Group, shared: Claim | None = None, series: Series | None = None,
        where: Store | None = None, asked: Asked = (),
    ) -> None:  # fmt: skip
        self.repo = repo
        self.group = group
        self.place = repo.url, group.rank
        self.spared: Callable[[], Collection[int]] = tuple
        """Steps that no sweep deletes, for they are still to be copied from here."""
        self.holders = 0
        self._next_step: int | None = None  # agreed by a group, whose ranks see commits at different moments
        self._asked_of_rank_0: Asked = ()
        if group.size == 1:
            repo.ensure()
            self.claim = shared or claim(repo, series=series)
        else:
            self.claim, self._next_step, self._asked_of_rank_0 = _meet(repo, group, series, where or repo.store, shared, asked)
        self.drift = Drift()
        self.lineage = Lineage(repo, self.claim.generation, partial(damaged_steps, repo))
        self._noted: set[Line] = set()
        self._lock = threading.Lock()
        self._known: _Known | None = None
        self._pending: list[SaveHandle] = []
        self._known_of: tuple[int, int] = (-1, -1)
        self._recent: list[tuple[int, Iterable[str]]] = []
        self._in_use = 1
        self.excused: SaveHandle | None = None
        """A save that failed, and that a later save makes up for: none has followed yet."""

    def require_keys(self, repo: Repository) -> None:
        """Raise InvalidArgument where who joins would sign with another key, or with none."""
        if repo.keys != self.repo.keys:
            raise InvalidArgument(
                f"this process saves to {repo.url} already, with another key or with none; give each saver of one URL the same "
                "key="
            )

    def next_step(self) -> int:
        """The number after the newest step, the same on all ranks."""
        if self._next_step is None:
            return _after_newest(self.repo)
        return self._next_step

    def asked_of_rank_0(self) -> Asked:
        """What rank 0 was asked to save when the session began; told once."""
        asked, self._asked_of_rank_0 = self._asked_of_rank_0, ()
        return asked

    def began(self, step: int) -> None:
        """A save of this step begins."""
        if self._next_step is not None:
            self._next_step = max(self._next_step, step + 1)

    # --- the saves under way -----------------------------------------------------------------------------------

    def add(self, handle: SaveHandle, limit: int) -> None:
        """Note a new save; first wait until fewer than `limit` are under way."""
        while True:
            with self._lock:
                busy = [h for h in self._pending if not h.done()]
                if len(busy) < limit:
                    self._pending.append(handle)
                    return
            busy[0].require_end()

    def raise_failed(self) -> None:
        """Raise SaveFailed for the first save of the background that failed and whose error nobody has seen."""
        if not self._pending:  # as it is at most steps
            return
        with self._lock:
            failed = [h for h in self._pending if h.done() and h.unseen()]
            self._pending = [h for h in self._pending if not h.done() or h in failed[1:]]
        if failed:
            error = failed[0].take_error()
            raise SaveFailed(f"saving step {failed[0].step} to {self.repo.url} in the background failed: {error}") from error

    def raise_excused(self) -> None:
        """At the end: raise SaveFailed where the last save failed and no later save made up for it."""
        handle, self.excused = self.excused, None
        if handle is not None and handle.unasked():
            error = handle.take_error()
            raise SaveFailed(f"saving step {handle.step}, the last of the run, to {self.repo.url} failed: {error}") from error

    def wait(self) -> None:
        """Wait for all saves under way; raise SaveFailed where one makes no progress any more."""
        with self._lock:
            pending = list(self._pending)
        for handle in pending:
            handle.require_end()

    def wait_staged(self) -> None:
        """Wait until no save under way reads the state any more."""
        with self._lock:
            pending = list(self._pending)
        for handle in pending:
            handle.require_staged()

    # --- what the last step holds ------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Before the first file is written."""
        if self.group.size == 1:  # a group has done it before it met
            self.claim.clean()

    def known_blocks(self, algorithm: str, attempt: Attempt, copies: int = 1) -> StepBlocks:
        """Blocks that the attempt may refer to, whose packs are there, and the lengths of those packs: of the newest committed
        step, or with several copies of one before it (`known.referable`).

        Nothing of them is deleted before the attempt, which may refer to them, has ended.
        """
        with self._lock:
            if self._known is None or (self._known.algorithm, self._known.copies) != (algorithm, copies):
                self._known = _Known(algorithm, copies, self._read_known(algorithm, copies))
            blocks, packs = referable(self._known.steps, copies)
        with self.claim.sweeping:
            self.claim.refer(attempt, packs)
            sizes = lengths(self.repo.store, packs)
        gone = {name for name, nbytes in packs.items() if sizes.get(name) != nbytes} | bad_packs(self.repo.url)
        if gone:
            blocks = {k: b for k, b in blocks.items() if b.pack not in gone}
        return StepBlocks(blocks, packs)

    def remember(self, attempt: Attempt, algorithm: str, step: StepBlocks, copies: int = 1) -> None:
        """Keep the blocks of a step just committed, for a later one to refer to; not those of an older save that ends late."""
        with self._lock:
            if attempt.serial > self._known_of:
                self._known_of = attempt.serial
                self.lineage.base = None
                known, self._known = self._known, None
                if copies == 1:
                    self._known = _Known(algorithm, 1, (step,))
                elif known is not None and (known.algorithm, known.copies) == (algorithm, copies):
                    self._known = _Known(algorithm, copies, (step, *known.steps)[:copies])
                _remember(self.place, step.blocks, copies)
        clear_damaged(self.repo, attempt.step)

    def note_line(self, line: Line) -> None:
        """Before the first commit here on a line that is not the first one."""
        if line not in self._noted:
            self.repo.note_line(line)
            self._noted.add(line)

    def pin(self, attempt: Attempt, packs: Iterable[str]) -> None:
        """No sweep takes these packs before the attempt has ended."""
        with self.claim.sweeping:
            self.claim.refer(attempt, packs)

    def committed(self, step: int, files: Iterable[str], in_use: int) -> None:
        """For rank 0 of a group: a rank that saves beside us may refer to the packs of the last `in_use` commits. It has seen
        one of the last that are in flight, and refers to it, or with several copies to one before it."""
        with self.claim.sweeping:
            self._in_use = max(self._in_use, in_use)
            self._recent = [*self._recent, (step, files)][-self._in_use :]

    def forget(self) -> None:
        """A save failed, or its end was not seen: look again at what is committed before the next one."""
        with self._lock:
            self._known = None

    def _read_known(self, algorithm: str, copies: int) -> tuple[StepBlocks, ...]:
        """The last `copies` whole steps, the newest first; fewer where there are no more."""
        found: list[StepBlocks] = []
        recent: list[tuple[int, Iterable[str]]] = []
        try:
            checkpoint = self._before()
            while checkpoint is not None:
                found.append(self._blocks_of(checkpoint, algorithm))
                recent.insert(0, (checkpoint.step, checkpoint.commit.files()))
                if len(found) == copies:
                    break
                checkpoint = self.repo.latest({*damaged_steps(self.repo), *(step for step, _ in recent)})
        except CkptError as error:
            log.warning("nothing is referenced: %s", error)
            return ()
        if self.group.size > 1 and not self._recent:
            self._recent = recent
        return tuple(found)

    def _blocks_of(self, checkpoint: Checkpoint, algorithm: str) -> StepBlocks:
        """What this rank has written of a step; nothing where its digests are of another algorithm."""
        manifest = checkpoint.manifest()
        if manifest.digest_algorithm != algorithm:
            return StepBlocks({}, {})
        mine = None if self.group.size == 1 else self.group.rank
        before = _remembered.get(self.place, ())
        blocks = {}
        for key, at in manifest.blocks(mine).items():
            seen = KnownBlock(*at, seen=True)
            blocks[key] = seen if any(known.get(key) == seen for known in before) else KnownBlock(*at)
        return StepBlocks(blocks, {f.name: f.nbytes for f in checkpoint.commit.packs})

    def _before(self) -> Checkpoint | None:
        """The step that the next save goes on from."""
        if (base := self.lineage.base) is None or base in damaged_steps(self.repo):
            return self.repo.latest(damaged_steps(self.repo))
        try:
            return self.repo[base]
        except StepNotFound:  # this tier does not have it
            return None

    def sweep(self, keep: Keep | None, saved: int, retired: set[str]) -> None:
        """Delete what is not needed after the commit of a step. A failure here loses nothing and is only logged."""
        if self.claim.rank:
            return
        try:
            with self.claim.sweeping:
                recent = self._recent if self.group.size > 1 else []
                protected = set[str]().union(*(names for _, names in recent))
                spare = {saved, *(step for step, _ in recent), *self.spared()}
                sweep(self.repo, self.claim, keep, spare, damaged_steps(self.repo), protected, retired)
        except (CkptError, OSError) as error:
            log.warning("cleaning %s failed, the next save tries again: %s", self.repo.url, error)


def _after_newest(repo: Repository) -> int:
    return repo.newest()[1] + 1


def _meet(
    repo: Repository, group: Group, series: Series | None, where: Store, shared: Claim | None, asked: Asked
) -> tuple[Claim, int, Asked]:
    """Begin a session together; the one time that the ranks talk. All raise the same error where rank 0 can't begin.

    shared: the claim that rank 0 has for another group. A new one would end the saves of that group for good.
    Returns the claim, the number of the next step, and what rank 0 is asked to save.
    """
    if group.rank:
        told, ranks = _tell(where, group, None)
        if "error" in told:
            kind = getattr(errors, told["error"], CkptError)
            raise kind(told["message"])
        other = Claim(repo, told["generation"], group.rank, group.size, series, told["lane"], told["token"])
        other.ranks = ranks
        return other, told["next"], tuple(told["asked"])
    mine: Claim | None = None
    try:
        repo.ensure()
        if shared is not None and shared.over() is None:
            mine = shared.beside(group.size)
        else:
            mine = claim(repo, group.size, series)
            mine.clean()  # now, while nobody of this generation writes
        told = {"generation": mine.generation, "lane": mine.lane, "token": mine.token}
        told |= {"next": _after_newest(repo), "asked": asked}
    except BaseException as error:
        if mine is not None:
            _release_unused(mine)
        kind = type(error).__name__ if isinstance(error, CkptError) else "GroupError"
        _tell(where, group, {"error": kind, "message": f"rank 0 could not begin to save: {error}"})
        raise
    try:
        _, mine.ranks = _tell(where, group, told)
    except BaseException:
        _release_unused(mine)
        raise
    return mine, told["next"], asked


def _tell(where: Store, group: Group, told: dict[str, Any] | None) -> tuple[dict[str, Any], list[Owner]]:
    """Meet; what rank 0 tells, and the processes of all ranks: one that has died is not waited for, where that can be seen."""
    group.meet_at(where)
    if not group.can_gather:
        return json.loads(group.broadcast(None if told is None else json.dumps(told).encode())), []
    all_said = group.all_gather(json.dumps({"told": told, "process": asdict(this_process())}).encode())
    said = [json.loads(data) for data in all_said]
    return said[0]["told"], [decode(Owner, one["process"]) for one in said]


_sessions: dict[tuple[str, Group | None], Session] = {}
_orphans: list[Session] = []  # left with an error that nobody has seen
_lent: list[Claim] = []  # to groups that meet just now
_registry = threading.RLock()
_remembered: dict[tuple[str, int], tuple[KnownBlocks, ...]] = {}
"""By URL and rank what the last saves of this process wrote or saw to be whole, the newest first: kept for a next one in a
session of its own. As many as there are copies."""
_MOST_REMEMBERED = 4


def _remember(place: tuple[str, int], blocks: KnownBlocks, copies: int) -> None:
    with _registry:
        before = _remembered.pop(place, ())
        _remembered[place] = (blocks, *before)[:copies]
        while len(_remembered) > _MOST_REMEMBERED:
            del _remembered[next(iter(_remembered))]


def enter(
    repo: Repository, group: Group, series: Series | None = None, where: Store | None = None, asked: Asked = ()
) -> Session:
    """Join this process's session for a repository, or begin one: with a group, every rank must.

    where: a place that can be written to, for a group to meet at; else it is the repository.
    asked: the step to save at once.
    """
    key = _key(repo, group)
    if group.size > 1:
        with _registry:
            session = _sessions.get(key)
            if session is not None:
                session.require_keys(repo)
                session.holders += 1
                return session
        # Not under the lock: the ranks of a group of threads wait for each other here.
        with _lend(repo, group, series) as shared:
            made = Session(repo, group, shared, series, where, asked)
            with _registry:
                session = _sessions.setdefault(key, made)
                session.holders += 1
                return session
    with _registry:
        session = _sessions.get(key)
        if session is None:
            for orphan in [o for o in _orphans if o.repo.url == repo.url]:
                _orphans.remove(orphan)
                orphan.wait()
                orphan.raise_failed()
            # What tiers copy here has their own numbers, which are higher than those of a claim without tiers.
            shared = _claim_of_this_process(repo) if series is None else None
            session = _sessions[key] = Session(repo, group, shared, series)
        session.require_keys(repo)
        session.holders += 1
        return session


def _claim_of_this_process(repo: Repository) -> Claim | None:
    """What it has already where it saves for a group as well: the newest claim, for that has ended the others."""
    ours = [s.claim for s in _sessions.values() if s.repo.url == repo.url and s.claim.rank == 0]
    return max(ours, key=lambda its: its.generation, default=None)


@contextmanager
def _lend(repo: Repository, group: Group, series: Series | None) -> Iterator[Claim | None]:
    """The claim of this process alone, or for another group, which rank 0 of this one may use as well; nobody gives it up
    meanwhile. Not where tiers count with the same numbers.
    """
    with _registry:
        mine = _claim_of_this_process(repo)
        if mine is not None and (group.rank or mine.in_series or series is not None):
            mine = None
        if mine is not None:
            _lent.append(mine)
    try:
        yield mine
    finally:
        if mine is not None:
            with _registry:
                _lent.remove(mine)
                _release_unused(mine)


def _release_unused(mine: Claim) -> bool:
    """Let others write, unless another group of this process still saves with the same claim. False where the store can't be
    reached."""
    with _registry:
        if any(mine.is_shared_with(c) for c in (*(s.claim for s in _sessions.values()), *_lent)):
            return True
        return mine.release()


def _key(repo: Repository, group: Group) -> tuple[str, Group | None]:
    return repo.url, None if group.size == 1 else group


def leave(session: Session, keep: bool = False) -> None:
    """The counterpart of `enter`. keep: the ranks of a group stay together for the next save, until the process ends."""
    with _registry:
        session.holders -= 1
        if session.holders or (keep and session.group.size > 1):
            return
        _sessions.pop(_key(session.repo, session.group), None)
        if any(h.is_stuck() for h in session._pending):
            parts.note_end(session.claim, session.group)
            return  # the store would not answer; the next job sees when this process has ended
        if not session.claim.rank and not _release_unused(session.claim):
            parts.note_end(session.claim, session.group)
        if any(h.unseen() for h in session._pending):
            _orphans.append(session)
    if session.claim.rank and not session.claim.release():  # nobody shares it, and others need not wait while a store answers
        parts.note_end(session.claim, session.group)


def _after_fork() -> None:
    """A child holds no claims: they name the parent."""
    global _registry
    _sessions.clear()
    _orphans.clear()
    _lent.clear()
    _registry = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


_THREADS_OF_A_SAVE = ("ckpt-save", "ckpt-stage", "ckpt-write", "ckpt-import", "ckpt-notes")
_END_SECONDS = 20.0
"""For a thread of a save that has ended, at most: it has only to return."""


@before_the_threads_end
def _wait_at_exit() -> None:
    """Wait for the saves under way, as long as they make progress: what they need must not end before.

    Their threads must have ended, too: Python ends a daemon thread where it next takes the interpreter's lock, and one that is
    in the code of a C++ library then (an import of pyarrow, a call of torch) takes the process down.
    """
    stuck = False
    for session in [*_sessions.values(), *_orphans]:
        try:
            session.wait()
        except SaveFailed:
            stuck = True
    for thread in threading.enumerate():
        if thread.name.startswith(_THREADS_OF_A_SAVE):
            thread.join(0.1 if stuck else _END_SECONDS)


@atexit.register
def _report_at_exit() -> None:
    """A save that failed or makes no progress is logged, and ends the program with a status that is not 0."""
    failed = False
    for session in [*_sessions.values(), *_orphans]:
        try:
            session.wait()
        except SaveFailed as error:
            failed = True
            log.error("%s", error)
            continue
        excused = [session.excused] if session.excused is not None else []
        for handle in {*session._pending, *excused}:
            if handle.unseen() or (handle in excused and handle.unasked()):
                failed = True
                log.error("saving step %d to %s failed: %s", handle.step, session.repo.url, handle.take_error())
        if session.group.size > 1 and not session.claim.release():
            parts.note_end(session.claim, session.group)
    if failed:
        fail_clean_up()
