"""Repairs that go on by themselves, in one of the processes that offer to make them.

Whoever holds the office keeps it while it renews it in time; it is a register like any other. No clock is compared with that
of another host: a holder counts its terms, and who has seen the count stand still for long enough, by its own clock, takes
over. That two hold the office for a moment costs some reading twice: a repair changes a record only if it still is what it
read.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

import msgpack

from ckpt.aggregator import repair as repairs
from ckpt.aggregator import survey as surveys
from ckpt.aggregator.namespace import Namespace
from ckpt.storage.decode import Malformed, decode
from ckpt.storage.errors import CkptError
from ckpt.storage.registers import Value

log = logging.getLogger("ckpt.node")

OFFICE = "caretaker"
"""The register's name, which no path has. Its value: who holds the office, and the number of the term."""


class Election:
    """Who looks after a namespace, as one process sees it. seconds: a term that is so old, and not renewed, is over."""

    def __init__(self, namespace: Namespace, me: str, seconds: float) -> None:
        self._namespace = namespace
        self._me = me
        self._seconds = seconds
        self._seen = b""
        self._seen_at = 0.0

    def won(self) -> bool:
        """Whether this process looks after the namespace now. It is to ask again within the term."""
        over = self._seen if time.monotonic() - self._seen_at >= self._seconds else None

        def decide(_: str, value: Value | None) -> Value | None:
            if value is None:
                return Value(msgpack.packb([self._me, 1]))
            holder = _holder(value.head)
            if holder.name != self._me and value.head != over:
                return None
            return Value(msgpack.packb([self._me, holder.term + 1]))

        value = self._namespace.office(OFFICE, decide)
        if value is None:
            return False
        if value.head != self._seen:  # what was agreed: decide is shown what a single member knows, too
            self._seen, self._seen_at = value.head, time.monotonic()
        return _holder(value.head).name == self._me


@dataclass(frozen=True, slots=True)
class _Holder:
    """Who holds the office, and the number of the term."""

    name: str = ""
    term: int = 0


def _holder(head: bytes) -> _Holder:
    """Of an agreed value; nobody where it can't be read, so that its term ends as any other that is not renewed."""
    try:
        row = msgpack.unpackb(head)
        if not isinstance(row, list) or len(row) < 2:  # a newer version may add some
            raise Malformed("is no list of two")
        return decode(_Holder, {"name": row[0], "term": row[1]})
    except ValueError as error:
        log.warning("who looks after the namespace can't be read (%s); somebody else is elected when this term is over", error)
        return _Holder()


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
