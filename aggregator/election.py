"""One process of many that does something for a namespace, such as looking after it.

Whoever holds an office keeps it while it renews it in time; it is a register like any other. No clock is compared with that of
another host: a holder counts its terms, and who has seen the count stand still for long enough, by its own clock, takes over.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import msgpack

from ckpt.aggregator.namespace import Namespace
from ckpt.storage.decode import Malformed, decode
from ckpt.storage.registers import Value

log = logging.getLogger("ckpt.node")

OFFICE = "caretaker"
"""The register's name, which no path has. Its value: who holds the office, and the number of the term."""


class Election:
    """Who looks after a namespace, as one process sees it. seconds: a term that is so old, and not renewed, is over.

    office: the register; another one is another office.
    """

    def __init__(self, namespace: Namespace, me: str, seconds: float, office: str = OFFICE) -> None:
        self._namespace = namespace
        self._office = office
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

        value = self._namespace.office(self._office, decide)
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
