"""Threads of one process as ranks, for tests of groups."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence

from ckpt.errors import GroupError
from ckpt.groups.base import Group, Message, timeout_error


class _SharedState:
    """The data that the threads of a group exchange."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        """Guards `gathers` and `messages`. Notified when the data of a rank or a message arrive."""
        self.gathers: defaultdict[int, dict[int, bytes]] = defaultdict(dict)
        """The data of each rank, by the number of the gather."""
        self.messages: defaultdict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        """The messages that were not received yet, by sender and receiver."""


class ThreadGroup(Group):
    """The group as one of its threads sees it."""

    name = "threads"
    can_exchange = True

    def __init__(self, rank: int, size: int, shared: _SharedState, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self._shared = shared
        self._timeout = timeout
        self._gather_count = 0

    @staticmethod
    def make(size: int, timeout: float = 60) -> list[Group]:
        """Return one group object for each of `size` threads; they wait for each other `timeout` seconds."""
        shared = _SharedState()
        return [ThreadGroup(rank, size, shared, timeout) for rank in range(size)]

    def all_gather(self, data: bytes) -> list[bytes]:
        number = self._gather_count
        self._gather_count += 1
        with self._shared.condition:
            parts = self._shared.gathers[number]
            parts[self.rank] = bytes(data)
            self._shared.condition.notify_all()
            if not self._shared.condition.wait_for(lambda: len(parts) == self.size, self._timeout):
                raise timeout_error(self, [r for r in range(self.size) if r not in parts], "a gather", self._timeout)
            self._shared.gathers.pop(number - 1, None)  # all ranks have joined this gather, so all left the previous one
            return [parts[rank] for rank in range(self.size)]

    def _exchange(self, send: Sequence[Message], receive: Sequence[Message]) -> None:
        messages, changed = self._shared.messages, self._shared.condition
        with changed:
            for peer, data in send:
                messages[self.rank, peer].append(bytes(data))
            changed.notify_all()
        for peer, data in receive:
            queue = messages[peer, self.rank]
            with changed:
                if not changed.wait_for(queue.__len__, self._timeout):
                    raise timeout_error(self, [peer], "an exchange", self._timeout)
                message = queue.popleft()
            if len(message) != len(data):
                raise GroupError(
                    f"{self!r}: rank {peer} sent {len(message)} bytes where {len(data)} were expected; give the receiver "
                    "memory of the length that is sent"
                )
            data[:] = message
