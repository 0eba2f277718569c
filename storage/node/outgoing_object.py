"""An object on its way to a client, whose file is closed when the client takes nothing for too long."""

from __future__ import annotations

import threading
import time

from ckpt.storage.base.errors import Unavailable
from ckpt.storage.base.store import Reader


class OutgoingObject:
    """An object that a client reads. Flight has no way to end the call of one that takes nothing, but the file need not stay
    open for it: who deletes it wants its space."""

    def __init__(self, name: str, reader: Reader) -> None:
        self.name = name
        self._reader: Reader | None = reader
        self._lock = threading.Lock()
        self._last_read_at = time.monotonic()

    def read_into(self, position: int, buffer: memoryview) -> int:
        with self._lock:
            if self._reader is None:
                raise Unavailable(f"{self.name} was closed, for nothing of it was taken for too long; read it again")
            got = self._reader.read_into(position, buffer)
            self._last_read_at = time.monotonic()
            return got

    def expire(self, seconds: float) -> bool:
        """Close the file where nothing was asked of it for so long."""
        with self._lock:
            if self._reader is None or time.monotonic() - self._last_read_at < seconds:
                return False
        self.close()
        return True

    def close(self) -> None:
        with self._lock:
            if self._reader is not None:
                self._reader.close()
                self._reader = None
