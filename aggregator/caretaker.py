"""Repairs that go on by themselves, in one of the processes that offer to make them.

Whoever holds the office keeps it while it renews it in time; it is a register like any other. That two hold it for a moment,
because their clocks differ, costs some reading twice: a repair changes a record only if it still is what it read.
"""

from __future__ import annotations

import logging
import threading
import time

import msgpack

from ckpt.aggregator import repair as repairs
from ckpt.aggregator.namespace import Namespace
from ckpt.storage.errors import CkptError
from ckpt.storage.registers import Value

log = logging.getLogger("ckpt.node")

OFFICE = "caretaker"
"""The register's name, which no path has."""


def elected(namespace: Namespace, me: str, seconds: float) -> bool:
    """Whether this process looks after the namespace for the next so many seconds."""
    now = time.time()

    def decide(_: str, value: Value | None) -> Value | None:
        if value is not None:
            who, until = msgpack.unpackb(value.head)
            if who != me and now < until:
                return None
        return Value(msgpack.packb([me, now + seconds]))

    value = namespace.office(OFFICE, decide)
    return value is not None and msgpack.unpackb(value.head)[0] == me


class Caretaker:
    """Looks after a namespace in the background, whenever it is elected, until `close`."""

    def __init__(
        self, namespace: Namespace, me: str, every_seconds: float, rate: float | None = None, scrub_every: int = 24
    ) -> None:
        self._namespace = namespace
        self._me = me
        self._every = every_seconds
        self._rate = rate
        self._scrub_every = scrub_every
        self._rounds = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckpt-caretaker", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            try:
                if self._namespace.exists() and elected(self._namespace, self._me, 3 * self._every):
                    self.once(verify=self._rounds % self._scrub_every == 0)
                    self._rounds += 1
            except (CkptError, OSError) as error:
                log.warning("looking after %s failed, and is tried again: %s", self._namespace.url, error)

    def once(self, verify: bool) -> None:
        """One round. verify: read everything, too."""
        found = repairs.survey(self._namespace, verify)
        if found.whole:
            log.info("%s is whole: %d files", self._namespace.url, found.files)
            return
        done = repairs.repair(self._namespace, found, self._rate)
        log.info(
            "%s: %d files made whole, %d records, %d objects deleted, %d files could not be made whole, %d members missing",
            self._namespace.url, done.files, done.records, done.orphans, len(done.failed), len(found.missing),
        )  # fmt: skip

    def close(self) -> None:
        self._stop.set()
        self._thread.join(60)
