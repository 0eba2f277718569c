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

from ckpt.damage_registry import damaged_steps, mark_damaged_in_all_tiers
from ckpt.known import KnownBlock, is_whole
from ckpt.quiet import be_nice
from ckpt.records import CommitRecord
from ckpt.repository import Repository, listed
from ckpt.storage.errors import CkptError, NotFound

log = logging.getLogger("ckpt")

BYTES_PER_SECOND = 4 << 20
"""By default: 24 hours for 350 GB, and about a thousandth of what a disk or a processor can do."""

FIRST_SECONDS = 60.0
"""After the first save that refers to earlier steps: what this process has just written or read is not read again at once."""

PASS_SECONDS = 3600.0
"""From the beginning of one pass over all blocks to that of the next, at least."""

_END_SECONDS = 2.0
"""How long `close` waits for a read under way. One that hangs must not hold the program."""

Found = tuple[tuple[bytes, int], KnownBlock]
"""A block and its digest and raw length."""


class _Interrupted(Exception):
    """A save begins, or the program ends: the read under way is given up."""


class Scrubber:
    """A thread that begins with the first step that refers to an earlier one. It reads nothing while a save is under way."""

    def __init__(self, repo: Repository, rank: int | None, bytes_per_second: int | None) -> None:
        """rank: whose blocks are read; None: all. bytes_per_second: None reads nothing."""
        self._repo = repo
        self._rank = rank
        self._rate = bytes_per_second or 0
        self._algorithm = ""
        self._saves = 0  # under way; changed under the lock
        self._lock = threading.Lock()
        self._free = threading.Event()  # there are none
        self._free.set()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def save_begins(self) -> None:
        """What is being read is given up."""
        with self._lock:
            self._saves += 1
            self._free.clear()

    def save_ended(self, commit: CommitRecord | None) -> None:
        """commit: of the step, None where the save failed."""
        with self._lock:
            self._saves -= 1
            if not self._saves:
                self._free.set()
            idle = self._thread is None and not self._closing.is_set()
            if self._rate and idle and commit is not None and refers_to_earlier(commit):
                self._thread = threading.Thread(target=self._run, name="ckpt-scrub", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread; it ends soon after, where a read hangs."""
        self._closing.set()
        self._free.set()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)

    # --- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        be_nice()
        pause = FIRST_SECONDS
        while not self._closing.wait(pause):
            began = time.monotonic()
            try:
                self._pass()
            except CkptError as error:  # a store out of reach, a step deleted meanwhile: the next pass looks again
                log.info("blocks of %s are not read again now: %s", self._repo.url, error)
            pause = max(0.0, began + PASS_SECONDS - time.monotonic())

    def _pass(self) -> None:
        """Read each block of earlier steps that the newest step refers to, once."""
        for key, block in self._shared_blocks():
            if self._closing.wait(block.stored / self._rate):
                return
            while not self._check(key, block):
                self._free.wait()
                if self._closing.is_set():
                    return

    def _shared_blocks(self) -> list[Found]:
        """In the order in which they lie."""
        self._free.wait()
        checkpoint = self._repo.latest(damaged_steps(self._repo))
        if checkpoint is None:
            return []
        own = f"steps/{checkpoint.step}/"
        found = [(key, KnownBlock(*at)) for key, at in checkpoint.manifest().blocks(self._rank).items()]
        self._algorithm = checkpoint.manifest().digest_algorithm
        shared = [(key, block) for key, block in found if not block.pack.startswith(own)]
        return sorted(shared, key=lambda it: (it[1].pack, it[1].position))

    def _check(self, key: tuple[bytes, int], block: KnownBlock) -> bool:
        """Whether the read came to its end; it does not where a save begins."""
        try:
            whole = is_whole(self._repo.store, self._algorithm, key, block, self._between)
        except _Interrupted:
            return False
        except NotFound:  # no step refers to it any more, or the next save finds that the pack is missing
            return True
        if not whole and (steps := steps_that_refer(self._repo, block)):
            mark_damaged_in_all_tiers(self._repo, steps)
            log.error(
                "%s of %s refer to that block and count as damaged; the next save writes it anew", listed(steps), self._repo.url
            )
        return True

    def _between(self) -> nullcontext[None]:
        """Between two pieces of a block."""
        if not self._free.is_set() or self._closing.is_set():
            raise _Interrupted
        return nullcontext()


def refers_to_earlier(commit: CommitRecord) -> bool:
    """Whether a step has blocks that an earlier step wrote."""
    own = f"steps/{commit.step}/"
    return any(not file.name.startswith(own) for file in commit.packs)


def steps_that_refer(repo: Repository, block: KnownBlock) -> list[int]:
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
