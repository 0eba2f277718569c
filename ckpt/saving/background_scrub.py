"""The background scrub: slowly reads and verifies blocks of earlier steps to which newer steps refer.

A block that does not change is written once, and every later step refers to it. Without the scrub, nothing reads it until a
load needs it. If it is damaged by then, all of these steps are lost together. The scrub logs a damaged block, no later step
refers to it, and the next save writes it again.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import nullcontext
from dataclasses import replace

from ckpt.format.json_records import CommitRecord
from ckpt.repository.damage_registry import damaged_steps, mark_damaged_in_all_tiers
from ckpt.repository.file_names import step_folder
from ckpt.repository.repository import Repository, steps_text
from ckpt.saving.dedup import ContentKey, PreviousBlock, base_of, is_block_intact
from ckpt.storage.base.errors import CkptError, NotFound
from ckpt.storage.base.threads import try_start
from ckpt.support.runtime import lower_thread_priority

log = logging.getLogger("ckpt")

BYTES_PER_SECOND = 4 << 20
"""The default speed: 24 hours for 350 GB, and about a thousandth of the speed of a disk or a processor."""

FIRST_PASS_DELAY_SECONDS = 60.0
"""The time from the first save that refers to earlier steps to the first pass: fresh blocks need not be read at once."""

PASS_INTERVAL_SECONDS = 3600.0
"""The least time from the start of one pass over all blocks to the start of the next."""

_CLOSE_SECONDS = 2.0
"""How long `close` waits for a read. A read that hangs must not stop the program from ending."""

KeyedBlock = tuple[ContentKey, PreviousBlock]


class _Interrupted(Exception):
    """The read is abandoned, because a save begins or the program ends."""


class Scrubber:
    """A thread that reads blocks again. The first step that refers to an earlier one starts it; it pauses during saves."""

    def __init__(self, repo: Repository, rank: int | None, bytes_per_second: int | None) -> None:
        """rank: the rank whose blocks are read; None reads the blocks of all ranks.
        bytes_per_second: the speed; None reads nothing.
        """
        self._repo = repo
        self._rank = rank
        self._bytes_per_second = bytes_per_second or 0
        self._algorithm = ""
        self._save_count = 0  # running saves
        self._lock = threading.Lock()
        """Guards `_save_count`. Guards changes of `_thread`."""
        self._no_saves = threading.Event()  # set while no save runs
        self._no_saves.set()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def note_save_began(self) -> None:
        """Record that a save has begun, and abandon the current read."""
        with self._lock:
            self._save_count += 1
            self._no_saves.clear()

    def note_save_ended(self, commit: CommitRecord | None) -> None:
        """Record that a save has ended.

        commit: the commit record of the step; None if the save failed.
        """
        with self._lock:
            self._save_count -= 1
            if not self._save_count:
                self._no_saves.set()
            idle = self._thread is None and not self._closing.is_set()
            if self._bytes_per_second and idle and commit is not None and refers_to_earlier(commit):
                thread = threading.Thread(target=self._run, name="ckpt-scrub", daemon=True)
                if try_start(thread):  # otherwise the end of the next save tries again
                    self._thread = thread

    def close(self) -> None:
        """End the thread. If a read hangs, return after two seconds; the thread ends after the read."""
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
            except Exception as error:  # e.g. the store is unreachable, or a lack of memory; the next pass tries again
                log.info("the scrub of %s stops until the next pass: %s", self._repo.url, error)
            pause = max(0.0, began + PASS_INTERVAL_SECONDS - time.monotonic())

    def _run_pass(self) -> None:
        """Read once each block of earlier steps to which the newest step refers."""
        for key, block in self._shared_blocks():
            if self._closing.wait(block.stored / self._bytes_per_second):
                return
            while not self._check(key, block):
                self._no_saves.wait()
                if self._closing.is_set():
                    return

    def _shared_blocks(self) -> list[KeyedBlock]:
        """Return the blocks of earlier steps to which the newest step refers, in the order of their positions."""
        self._no_saves.wait()
        checkpoint = self._repo.latest(damaged_steps(self._repo))
        if checkpoint is None:
            return []
        own = f"{step_folder(checkpoint.step)}/"
        found = [(key, PreviousBlock(*at)) for key, at in checkpoint.manifest().blocks(self._rank).items()]
        bases = [base for (_, nbytes), block in found if (base := base_of(block, nbytes)) is not None]
        found = [(key, replace(block, base=None)) for key, block in found]  # each block is read once, and so is each base
        found = list({(block.pack, block.position): (key, block) for key, block in (*bases, *found)}.values())
        self._algorithm = checkpoint.manifest().digest_algorithm
        shared = [(key, block) for key, block in found if not block.pack.startswith(own)]
        return sorted(shared, key=lambda it: (it[1].pack, it[1].position))

    def _check(self, key: ContentKey, block: PreviousBlock) -> bool:
        """Read one block; return whether the read was complete, which it is not if a save begins."""
        try:
            is_intact = is_block_intact(self._repo.store, self._algorithm, key, block, self._raise_if_interrupted)
        except _Interrupted:
            return False
        except NotFound:  # no step refers to the block any more, or the next save will find that the pack is missing
            return True
        if not is_intact and (steps := steps_referring_to(self._repo, block)):
            mark_damaged_in_all_tiers(self._repo, steps)
            log.error(
                "%s of %s refer to the damaged block logged before, and count as damaged; the next save writes the block again",
                steps_text(steps),
                self._repo.url,
            )
        return True

    def _raise_if_interrupted(self) -> nullcontext[None]:
        """Raise _Interrupted if the read must stop; called between two parts of a block."""
        if not self._no_saves.is_set() or self._closing.is_set():
            raise _Interrupted
        return nullcontext()


def refers_to_earlier(commit: CommitRecord) -> bool:
    """Return whether a step has blocks that an earlier step wrote."""
    own = f"{step_folder(commit.step)}/"
    return any(not file.name.startswith(own) for file in commit.packs)


def steps_referring_to(repo: Repository, block: PreviousBlock) -> list[int]:
    """Return the committed steps that refer to a block, without those whose record or manifest can't be read."""
    found = []
    for step in repo.step_numbers():
        try:
            commit = repo.record(step)
            if all(file.name != block.pack for file in commit.packs):
                continue
            rows = repo.checkpoint(commit).manifest().by_block()
        except NotFound:
            continue
        except CkptError as error:
            log.warning("can't check whether step %d refers to a damaged block: %s", step, error)
            continue
        if any((row.pack, row.position) == (block.pack, block.position) for row in rows):
            found.append(step)
    return found
