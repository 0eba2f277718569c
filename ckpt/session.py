"""A process that writes to a repository: its claim, its saves under way, and what it remembers of the last step.

All savers of one process share one session for a URL; the last to leave gives the claim up.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt.claim import Claim, claim
from ckpt.repository import Repository
from ckpt.retention import Keep, sweep
from ckpt.storage.errors import CkptError, SaveFailed

if TYPE_CHECKING:
    from ckpt.handle import SaveHandle

log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class KnownBlock:
    """Where a block of the previous step is stored."""

    pack: str
    position: int
    stored: int
    codec: str | None
    checksum: int | None


KnownBlocks = dict[tuple[bytes, int], KnownBlock]
"""Blocks by digest and raw length."""


class Session:
    """Shared by all that save to one repository from this process."""

    def __init__(self, repo: Repository) -> None:
        self.repo = repo
        self.holders = 0
        self.claim: Claim = claim(repo)
        self._lock = threading.Lock()
        self._prepared = False
        self._known: tuple[str, KnownBlocks, dict[str, int]] | None = None
        self._pending: list[SaveHandle] = []
        self._sweeping = threading.Lock()

    # --- the saves under way -----------------------------------------------------------------------------------

    def add(self, handle: SaveHandle, limit: int) -> None:
        """Note a new save; first wait until fewer than `limit` are under way."""
        while True:
            with self._lock:
                busy = [h for h in self._pending if not h.done()]
                if len(busy) < limit:
                    self._pending.append(handle)
                    return
            busy[0].wait()

    def raise_failed(self) -> None:
        """Raise SaveFailed for the first save of the background that failed and whose error nobody has seen."""
        with self._lock:
            failed = [h for h in self._pending if h.done() and h.unseen()]
            self._pending = [h for h in self._pending if not h.done() or h in failed[1:]]
        if failed:
            error = failed[0].take_error()
            raise SaveFailed(f"saving step {failed[0].step} to {self.repo.url} in the background failed: {error}") from error

    def wait(self) -> None:
        """Wait for all saves under way."""
        with self._lock:
            pending = list(self._pending)
        for handle in pending:
            handle.wait()

    def wait_staged(self) -> None:
        """Wait until no save under way reads the state any more."""
        with self._lock:
            pending = list(self._pending)
        for handle in pending:
            handle.staged.wait()

    # --- what the last step holds ------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Once, before the first file is written: remove the temporary files of killed writers."""
        with self._lock:
            if not self._prepared:
                self.repo.store.sweep_temporaries("")
                self._prepared = True

    def known_blocks(self, algorithm: str, attempt: str) -> tuple[KnownBlocks, dict[str, int]]:
        """Blocks of the newest committed step whose packs are there, and the lengths of those packs.

        Nothing of them is deleted before the attempt, which may refer to them, has ended.
        """
        with self._lock:
            if self._known is None or self._known[0] != algorithm:
                self._known = (algorithm, *self._read_known(algorithm))
            _, blocks, packs = self._known
        with self._sweeping:
            self.claim.refer(attempt, packs)
            folders = {name.rpartition("/")[0] for name in packs}
            sizes = {entry.name: entry.nbytes for folder in folders for entry in self.repo.store.list(folder)}
        gone = {name for name, nbytes in packs.items() if sizes.get(name) != nbytes}
        if gone:
            blocks = {k: b for k, b in blocks.items() if b.pack not in gone}
        return blocks, packs

    def remember(self, step: int, algorithm: str, blocks: KnownBlocks, packs: dict[str, int]) -> None:
        """Keep the blocks of a step just committed, for the next one to refer to."""
        with self._lock:
            self._known = (algorithm, blocks, packs)
        distrusted(self.repo).discard(step)

    def _read_known(self, algorithm: str) -> tuple[KnownBlocks, dict[str, int]]:
        try:
            checkpoint = self.repo.latest(distrusted(self.repo))
            if checkpoint is None:
                return {}, {}
            manifest = checkpoint.manifest()
        except CkptError as error:
            log.warning("nothing is referenced: %s", error)
            return {}, {}
        if manifest.digest_algorithm != algorithm:
            return {}, {}
        blocks = {
            (r.digest, r.raw): KnownBlock(r.pack, r.position, r.stored, r.codec, r.checksum)
            for r in manifest.rows
            if r.pack is not None
        }
        return blocks, {f.name: f.nbytes for f in checkpoint.commit.packs}

    def sweep(self, keep: Keep | None, saved: int) -> None:
        """Delete what is not needed. A failure here loses nothing and is only logged."""
        try:
            with self._sweeping:
                sweep(self.repo, self.claim, keep, saved, distrusted(self.repo))
        except (CkptError, OSError) as error:
            log.warning("cleaning %s failed, the next save tries again: %s", self.repo.url, error)


_sessions: dict[str, Session] = {}
_orphans: list[Session] = []  # left with an error that nobody has seen
_registry = threading.RLock()
_distrusted: dict[str, set[int]] = {}


def distrusted(repo: Repository) -> set[int]:
    """Steps that a load of this process found damaged: nothing refers to them, and they count as no good ones.

    A run that falls back comes by them again and makes, bit for bit, the same blocks: those must be written anew.
    """
    return _distrusted.setdefault(repo.url, set())


def enter(repo: Repository) -> Session:
    """Join this process's session for a repository, or begin one."""
    with _registry:
        session = _sessions.get(repo.url)
        if session is None:
            for orphan in [o for o in _orphans if o.repo.url == repo.url]:
                _orphans.remove(orphan)
                orphan.wait()
                orphan.raise_failed()
            repo.ensure()
            session = _sessions[repo.url] = Session(repo)
        session.holders += 1
        return session


def leave(session: Session) -> None:
    """The counterpart of `enter`."""
    with _registry:
        session.holders -= 1
        if session.holders:
            return
        del _sessions[session.repo.url]
        session.claim.release()
        if any(h.unseen() for h in session._pending):
            _orphans.append(session)


def _after_fork() -> None:
    """A child holds no claims: they name the parent."""
    global _registry
    _sessions.clear()
    _orphans.clear()
    _registry = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _report_at_exit() -> None:
    for session in [*_sessions.values(), *_orphans]:
        for handle in session._pending:
            handle.wait()
            if handle.unseen():
                log.error("saving step %d to %s failed: %s", handle.step, session.repo.url, handle.take_error())
