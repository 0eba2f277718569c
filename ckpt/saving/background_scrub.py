"""Reads again, slowly and in the background, the blocks of earlier steps that newer steps refer to.

A block that does not change is written once, and every later step refers to it. Nobody reads it until a load needs it: if it
has rotted by then, all of these steps are lost together. What is found bad is logged, no later step refers to it, and the next
save writes it anew.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import nullcontext

from ckpt.format.json_records import CommitRecord
from ckpt.repository.damage_registry import damaged_steps, mark_damaged_in_all_tiers
from ckpt.repository.repository import Repository, steps_text
from ckpt.saving.dedup import PreviousBlock, is_block_intact
from ckpt.storage.base.errors import CkptError, NotFound
from ckpt.support.runtime import lower_thread_priority

log = logging.getLogger("ckpt")

BYTES_PER_SECOND = 4 << 20
"""By default: 24 hours for 350 GB, and about a thousandth of what a disk or a processor can do."""

FIRST_PASS_DELAY_SECONDS = 60.0
"""After the first save that refers to earlier steps: what this process has just written or read is not read again at once."""

PASS_INTERVAL_SECONDS = 3600.0
"""From the beginning of one pass over all blocks to that of the next, at least."""

_CLOSE_SECONDS = 2.0
"""How long `close` waits for a read under way. One that hangs must not hold the program."""

KeyedBlock = tuple[tuple[bytes, int], PreviousBlock]
"""A block and its digest and raw length."""


class _Interrupted(Exception):
    """A save begins, or the program ends: the read under way is given up."""


class Scrubber:
    """A thread that begins with the first step that refers to an earlier one. It reads nothing while a save is under way."""

    def __init__(self, repo: Repository, rank: int | None, bytes_per_second: int | None) -> None:
        """rank: whose blocks are read; None: all. bytes_per_second: None reads nothing."""
        self._repo = repo
        self._rank = rank
        self._bytes_per_second = bytes_per_second or 0
        self._algorithm = ""
        self._save_count = 0  # under way; changed under the lock
        self._lock = threading.Lock()
        self._no_saves = threading.Event()  # there are none
        self._no_saves.set()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def note_save_began(self) -> None:
        """What is being read is given up."""
        with self._lock:
            self._save_count += 1
            self._no_saves.clear()

    def note_save_ended(self, commit: CommitRecord | None) -> None:
        """commit: of the step, None where the save failed."""
        with self._lock:
            self._save_count -= 1
            if not self._save_count:
                self._no_saves.set()
            idle = self._thread is None and not self._closing.is_set()
            if self._bytes_per_second and idle and commit is not None and refers_to_earlier(commit):
                self._thread = threading.Thread(target=self._run, name="ckpt-scrub", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread; it ends soon after, where a read hangs."""
        self._closing.set()
        self._no_saves.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    # --- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        lower_thread_priority()
        pause = FIRST_PASS_DELAY_SECONDS
        while not self._closing.wait(pause):
            began = time.monotonic()
            try:
                self._run_pass()
            except CkptError as error:  # a store out of reach, a step deleted meanwhile: the next pass looks again
                log.info("blocks of %s are not read again now: %s", self._repo.url, error)
            pause = max(0.0, began + PASS_INTERVAL_SECONDS - time.monotonic())

    def _run_pass(self) -> None:
        """Read each block of earlier steps that the newest step refers to, once."""
        for key, block in self._shared_blocks():
            if self._closing.wait(block.stored / self._bytes_per_second):
                return
            while not self._check(key, block):
                self._no_saves.wait()
                if self._closing.is_set():
                    return

    def _shared_blocks(self) -> list[KeyedBlock]:
        """In the order in which they lie."""
        self._no_saves.wait()
        checkpoint = self._repo.latest(damaged_steps(self._repo))
        if checkpoint is None:
            return []
        own = f"steps/{checkpoint.step}/"
        found = [(key, PreviousBlock(*at)) for key, at in checkpoint.manifest().blocks(self._rank).items()]
        self._algorithm = checkpoint.manifest().digest_algorithm
        shared = [(key, block) for key, block in found if not block.pack.startswith(own)]
        return sorted(shared, key=lambda it: (it[1].pack, it[1].position))

    def _check(self, key: tuple[bytes, int], block: PreviousBlock) -> bool:
        """Whether the read came to its end; it does not where a save begins."""
        try:
            is_intact = is_block_intact(self._repo.store, self._algorithm, key, block, self._raise_if_interrupted)
        except _Interrupted:
            return False
        except NotFound:  # no step refers to it any more, or the next save finds that the pack is missing
            return True
        if not is_intact and (steps := steps_referring_to(self._repo, block)):
            mark_damaged_in_all_tiers(self._repo, steps)
            log.error(
                "%s of %s refer to that block and count as damaged; the next save writes it anew",
                steps_text(steps),
                self._repo.url,
            )
        return True

    def _raise_if_interrupted(self) -> nullcontext[None]:
        """Between two pieces of a block."""
        if not self._no_saves.is_set() or self._closing.is_set():
            raise _Interrupted
        return nullcontext()


def refers_to_earlier(commit: CommitRecord) -> bool:
    """Whether a step has blocks that an earlier step wrote."""
    own = f"steps/{commit.step}/"
    return any(not file.name.startswith(own) for file in commit.packs)


def steps_referring_to(repo: Repository, block: PreviousBlock) -> list[int]:
    """The committed steps that a block belongs to. One whose manifest can't be read is left out."""
    found = []
    for commit in repo.commits():
        if any(file.name == block.pack for file in commit.packs):
            try:
                rows = repo.checkpoint(commit).manifest().by_block()
            except CkptError as error:
                log.warning("whether step %d refers to a damaged block is not known: %s", commit.step, error)
                continue
            if any((row.pack, row.position) == (block.pack, block.position) for row in rows):
                found.append(commit.step)
    return found
