"""The class UploadRenewal, which keeps the open uploads of a client of a node while the client writes nothing."""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from weakref import WeakSet

from ckpt.storage.base.errors import NotFound, StoreError, Unavailable
from ckpt.storage.base.store import Writer
from ckpt.storage.base.threads import try_start

log = logging.getLogger("ckpt")

RENEWALS_PER_LEASE = 4


class UploadWriter(Writer):
    """A writer of an upload of a node."""

    @abstractmethod
    def renew(self) -> None:
        """Renew the lease of the upload. Raises NotFound if the node has discarded the upload."""


class UploadRenewal:
    """Renews the leases of open writers in a thread, which runs while there are any. It may be used from many threads.

    It has no strong reference to a writer, so the upload of a writer that was dropped without an end expires.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards `_writers` and `_thread`. Guards changes of `_pause_seconds`."""
        self._writers: WeakSet[UploadWriter] = WeakSet()
        self._pause_seconds = 0.0
        self._thread: threading.Thread | None = None

    def add(self, writer: UploadWriter, lease_seconds: float) -> None:
        """Renew the lease of a writer until it is removed or dropped, or until the node has discarded its upload."""
        with self._lock:
            self._writers.add(writer)
            self._pause_seconds = lease_seconds / RENEWALS_PER_LEASE
            if self._thread is None or not self._thread.is_alive():  # a forked child does not have the thread of its parent
                self._thread = threading.Thread(target=self._renew_until_unused, name="ckpt-upload-leases", daemon=True)
                try_start(self._thread)  # without it, only a writer that pauses loses its upload

    def remove(self, writer: UploadWriter) -> None:
        """Renew the lease of a writer no more."""
        with self._lock:
            self._writers.discard(writer)

    def _renew_until_unused(self) -> None:
        while True:
            time.sleep(self._pause_seconds)
            with self._lock:
                if not self._writers:
                    self._thread = None
                    return
            try:
                self._renew_all()
            except Exception as error:  # also a lack of memory: without this thread, the files of writers that pause are lost
                log.warning("uploads could not be renewed, and are tried again: %s", error)

    def _renew_all(self) -> None:
        with self._lock:
            writers = list(self._writers)
        while writers:
            writer = writers.pop()  # keep no reference to a writer that was renewed: its user may drop it
            try:
                writer.renew()
            except NotFound:  # its next call raises the error where its user sees it
                self.remove(writer)
            except Unavailable as error:  # the node answers no call now, so the others wait for the next pause, too
                log.info("the uploads of a node can't be renewed now, and are tried again: %s", error)
                return
            except StoreError as error:
                log.info("an upload can't be renewed now, and is tried again: %s", error)
