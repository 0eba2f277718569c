"""Repairs that go on by themselves, in one of the processes that offer to make them.

That two hold the office (`election.py`) for a moment costs some reading twice: a repair changes a record only if it still is
what it read.
"""

from __future__ import annotations

import logging
import threading

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import repair as repairs
from ckpt.aggregator.maintenance import scrub as surveys
from ckpt.aggregator.records.leader_election import REPAIR_LEADER_REGISTER, Election
from ckpt.aggregator.records.record_collection import collect_tombstones
from ckpt.storage.base.errors import CkptError

log = logging.getLogger("ckpt.node")

__all__ = ["REPAIR_LEADER_REGISTER", "Election", "RepairLeader"]


class RepairLeader:
    """Looks after a namespace in the background, whenever it is elected, until `close`."""

    def __init__(
        self,
        namespace: Namespace,
        process_id: str,
        interval_seconds: float,
        bytes_per_second: float | None = None,
        rounds_per_scrub: int = 24,
    ) -> None:
        self._namespace = namespace
        self._interval_seconds = interval_seconds
        self._election = Election(namespace, process_id, 3 * interval_seconds)
        self._bytes_per_second = bytes_per_second
        self._rounds_per_scrub = rounds_per_scrub
        self._rounds = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckpt-caretaker", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_seconds):
            try:
                if self._namespace.exists() and self._election.try_lead():
                    self.repair_once(verify=self._rounds % self._rounds_per_scrub == 0)
                    self._rounds += 1
            except (CkptError, OSError) as error:
                log.warning("looking after %s failed, and is tried again: %s", self._namespace.url, error)

    def repair_once(self, verify: bool) -> None:
        """One round. verify: read everything, too."""
        found = surveys.scrub_namespace(self._namespace, verify)
        if found.is_whole:
            log.info("%s is whole: %d files", self._namespace.url, found.files)
            collect_tombstones(self._namespace)
            return
        done = repairs.repair_namespace(self._namespace, found, self._bytes_per_second)
        log.info(
            "%s: %d files made whole, %d records, %d objects deleted, %d files could not be made whole, %d members missing",
            self._namespace.url, done.files, done.records, done.orphans, len(done.failed), len(found.missing_members),
        )  # fmt: skip

    def close(self, seconds: float) -> None:
        """Begin no other round; wait so long for the end of this one. Cut off, it is harmless."""
        self._stop.set()
        self._thread.join(seconds)
