"""A node on the same host as its client: which writes and reads the node's files by itself."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from ckpt.storage import near
from ckpt.storage.base import Writer
from ckpt.storage.descriptors import GrowingFile
from ckpt.storage.errors import CkptError, StoreError, Unavailable

if TYPE_CHECKING:
    from ckpt.storage.client import NodeStore

_AHEAD_BYTES = 64 << 20
"""Space is asked for at most so far ahead of what is written, and for no more than twice of it."""


class Neighbour:
    """The way to the descriptors of a node, as long as there is one."""

    def __init__(self, store: NodeStore, seconds: float) -> None:
        self._store = store
        self._seconds = seconds
        self._lock = threading.Lock()
        self._known = False
        self._door: near.Door | None = None
        self._reached = False

    def descriptors(self, verb: str, argument: str) -> list[int] | None:
        """What the caller closes; None where the bytes must go over the wire.

        Raises Unavailable where the node does not answer, and what it says.
        """
        found = self._ask(verb, argument)
        return None if found is None else found[1]

    def create(self, key: str, size_hint: int, where: str) -> Writer | None:
        """The upload `key` of `size_hint` bytes; None where it must go over the wire."""
        asked = self._ask("append", key)
        if asked is None:
            return None
        door, found = asked
        file = GrowingFile(found[0], found[1] if len(found) > 1 else None, where)
        return _NearWriter(self._store, key, file, size_hint, door.lease_seconds / 4, self._seconds)

    def _ask(self, verb: str, argument: str) -> tuple[near.Door, list[int]] | None:
        for _ in range(2):
            door = self._find()
            if door is None:
                return None
            try:
                found = near.ask(door, verb, argument, self._seconds)
            except TimeoutError as error:
                raise Unavailable(
                    f"{self._store.url} did not open {argument} within {self._seconds:g} s; see whether it runs"
                ) from error
            except ConnectionError:
                self._missed(door)
            except OSError:
                return None
            except CkptError as error:
                raise type(error)(f"{self._store.url}: {error}") from error
            else:
                self._reached = True
                return door, found
        return None

    def _find(self) -> near.Door | None:
        if not self._known:
            told = self._store.call("near")
            with self._lock:
                self._door = None if told is None or sys.platform != "linux" else near.Door(*told)
                self._known = True
        return self._door

    def _missed(self, door: near.Door) -> None:
        """Nobody is behind a door. If somebody was, the node has ended, and may have begun anew; else it is on another host."""
        with self._lock:
            if self._door is door:
                self._known, self._door = not self._reached, None


class _NearWriter(Writer):
    """An upload whose files are open here. Its node hears of it when space is needed, every `quiet_seconds`, and at the end."""

    def __init__(
        self, store: NodeStore, key: str, file: GrowingFile, reserved: int, quiet_seconds: float, seconds: float
    ) -> None:
        self._store = store
        self._key = key
        self._file = file
        self._reserved = reserved
        self._quiet_seconds = quiet_seconds
        self._seconds = seconds
        self._heard = time.monotonic()
        self._open = True

    def append(self, data: memoryview) -> int:
        data = data.cast("B")
        with self._file.place(len(data)) as position:
            self._reserve(position + len(data))
            self._file.write(data, position)
            self._reserve(0)
        return position

    def _reserve(self, end: int) -> None:
        """Have the space up to `end`, and the upload alive."""
        if end > self._reserved or time.monotonic() > self._heard + self._quiet_seconds:
            found: int = self._store.call("reserve", self._key, end, end + min(end, _AHEAD_BYTES))
            self._reserved = max(self._reserved, found)
            self._heard = time.monotonic()

    def commit(self) -> int:
        if not self._file.close(self._seconds):
            raise Unavailable(f"{self._store.url}: an append has not ended in {self._seconds:g} s; see whether the disk works")
        length: int = self._store.call("commit", self._key, self._file.length)
        self._open = False
        return length

    def abort(self) -> None:
        self._file.close()
        if self._open:
            self._open = False
            with suppress(StoreError):  # it expires by itself
                self._store.call("abort", self._key)
