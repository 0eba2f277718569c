"""One process of many that does something for a namespace, such as looking after it.

Whoever holds an office keeps it while it renews it in time; it is a register like any other. No clock is compared with that of
another host: a holder counts its terms, and who has seen the count stand still for long enough, by its own clock, takes over.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import msgpack

from ckpt.aggregator.records.namespace_records import NamespaceRecords
from ckpt.storage.base.checked_decode import Malformed, decode
from ckpt.storage.registers.base import RegisterValue

log = logging.getLogger("ckpt.node")

REPAIR_LEADER_REGISTER = "caretaker"
"""The register's name, which no path has. Its value: who holds the office, and the number of the term."""


class Election:
    """Who looks after a namespace, as one process sees it. seconds: a term that is so old, and not renewed, is over.

    office: the register; another one is another office.
    """

    def __init__(
        self, records: NamespaceRecords, process_id: str, term_seconds: float, register: str = REPAIR_LEADER_REGISTER
    ) -> None:
        self._records = records
        self._register = register
        self._process_id = process_id
        self._term_seconds = term_seconds
        self._last_value = b""
        self._last_change_at = 0.0

    def try_lead(self) -> bool:
        """Whether this process looks after the namespace now. It is to ask again within the term."""
        expired_value = self._last_value if time.monotonic() - self._last_change_at >= self._term_seconds else None

        def decide(_: str, value: RegisterValue | None) -> RegisterValue | None:
            if value is None:
                return RegisterValue(msgpack.packb([self._process_id, 1]))
            holder = _decode_leader(value.head)
            if holder.name != self._process_id and value.head != expired_value:
                return None
            return RegisterValue(msgpack.packb([self._process_id, holder.term + 1]))

        value = self._records.update_register(self._register, decide)
        if value is None:
            return False
        if value.head != self._last_value:  # what was agreed: decide is shown what a single member knows, too
            self._last_value, self._last_change_at = value.head, time.monotonic()
        return _decode_leader(value.head).name == self._process_id


@dataclass(frozen=True, slots=True)
class _Leader:
    """Who holds the office, and the number of the term."""

    name: str = ""
    term: int = 0


def _decode_leader(head: bytes) -> _Leader:
    """Of an agreed value; nobody where it can't be read, so that its term ends as any other that is not renewed."""
    try:
        row = msgpack.unpackb(head)
        if not isinstance(row, list) or len(row) < 2:  # a newer version may add some
            raise Malformed("is no list of two")
        return decode(_Leader, {"name": row[0], "term": row[1]})
    except ValueError as error:
        log.warning("who looks after the namespace can't be read (%s); somebody else is elected when this term is over", error)
        return _Leader()
