"""The class OutgoingObject, an object that a node sends, closed if the client reads nothing for too long."""

from __future__ import annotations

import threading
import time

from ckpt.storage.base.errors import Unavailable
from ckpt.storage.base.store import Reader


class OutgoingObject:
    """An object that a client reads.

    Flight can't end the call of a client that reads nothing. But the file must be closed, because otherwise the space of a
    deleted object is not freed.
    """

    def __init__(self, name: str, reader: Reader) -> None:
        self.name = name
        self._reader: Reader | None = reader
        self._lock = threading.Lock()
        """Guards `_reader` and `_last_read_at`. It is held during a read, so that no other thread closes the file."""
        self._last_read_at = time.monotonic()

    def read_into(self, position: int, buffer: memoryview) -> int:
        """See `Reader.read_into`. Raises Unavailable after `expire` has closed the file."""
        with self._lock:
            if self._reader is None:
                raise Unavailable(f"{self.name} was closed, because its client read nothing for too long; read it again")
            got = self._reader.read_into(position, buffer)
            self._last_read_at = time.monotonic()
            return got

    def expire(self, seconds: float) -> bool:
        """Close the file if nothing was read for this long, and is not being read now; return whether it was closed."""
        if self._lock.locked():  # a read of a slow disk must not delay the caller
            return False
        with self._lock:
            if self._reader is None or time.monotonic() - self._last_read_at < seconds:
                return False
        self.close()
        return True

    def close(self) -> None:
        """Close the file if it is open."""
        with self._lock:
            if self._reader is not None:
                self._reader.close()
                self._reader = None
