"""The background repair of a namespace, in the one process that is elected for it.

It is harmless if two processes are leader for a moment (`records/leader_election.py`): they read some data twice. A repair
changes a record only if it still is the record that was read.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance.repair import repair_namespace
from ckpt.aggregator.maintenance.scrub import scrub_namespace
from ckpt.aggregator.records.leader_election import REPAIR_LEADER_REGISTER, Election
from ckpt.storage.base.threads import WorkerThread

log = logging.getLogger("ckpt.node")

__all__ = ["REPAIR_LEADER_REGISTER", "Election", "RepairLeader"]


class RepairLeader:
    """A thread that scrubs and repairs a namespace while this process is the leader, until `close`.

    open_namespace: returns the namespace. The thread calls it until it succeeds, because its members may not be known yet.
    process_id: the name of this process in the election. interval_seconds: the pause between two rounds.
    bytes_per_second: the limit for rebuilt bytes. rounds_per_scrub: one in this many rounds reads and verifies all data.
    """

    def __init__(
        self,
        open_namespace: Callable[[], Namespace],
        process_id: str,
        interval_seconds: float,
        bytes_per_second: float | None = None,
        rounds_per_scrub: int = 24,
    ) -> None:
        self._open_namespace = functools.cache(open_namespace)
        self._interval_seconds = interval_seconds
        self._election = functools.cache(lambda: Election(self._open_namespace(), process_id, 3 * interval_seconds))
        self._bytes_per_second = bytes_per_second
        self._rounds_per_scrub = rounds_per_scrub
        self._rounds = 0
        self._stop = threading.Event()
        self._thread = WorkerThread(target=self._run, name="ckpt-repair-leader", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_seconds):
            try:
                if self._open_namespace().exists() and self._election().try_lead():
                    with self._election().renewed_term():
                        self.repair_once(verify=self._rounds % self._rounds_per_scrub == 0)
                    self._rounds += 1
            except Exception as error:  # also a lack of memory or threads: without this thread, nothing is repaired any more
                log.warning("the background repair failed, and is tried again: %s", error)

    def repair_once(self, verify: bool) -> None:
        """Scrub the namespace once, and repair what is found. verify: also let the members read and verify all data."""
        namespace = self._open_namespace()
        found = scrub_namespace(namespace, verify)
        # Also where it is whole: tombstones, replaced disks and files of killed writers are not findings of a scrub.
        done = repair_namespace(namespace, found, self._bytes_per_second)
        if found.is_whole:
            log.info("%s is whole: %d files", namespace.url, found.files)
            return
        log.info(
            "%s: repaired %d files and %d records, deleted %d objects; %d files could not be repaired, %d members are missing",
            namespace.url, done.files, done.records, done.orphans, len(done.failed), len(found.missing_members),
        )  # fmt: skip

    def close(self, seconds: float) -> None:
        """Begin no other round, and wait up to `seconds` for the end of this one. It is harmless to interrupt a round."""
        self._stop.set()
        self._thread.join(seconds)
