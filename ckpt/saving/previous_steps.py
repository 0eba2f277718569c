"""The class PreviousSteps, the blocks of the last steps of a session, to which the next save may refer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ckpt.errors import StepNotFound
from ckpt.groups.base import Group
from ckpt.repository.attempt import Attempt
from ckpt.repository.checkpoint import Checkpoint
from ckpt.repository.damage_registry import damaged_steps
from ckpt.repository.repository import Repository
from ckpt.saving.changing_leaves import REMEMBERED_REPOSITORIES
from ckpt.saving.dedup import BlockPosition, PreviousBlock, PreviousBlocks, StepBlocks, referable_blocks
from ckpt.saving.lineage import Lineage
from ckpt.storage.base.errors import CkptError
from ckpt.storage.base.forks import fork_safe_lock

log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class CommittedFiles:
    """The files that the commit record of a step names."""

    step: int
    names: Iterable[str]


@dataclass(frozen=True, slots=True)
class _LastSteps:
    """The last steps, to whose blocks the next save may refer."""

    algorithm: str
    copies: int
    steps: tuple[StepBlocks, ...]
    """The newest first."""


class PreviousSteps:
    """The last steps of one session. Safe to use from many threads."""

    def __init__(self, repo: Repository, group: Group) -> None:
        self._repo = repo
        self._group = group
        self._lock = threading.Lock()
        """Guards the following attributes. It is held while the steps are read, so a second save waits for that read."""
        self._last_steps: _LastSteps | None = None
        self._last_serial: tuple[int, int] = (-1, -1)
        """The serial of the newest save that was remembered."""

    def referable_blocks(
        self, algorithm: str, copies: int, lineage: Lineage, note_read: Callable[[list[CommittedFiles]], None]
    ) -> StepBlocks:
        """Return the blocks to which the next step may refer: those of the newest step, or of an earlier one if `copies` > 1.

        algorithm: the digest algorithm.
        lineage: has the step from which the save continues.
        note_read: is called with the files of the steps, if they had to be read from the repository.
        """
        with self._lock:
            last = self._last_steps
            if last is None or (last.algorithm, last.copies) != (algorithm, copies):
                last = self._last_steps = _LastSteps(algorithm, copies, self._read(algorithm, copies, lineage, note_read))
            return referable_blocks(last.steps, copies)

    def remember(self, attempt: Attempt, algorithm: str, step_blocks: StepBlocks, copies: int, lineage: Lineage) -> None:
        """Keep the blocks of a step that was just committed, unless a newer save has ended before."""
        with self._lock:
            if attempt.serial <= self._last_serial:
                return
            self._last_serial = attempt.serial
            lineage.note_committed()
            previous, self._last_steps = self._last_steps, None
            if copies == 1:
                self._last_steps = _LastSteps(algorithm, 1, (step_blocks,))
            elif previous is not None and (previous.algorithm, previous.copies) == (algorithm, copies):
                self._last_steps = _LastSteps(algorithm, copies, (step_blocks, *previous.steps)[:copies])
            _remember_blocks((self._repo.url, self._group.rank), step_blocks.blocks, copies)

    def forget(self) -> None:
        """Read the committed steps again before the next save. Call it if a save failed or its end is unknown."""
        with self._lock:
            self._last_steps = None

    def _read(
        self, algorithm: str, copies: int, lineage: Lineage, note_read: Callable[[list[CommittedFiles]], None]
    ) -> tuple[StepBlocks, ...]:
        """Return the last `copies` complete steps, the newest first; fewer if there are no more, none after an error."""
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
            log.warning("the next step refers to no earlier one, and writes all blocks: %s", error)
            return ()
        note_read(files)
        return tuple(found)

    def _blocks_of(self, checkpoint: Checkpoint, algorithm: str) -> StepBlocks:
        """Return the blocks that this rank wrote of a step; none if the step has digests of another algorithm."""
        manifest = checkpoint.manifest()
        if manifest.digest_algorithm != algorithm:
            return StepBlocks({}, {})
        mine = None if self._group.size == 1 else self._group.rank
        before = _remembered_blocks.get((self._repo.url, self._group.rank), ())
        blocks = {}
        for key, at in manifest.blocks(mine).items():
            verified = PreviousBlock(*at, is_verified=True)
            blocks[key] = verified if any(earlier.get(key) == verified for earlier in before) else PreviousBlock(*at)
        positions = {BlockPosition(*position): key for position, key in manifest.block_positions(mine)}
        return StepBlocks(blocks, {f.name: f.nbytes for f in checkpoint.commit.packs}, positions)

    def _previous_checkpoint(self, lineage: Lineage) -> Checkpoint | None:
        """Return the step from which the next save continues, or None."""
        if (base := lineage.base_step) is None or base in damaged_steps(self._repo):
            return self._repo.latest(damaged_steps(self._repo))
        try:
            return self._repo[base]
        except StepNotFound:  # this tier does not have it
            return None


_remembered_blocks: dict[tuple[str, int], tuple[PreviousBlocks, ...]] = {}
"""By URL and rank, the blocks that the last saves of this process wrote or verified, the newest save first and one for each
copy. A later session of this process uses them."""
_remembered_lock = fork_safe_lock()
"""Guards changes of `_remembered_blocks`."""


def _remember_blocks(url_and_rank: tuple[str, int], blocks: PreviousBlocks, copies: int) -> None:
    with _remembered_lock:
        before = _remembered_blocks.pop(url_and_rank, ())
        _remembered_blocks[url_and_rank] = (blocks, *before)[:copies]
        while len(_remembered_blocks) > REMEMBERED_REPOSITORIES:
            del _remembered_blocks[next(iter(_remembered_blocks))]
