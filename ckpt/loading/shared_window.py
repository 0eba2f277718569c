"""The class SharedWindow, memory through which the ranks of a host pass blocks that one of them has read.

Shared block k lies in slot k modulo the number of slots. The rank that reads a part of it waits until every rank has released
the block that was in the slot before. A rank that needs a part waits until the part is ready. The ranks communicate only
through bytes beside the slots, each written by one rank. So they make no call of the group's library until all is read. Stores
must become visible in the order in which they are made. x86 guarantees that and other processors do not, so those have no
window.

The memory has no name, so that nothing is left behind: rank 0 creates it (memfd_create(2)), and the others open its descriptor
under /proc. The kernel frees it when the last process unmaps it.
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
from ckpt.groups.base import GROUP_TIMEOUT_SECONDS, Group, ranks_text
from ckpt.groups.process_identity import ProcessIdentity, is_dead, this_process
from ckpt.state.leaves.base import Bytes
from ckpt.storage.base.call_timeout import WaitTimer
from ckpt.storage.base.checked_decode import decode
from ckpt.storage.base.failpoints import failpoint

_POLL_SECONDS = 0.0003, 0.003
"""The first and the longest interval between two polls: reading a block of 8 MiB takes some milliseconds."""

_LIVENESS_SECONDS = 0.5
"""The interval between two checks that the other ranks live."""

_MAPPED = b"1"


class RankFailed(Exception):
    """Another rank has failed. It raises the reason itself."""


class SharedWindow:
    """The shared memory of one load, mapped by every rank. `create` makes it.

    It is a context manager. A rank that leaves it with an error marks itself as failed, so that no other rank waits for it.
    """

    def __init__(self, group: Group, memory: mmap.mmap, slot_bytes: int, parts: int, owners: list[ProcessIdentity]) -> None:
        """slot_bytes: the size of the largest block, rounded up to pages.
        parts: the number of read jobs of all blocks.
        owners: the process of each rank.
        """
        self._group = group
        self._owners = owners
        seen = np.frombuffer(memory, np.uint8)
        header_bytes = _header_bytes(group.size, parts)
        self._released = seen[: 64 * group.size].view(np.int64)[::8]  # one cache line for each rank
        self._failed = seen[64 * group.size : 65 * group.size]
        self._ready = seen[65 * group.size : 65 * group.size + parts]
        self._slots = seen[header_bytes:].reshape(-1, slot_bytes)

    @classmethod
    def create(cls, group: Group, slots: int, slot_bytes: int, parts: int) -> SharedWindow | None:
        """Return a window for `group`, whose ranks all run on this host; None if one of them can't map it. Collective."""
        slot_bytes = round_up(slot_bytes)
        nbytes = _header_bytes(group.size, parts) + slots * slot_bytes
        fd = _create_memory(nbytes) if group.rank == 0 else None
        try:
            mine = {"fd": fd, "file": _file_identity(fd), "owner": asdict(this_process())}
            answers_of_open = [json.loads(answer) for answer in group.all_gather(json.dumps(mine).encode())]
            owners = [decode(ProcessIdentity, answer["owner"]) for answer in answers_of_open]
            maker, me = owners[0], owners[group.rank]
            memory = None
            # In another PID namespace, the pid of rank 0 would name another process.
            if answers_of_open[0]["fd"] is not None and maker.namespace == me.namespace:
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
        # The memory is unmapped when its views are deleted; frames of an error would keep them alive.
        del self._released, self._failed, self._ready, self._slots

    def wait_for_free_slot(self, block: int) -> Bytes:
        """Wait until every rank has released the block that was in the slot before, and return the slot of `block`."""
        before = block - len(self._slots)
        self._poll_until(
            lambda: bool((self._released > before).all()), lambda: np.flatnonzero(self._released <= before).tolist()
        )
        return self.slot(block)

    def mark_ready(self, part: int) -> None:
        """Mark a part as ready in its slot."""
        failpoint("load.window")
        self._ready[part] = 1

    def wait_until_ready(self, part: int, reader: int) -> None:
        """Wait until the rank `reader` has marked a part as ready."""
        self._poll_until(lambda: bool(self._ready[part]), lambda: [reader])

    def slot(self, block: int) -> Bytes:
        """Return the memory of a block, valid from when its parts are ready until this rank releases the block."""
        found: Bytes = self._slots[block % len(self._slots)]
        return found

    def release(self, block: int) -> None:
        """Mark that this rank no longer needs this block or one before it."""
        self._released[self._group.rank] = block + 1

    def mark_failed(self) -> None:
        """Mark this rank as failed, so that no other rank waits for it."""
        self._failed[self._group.rank] = 1

    def _poll_until(self, done: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        pause, longest = _POLL_SECONDS
        timer, last_check = WaitTimer(GROUP_TIMEOUT_SECONDS), time.monotonic()
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
            if not timer.remaining_seconds():
                raise GroupError(
                    f"{self._group!r}: {ranks_text(missing())} made no progress in a load for {GROUP_TIMEOUT_SECONDS:g} s; "
                    "check whether a process hangs or its storage does not answer, and restart the job"
                )
            time.sleep(pause)
            pause = min(longest, pause * 1.5)


def _header_bytes(size: int, parts: int) -> int:
    """Return the bytes before the slots: a counter and a failure mark for each rank, and a ready mark for each part."""
    return round_up(65 * size + parts)


def _create_memory(nbytes: int) -> int | None:
    """Return the descriptor of zeroed memory that other processes can open; None if this system has none."""
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
    """Return device and inode of a file, which distinguish it from any other."""
    found = None if fd is None else os.fstat(fd)
    return [] if found is None else [found.st_dev, found.st_ino]


def _map_memory_of_rank_0(path: str, identity: list[int], nbytes: int) -> mmap.mmap | None:
    """Map the memory of rank 0; return None if this process can't see it, for example from another container."""
    with suppress(OSError, ValueError):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            if _file_identity(fd) == identity:
                return mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
    return None
