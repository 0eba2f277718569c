"""The blocks of the last steps, for the next save to refer to: read from the repository at first, then kept by each commit."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ckpt.errors import StepNotFound
from ckpt.groups.base import Group
from ckpt.repository.checkpoint import Checkpoint
from ckpt.repository.damage_registry import damaged_steps
from ckpt.repository.repository import Repository
from ckpt.repository.writer_lease import Attempt
from ckpt.saving.dedup import PreviousBlock, PreviousBlocks, StepBlocks, referable_blocks
from ckpt.saving.lineage import Lineage
from ckpt.storage.base.errors import CkptError

log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class CommittedFiles:
    """The files that the commit record of a step names."""

    step: int
    names: Iterable[str]


@dataclass(frozen=True, slots=True)
class _KnownSteps:
    """The last steps, whose blocks may be referred to."""

    algorithm: str
    copies: int
    steps: tuple[StepBlocks, ...]
    """The newest first."""


class PreviousSteps:
    """Of a session. Safe to use from many threads."""

    def __init__(self, repo: Repository, group: Group) -> None:
        self._repo = repo
        self._group = group
        self._lock = threading.Lock()
        """Guards what follows, and is kept while the steps are read: a second save waits for that."""
        self._known: _KnownSteps | None = None
        self._last_serial: tuple[int, int] = (-1, -1)

    def referable_blocks(
        self, algorithm: str, copies: int, lineage: Lineage, note_read: Callable[[list[CommittedFiles]], None]
    ) -> StepBlocks:
        """What the next step may refer to: the blocks of the newest committed step, or with several copies of one before it.

        lineage: that the save goes on. note_read: called with the files of the steps, where they were read for that.
        """
        with self._lock:
            known = self._known
            if known is None or (known.algorithm, known.copies) != (algorithm, copies):
                known = self._known = _KnownSteps(algorithm, copies, self._read(algorithm, copies, lineage, note_read))
            return referable_blocks(known.steps, copies)

    def remember(self, attempt: Attempt, algorithm: str, step_blocks: StepBlocks, copies: int, lineage: Lineage) -> None:
        """Keep the blocks of a step just committed, unless the save is older than one that has ended before it."""
        with self._lock:
            if attempt.serial <= self._last_serial:
                return
            self._last_serial = attempt.serial
            lineage.base_step = None
            previous, self._known = self._known, None
            if copies == 1:
                self._known = _KnownSteps(algorithm, 1, (step_blocks,))
            elif previous is not None and (previous.algorithm, previous.copies) == (algorithm, copies):
                self._known = _KnownSteps(algorithm, copies, (step_blocks, *previous.steps)[:copies])
            _remember_blocks((self._repo.url, self._group.rank), step_blocks.blocks, copies)

    def forget(self) -> None:
        """A save failed, or its end was not seen: look again at what is committed before the next one."""
        with self._lock:
            self._known = None

    def _read(
        self, algorithm: str, copies: int, lineage: Lineage, note_read: Callable[[list[CommittedFiles]], None]
    ) -> tuple[StepBlocks, ...]:
        """The last `copies` whole steps, the newest first; fewer where there are no more."""
        found: list[StepBlocks] = []
        files: list[CommittedFiles] = []
        try:
            checkpoint = self._previous_checkpoint(lineage)
            while checkpoint is not None:
                found.append(self._blocks_of(checkpoint, algorithm))
                files.insert(0, CommittedFiles(checkpoint.step, checkpoint.commit.files()))
                if len(found) == copies:
                    break
                checkpoint = self._repo.latest({*damaged_steps(self._repo), *(each.step for each in files)})
        except CkptError as error:
            log.warning("nothing is referenced: %s", error)
            return ()
        note_read(files)
        return tuple(found)

    def _blocks_of(self, checkpoint: Checkpoint, algorithm: str) -> StepBlocks:
        """What this rank has written of a step; nothing where its digests are of another algorithm."""
        manifest = checkpoint.manifest()
        if manifest.digest_algorithm != algorithm:
            return StepBlocks({}, {})
        mine = None if self._group.size == 1 else self._group.rank
        before = _remembered_blocks.get((self._repo.url, self._group.rank), ())
        blocks = {}
        for key, at in manifest.blocks(mine).items():
            verified = PreviousBlock(*at, is_verified=True)
            blocks[key] = verified if any(known.get(key) == verified for known in before) else PreviousBlock(*at)
        return StepBlocks(blocks, {f.name: f.nbytes for f in checkpoint.commit.packs})

    def _previous_checkpoint(self, lineage: Lineage) -> Checkpoint | None:
        """The step that the next save goes on from."""
        if (base := lineage.base_step) is None or base in damaged_steps(self._repo):
            return self._repo.latest(damaged_steps(self._repo))
        try:
            return self._repo[base]
        except StepNotFound:  # this tier does not have it
            return None


_remembered_blocks: dict[tuple[str, int], tuple[PreviousBlocks, ...]] = {}
"""By URL and rank what the last saves of this process wrote or saw to be whole, the newest first: kept for a next one in a
session of its own. As many as there are copies."""
_MAX_REMEMBERED = 4
_remembered_lock = threading.Lock()
"""Guards `_remembered_blocks`."""


def _after_fork() -> None:
    """Another thread of the parent may have had the lock."""
    global _remembered_lock
    _remembered_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _remember_blocks(url_and_rank: tuple[str, int], blocks: PreviousBlocks, copies: int) -> None:
    with _remembered_lock:
        before = _remembered_blocks.pop(url_and_rank, ())
        _remembered_blocks[url_and_rank] = (blocks, *before)[:copies]
        while len(_remembered_blocks) > _MAX_REMEMBERED:
            del _remembered_blocks[next(iter(_remembered_blocks))]
