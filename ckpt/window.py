"""Memory that the ranks of one host see, in which what one of them has read for all goes round, block by block.

Block k of all that go round lies in slot k modulo the number of slots. Who reads a part of it waits until every rank has
passed on from the block that was there before; who needs a part, as its reader does, waits until that is ready. That is all
that ranks tell each other: bytes beside the slots, each written by one rank, so that no call of the group's library is needed
until all is read.

The memory has no name that could be left behind: rank 0 makes it (memfd_create(2)), and the others open its descriptor
under /proc. It goes with the last process that has it.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

import numpy as np

from ckpt.claim import Owner, is_dead, this_process
from ckpt.groups.base import TIMEOUT_SECONDS, Group, late, ranks_text
from ckpt.leaves.base import Bytes
from ckpt.storage.base import ALIGNMENT
from ckpt.storage.errors import GroupError
from ckpt.storage.failpoints import failpoint

_WAIT_SECONDS = 0.0005
"""Between two looks: a block of 8 MiB takes some ten times as long to read."""

_LOOK_SECONDS = 0.5
"""Between two looks whether the others still live."""


class RankFailed(Exception):
    """Another rank has given up; it tells why itself."""


class Window:
    """Blocks of at most `slot_bytes` that go round in one load, read in so many parts. Every rank has one, by `meet`."""

    def __init__(self, group: Group, memory: mmap.mmap, slot_bytes: int, parts: int, owners: list[Owner]) -> None:
        self._group = group
        self._memory = memory
        self._owners = owners
        self._me = owners[group.rank]
        seen = np.frombuffer(memory, np.uint8)
        told = _told_bytes(group.size, parts)
        self._passed = seen[: 64 * group.size].view(np.int64)[::8]  # a line of the processor's cache for each rank
        self._failed = seen[64 * group.size : 65 * group.size]
        self._ready = seen[65 * group.size : 65 * group.size + parts]
        self._slots: list[Bytes] = [*seen[told:].reshape(-1, slot_bytes)]

    @classmethod
    def meet(cls, group: Group, most_bytes: int, slot_bytes: int, parts: int) -> Window | None:
        """One for `group`, all of whose ranks run on this host; None where one of them can't have it. Collective.

        most_bytes: of all slots together, though there are two of them at least.
        """
        slot_bytes = -(-slot_bytes // ALIGNMENT) * ALIGNMENT
        nbytes = _told_bytes(group.size, parts) + max(2, most_bytes // slot_bytes) * slot_bytes
        fd = _new(nbytes) if group.rank == 0 else None
        try:
            mine = {"fd": fd, "file": _identity(fd), "owner": asdict(this_process())}
            told = [json.loads(answer) for answer in group.all_gather(json.dumps(mine).encode())]
            owners = [Owner(**answer["owner"]) for answer in told]
            memory = _opened(f"/proc/{owners[0].pid}/fd/{told[0]['fd']}", told[0]["file"], nbytes)
            everywhere = all(group.all_gather(b"" if memory is None else b"1"))
        finally:
            if fd is not None:
                os.close(fd)
        return cls(group, memory, slot_bytes, parts, owners) if everywhere and memory is not None else None

    def to_fill(self, block: int) -> Bytes:
        """The slot of a block, once nobody needs what was there before."""
        before = block - len(self._slots)
        self._wait(lambda: bool((self._passed > before).all()), lambda: np.flatnonzero(self._passed <= before).tolist())
        return self.slot(block)

    def is_ready(self, part: int) -> None:
        """Say that a part is in its place."""
        failpoint("load.window")
        self._ready[part] = 1

    def wait_for(self, part: int, reader: int) -> None:
        """Come back when a part is in its place, where `reader` puts it."""
        self._wait(lambda: bool(self._ready[part]), lambda: [reader])

    def slot(self, block: int) -> Bytes:
        """Where a block is, from when its parts are ready until this rank passes on."""
        return self._slots[block % len(self._slots)]

    def pass_on(self, block: int) -> None:
        """Say that this rank needs neither this block any more nor one before it."""
        self._passed[self._group.rank] = block + 1

    def give_up(self) -> None:
        """Let no other rank wait for this one."""
        self._failed[self._group.rank] = 1

    def _wait(self, done: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        begun = looked = time.monotonic()
        while not done():
            failed = bool(self._failed.any())
            now = time.monotonic()
            if failed or now > looked + _LOOK_SECONDS:
                looked = now
                if dead := [rank for rank, owner in enumerate(self._owners) if is_dead(owner, self._me)]:
                    raise GroupError(f"{self._group!r}: {ranks_text(dead)} died in a load; restart the job")
            if failed:
                raise RankFailed
            if now > begun + TIMEOUT_SECONDS:
                raise late(self._group, missing(), "read what all need", TIMEOUT_SECONDS)
            time.sleep(_WAIT_SECONDS)


def _told_bytes(size: int, parts: int) -> int:
    """What lies before the slots: a counter and a mark of failure for each rank, a mark for each part."""
    return -(-(65 * size + parts) // ALIGNMENT) * ALIGNMENT


def _new(nbytes: int) -> int | None:
    """Memory of zeros that other processes can open; None where this system has none."""
    if not hasattr(os, "memfd_create"):
        return None
    with suppress(OSError):
        fd = os.memfd_create("ckpt-load", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        return fd
    return None


def _identity(fd: int | None) -> list[int]:
    """What tells the memory from any other file."""
    found = None if fd is None else os.fstat(fd)
    return [] if found is None else [found.st_dev, found.st_ino]


def _opened(path: str, identity: list[int], nbytes: int) -> mmap.mmap | None:
    """The memory of rank 0; None where this process does not see it, as from another container."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if _identity(fd) == identity:
                return mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
    return None
