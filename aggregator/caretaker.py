"""Repairs that go on by themselves, in one of the processes that offer to make them.

That two hold the office (`election.py`) for a moment costs some reading twice: a repair changes a record only if it still is
what it read.
"""

from __future__ import annotations

import logging
import threading

from ckpt.aggregator import repair as repairs
from ckpt.aggregator import survey as surveys
from ckpt.aggregator.collection import collect
from ckpt.aggregator.election import OFFICE, Election
from ckpt.aggregator.namespace import Namespace
from ckpt.storage.errors import CkptError

log = logging.getLogger("ckpt.node")

__all__ = ["OFFICE", "Caretaker", "Election"]


class Caretaker:
    """Looks after a namespace in the background, whenever it is elected, until `close`."""

    def __init__(
        self, namespace: Namespace, me: str, every_seconds: float, rate: float | None = None, scrub_every: int = 24
    ) -> None:
        self._namespace = namespace
        self._every = every_seconds
        self._election = Election(namespace, me, 3 * every_seconds)
        self._rate = rate
        self._scrub_every = scrub_every
        self._rounds = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckpt-caretaker", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            try:
                if self._namespace.exists() and self._election.won():
                    self.once(verify=self._rounds % self._scrub_every == 0)
                    self._rounds += 1
            except (CkptError, OSError) as error:
                log.warning("looking after %s failed, and is tried again: %s", self._namespace.url, error)

    def once(self, verify: bool) -> None:
        """One round. verify: read everything, too."""
        found = surveys.survey(self._namespace, verify)
        if found.whole:
            log.info("%s is whole: %d files", self._namespace.url, found.files)
            collect(self._namespace)
            return
        done = repairs.repair(self._namespace, found, self._rate)
        log.info(
            "%s: %d files made whole, %d records, %d objects deleted, %d files could not be made whole, %d members missing",
            self._namespace.url, done.files, done.records, done.orphans, len(done.failed), len(found.missing),
        )  # fmt: skip

    def close(self, seconds: float) -> None:
        """Begin no other round; wait so long for the end of this one. Cut off, it is harmless."""
        self._stop.set()
        self._thread.join(seconds)
