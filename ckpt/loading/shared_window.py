"""Memory that the ranks of one host see, in which what one of them has read for all goes round, block by block.

Block k of all that go round lies in slot k modulo the number of slots. Who reads a part of it waits until every rank has
passed on from the block that was there before; who needs a part, as its reader does, waits until that is ready. That is all
that ranks tell each other: bytes beside the slots, each written by one rank, so that no call of the group's library is needed
until all is read. What is written first must be seen first, which x86 promises and others do not: there is none elsewhere.

The memory has no name that could be left behind: rank 0 makes it (memfd_create(2)), and the others open its descriptor
under /proc. It goes with the last process that has it.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

import numpy as np

from ckpt.block_io.staging_arena import round_up
from ckpt.errors import GroupError
from ckpt.groups.base import TIMEOUT_SECONDS, Group, ranks_text
from ckpt.groups.process_identity import ProcessIdentity, is_dead, this_process
from ckpt.state.leaves.base import Bytes
from ckpt.storage.base.checked_decode import decode
from ckpt.storage.base.failpoints import failpoint

_POLL_SECONDS = 0.0003, 0.003
"""Seconds between two looks, at first and at most: a block of 8 MiB takes some milliseconds to read."""

_LIVENESS_SECONDS = 0.5
"""Between two looks whether the others still live."""

_MAPPED = b"1"


class RankFailed(Exception):
    """Another rank has given up; it tells why itself."""


class SharedWindow:
    """Blocks of at most `slot_bytes` that go round in one load, read in so many parts. Every rank has one, by `meet`.

    A context: a rank that leaves it by an error gives up, so that no other waits for it.
    """

    def __init__(self, group: Group, memory: mmap.mmap, slot_bytes: int, parts: int, owners: list[ProcessIdentity]) -> None:
        self._group = group
        self._owners = owners
        seen = np.frombuffer(memory, np.uint8)
        told = _header_bytes(group.size, parts)
        self._released = seen[: 64 * group.size].view(np.int64)[::8]  # a line of the processor's cache for each rank
        self._failed = seen[64 * group.size : 65 * group.size]
        self._ready = seen[65 * group.size : 65 * group.size + parts]
        self._slots = seen[told:].reshape(-1, slot_bytes)

    @classmethod
    def create(cls, group: Group, slots: int, slot_bytes: int, parts: int) -> SharedWindow | None:
        """One for `group`, all of whose ranks run on this host; None where one of them can't have it. Collective."""
        slot_bytes = round_up(slot_bytes)
        nbytes = _header_bytes(group.size, parts) + slots * slot_bytes
        fd = _create_memory(nbytes) if group.rank == 0 else None
        try:
            mine = {"fd": fd, "file": _file_identity(fd), "owner": asdict(this_process())}
            answers_of_open = [json.loads(answer) for answer in group.all_gather(json.dumps(mine).encode())]
            owners = [decode(ProcessIdentity, answer["owner"]) for answer in answers_of_open]
            maker, me = owners[0], owners[group.rank]
            memory = None
            if answers_of_open[0]["fd"] is not None and maker.namespace == me.namespace:  # else the number is another process's
                memory = _map_memory_of_rank_0(
                    f"/proc/{maker.pid}/fd/{answers_of_open[0]['fd']}", answers_of_open[0]["file"], nbytes
                )
            answers = group.all_gather(b"" if memory is None else _MAPPED)
        finally:
            if fd is not None:
                os.close(fd)
        if memory is None or any(answer != _MAPPED for answer in answers):
            return None
        return cls(group, memory, slot_bytes, parts, owners)

    def __enter__(self) -> SharedWindow:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.mark_failed()
        # The mapping goes with its views: the frames of an error may live as long as that.
        del self._released, self._failed, self._ready, self._slots

    def wait_for_free_slot(self, block: int) -> Bytes:
        """The slot of a block, once nobody needs what was there before."""
        before = block - len(self._slots)
        self._poll_until(
            lambda: bool((self._released > before).all()), lambda: np.flatnonzero(self._released <= before).tolist()
        )
        return self.slot(block)

    def mark_ready(self, part: int) -> None:
        """Say that a part is in its place."""
        failpoint("load.window")
        self._ready[part] = 1

    def wait_until_ready(self, part: int, reader: int) -> None:
        """Come back when a part is in its place, where `reader` puts it."""
        self._poll_until(lambda: bool(self._ready[part]), lambda: [reader])

    def slot(self, block: int) -> Bytes:
        """Where a block is, from when its parts are ready until this rank passes on."""
        found: Bytes = self._slots[block % len(self._slots)]
        return found

    def release(self, block: int) -> None:
        """Say that this rank needs neither this block any more nor one before it."""
        self._released[self._group.rank] = block + 1

    def mark_failed(self) -> None:
        """Let no other rank wait for this one."""
        self._failed[self._group.rank] = 1

    def _poll_until(self, done: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        pause, longest = _POLL_SECONDS
        started = last_check = time.monotonic()
        while not done():
            failed = bool(self._failed.any())
            now = time.monotonic()
            if failed or now > last_check + _LIVENESS_SECONDS:
                last_check = now
                me = self._owners[self._group.rank]
                if dead := [rank for rank, owner in enumerate(self._owners) if is_dead(owner, me)]:
                    raise GroupError(f"{self._group!r}: {ranks_text(dead)} died in a load; restart the job")
            if failed:
                raise RankFailed
            if now > started + TIMEOUT_SECONDS:
                raise GroupError(
                    f"{self._group!r}: {ranks_text(missing())} did not go on with a load for {TIMEOUT_SECONDS:g} s; see "
                    "whether one stands still or its storage does not answer, and restart the job"
                )
            time.sleep(pause)
            pause = min(longest, pause * 1.5)


def _header_bytes(size: int, parts: int) -> int:
    """What lies before the slots: a counter and a mark of failure for each rank, a mark for each part."""
    return round_up(65 * size + parts)


def _create_memory(nbytes: int) -> int | None:
    """Memory of zeros that other processes can open; None where this system has none."""
    if not hasattr(os, "memfd_create") or platform.machine() not in ("x86_64", "AMD64"):
        return None
    with suppress(OSError):
        fd = os.memfd_create("ckpt-load", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
        except OSError:
            os.close(fd)
            raise
        return fd
    return None


def _file_identity(fd: int | None) -> list[int]:
    """What tells the memory from any other file."""
    found = None if fd is None else os.fstat(fd)
    return [] if found is None else [found.st_dev, found.st_ino]


def _map_memory_of_rank_0(path: str, identity: list[int], nbytes: int) -> mmap.mmap | None:
    """The memory of rank 0; None where this process does not see it, as from another container."""
    with suppress(OSError, ValueError):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            if _file_identity(fd) == identity:
                return mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
    return None
