"""The election of one process of many that does background work for a namespace, such as repairs.

The leader is recorded in a register, and stays leader while it renews its term in time. Clocks of different hosts are never
compared: the leader increments a term number, and a process that has not seen the number change for the length of a term, by
its own clock, takes over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgpack

from ckpt.aggregator.records.namespace_records import NamespaceRecords
from ckpt.storage.base.checked_decode import Malformed, decode
from ckpt.storage.base.threads import WorkerThread, try_start
from ckpt.storage.registers.base import RegisterValue

log = logging.getLogger("ckpt.node")

REPAIR_LEADER_REGISTER = "caretaker"
"""The name of the register of the repair leader, which no path has. Its value is the leader and the number of its term."""


class Election:
    """The part of one process in an election. Safe to use from many threads.

    process_id: the name of this process in the register. term_seconds: a term that was not renewed for this time is over.
    register: the name of the register; each register is a separate election.
    """

    def __init__(
        self, records: NamespaceRecords, process_id: str, term_seconds: float, register: str = REPAIR_LEADER_REGISTER
    ) -> None:
        self._records = records
        self._register = register
        self._process_id = process_id
        self._term_seconds = term_seconds
        self._lock = threading.Lock()
        """Guards `_last_value` and `_last_change_at`. Held during a whole try to lead, so that tries take turns."""
        self._last_value = b""
        self._last_change_at = 0.0

    def try_lead(self) -> bool:
        """Begin or renew the term of this process if possible, and return whether it is the leader now.

        A leader must call it again within the term. Raises Unavailable if the register can't be changed now.
        """
        with self._lock:
            return self._try_lead()

    @contextmanager
    def renewed_term(self) -> Iterator[None]:
        """A context in which a thread renews the term of the leader, whose work may take many terms."""
        ended = threading.Event()
        renewal = WorkerThread(target=self._renew_term, args=(ended,), name=f"ckpt-{self._register}-term", daemon=True)
        is_started = try_start(renewal)  # without a thread, another process may begin the work too, which is harmless
        try:
            yield
        finally:
            ended.set()
            if is_started:
                renewal.join()

    def _renew_term(self, ended: threading.Event) -> None:
        while not ended.wait(self._term_seconds / 3):
            try:
                self.try_lead()
            except Exception as error:  # also a lack of memory or threads: later renewals may still be in time
                log.info(
                    "%s: the term of the leader in register %s was not renewed: %s", self._records.url, self._register, error
                )

    def _try_lead(self) -> bool:
        """Try to lead, as `try_lead` does. Needs `_lock`."""
        expired_value = self._last_value if time.monotonic() - self._last_change_at >= self._term_seconds else None

        def decide(_: str, value: RegisterValue | None) -> RegisterValue | None:
            if value is None:
                return RegisterValue(msgpack.packb([self._process_id, 1]))
            leader = _decode_leader(value.head)
            if leader.name != self._process_id and value.head != expired_value:
                return None
            return RegisterValue(msgpack.packb([self._process_id, leader.term + 1]))

        value = self._records.update_register(self._register, decide)
        if value is None:
            return False
        if value.head != self._last_value:  # this value is agreed; `decide` may see a value that only one member has
            self._last_value, self._last_change_at = value.head, time.monotonic()
        return _decode_leader(value.head).name == self._process_id


@dataclass(frozen=True, slots=True)
class _Leader:
    """The leader's name and the number of its term."""

    name: str = ""
    term: int = 0


def _decode_leader(head: bytes) -> _Leader:
    """Return the leader of an agreed value. Where it can't be read, the leader has no name, and its term expires."""
    try:
        row = msgpack.unpackb(head)
        if not isinstance(row, list) or len(row) < 2:  # a newer version may add elements
            raise Malformed("is not a list of two")
        return decode(_Leader, {"name": row[0], "term": row[1]})
    except ValueError as error:
        log.warning("the elected leader of the namespace can't be read (%s); another one is elected after its term", error)
        return _Leader()
