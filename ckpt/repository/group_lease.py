"""The class GroupLease, the use of a writer lease by one group, with what its ranks know of each other."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ckpt.errors import RanksMissing
from ckpt.format import json_records
from ckpt.groups.process_identity import ProcessIdentity, is_dead, this_process
from ckpt.repository.attempt import Attempt, AttemptSeries, SerialCounter
from ckpt.repository.lease_records import EndMarker, end_markers, generation_name, list_lease_records
from ckpt.repository.repository import Repository
from ckpt.repository.writer_lease import WriterLease, acquire_lease
from ckpt.storage.base.checked_decode import decode
from ckpt.storage.base.errors import CkptError
from ckpt.support.fork_check import CreatorProcess

log = logging.getLogger("ckpt")

_NUMBERS_PER_GROUP = 10**9
"""The distance between the first numbers of two groups that share a lease. No group makes so many attempts."""


def rank_0_ended_error(size: int) -> RanksMissing:
    """Return the error of another rank of `size` ranks for a step that rank 0 does not commit any more."""
    return RanksMissing(
        f"rank 0 of {size} has ended its saves, and no step can be committed any more; end rank 0 after the last save"
    )


class GroupLease:
    """The use of a writer lease by one group, or by a process alone, until `release` or `abandon`. One session owns it.

    number: the number of the group, or process alone, in this generation, also of other tiers. The attempts of two of them have
        different numbers: the same rank may be a different process in each group, and a rank recognises its commit by them.
    processes: the processes of the group, by rank; empty if they are unknown. It is kept as `rank_processes`.
    """

    def __init__(
        self, writer: WriterLease, rank: int = 0, size: int = 1, number: int = 0, processes: Sequence[ProcessIdentity] = ()
    ) -> None:
        self.writer = writer
        self.rank = rank
        self.size = size
        self.number = number
        self.rank_processes = processes
        self.progress_count = 0
        """Grows while the saves of this group make progress. It has no lock: a lost update does no harm, only growth counts."""
        self._creator_process = CreatorProcess()
        self._own_attempts = AttemptSeries(None, rank, number * _NUMBERS_PER_GROUP, 0)
        # All groups of which this process is rank 0 share one count of serials, so that these grow.
        first_serial = number * _NUMBERS_PER_GROUP if rank else 0
        self._group_attempts = AttemptSeries(number, rank, number * _NUMBERS_PER_GROUP, first_serial)
        writer.add_user(has_ranks=size > 1)

    def count_progress(self) -> None:
        """Record that a save of this group has made progress."""
        self.progress_count += 1

    def for_other_group(self, size: int) -> GroupLease:
        """Return the lease for another group of which this process is rank 0, too. The two share one writer lease."""
        self.writer.sweep_temporaries_once()
        return GroupLease(self.writer, 0, size, self.writer.new_group_number())

    def for_process_alone(self) -> GroupLease:
        """Return the lease for saves of this process without a group, which shares the writer lease."""
        return GroupLease(self.writer, 0, 1, self.writer.new_group_number())

    def begin_attempt(self, step: int) -> Attempt:
        """Return a new attempt of this group at a step. No sweep deletes its files before it ends."""
        return self.writer.begin_attempt(step, self._group_attempts if self.size > 1 else self._own_attempts)

    def begin_next_attempt(self) -> Attempt:
        """Return a new attempt of a process alone at the step of `WriterLease.next_step`."""
        return self.writer.begin_next_attempt(self._own_attempts)

    def begin_own_attempt(self, step: int) -> Attempt:
        """Return a new attempt of this process alone, which the other ranks do not count."""
        return self.writer.begin_attempt(step, self._own_attempts)

    def rank_0_error(self) -> RanksMissing | None:
        """Return an error if rank 0, the holder, has ended its saves or is dead; None if it lives or can't be seen."""
        name = generation_name(self.writer.generation)
        try:
            body = json_records.load(self.writer.repo.store, "generation", name)
            if body["owner"] is None:
                return rank_0_ended_error(self.size)
            owner = decode(ProcessIdentity, body["owner"])
        except (CkptError, KeyError, ValueError):
            return None
        if not is_dead(owner, this_process()):
            return None
        return RanksMissing(
            f"rank 0 of {self.size} (process {owner.pid} on {owner.host}) is dead and can't commit; restart the job"
        )

    def release(self) -> bool:
        """End the saves of this group. The last user in this process releases the writer lease.

        Returns False if the store can't be reached, so that other processes can't see it.
        """
        if self.rank:
            return not self._creator_process.is_current or self._write_end_marker()
        return self.writer.release() if self.writer.drop_user() else True

    def abandon(self) -> None:
        """End the saves of this group without writing anything, because the store does not answer."""
        self.writer.drop_user()

    def _write_end_marker(self) -> bool:
        """Record in the store that this rank ends its saves, unless rank 0 has ended; return whether the store answered."""
        repo, generation = self.writer.repo, self.writer.generation
        try:
            if json_records.load(repo.store, "generation", generation_name(generation))["owner"] is not None:
                repo.store.put(EndMarker(generation, self.number, self.rank).name, json_records.encode("left", {}))
        except (CkptError, KeyError) as error:
            log.info("%s: could not record that rank %d has ended its saves: %s", repo.url, self.rank, error)
            return False
        return True

    def ended_ranks(self) -> set[int]:
        """Return the ranks of this group that have ended their saves or are dead: their missing files will not appear."""
        this_group, me = (self.writer.generation, self.number), this_process()
        markers = end_markers(list_lease_records(self.writer.repo))
        marked = {marker.rank for marker in markers if (marker.generation, marker.group_number) == this_group}
        return marked | {rank for rank, owner in enumerate(self.rank_processes) if is_dead(owner, me)}


def acquire_group_lease(repo: Repository, size: int = 1, serials: SerialCounter | None = None) -> GroupLease:
    """Return a new lease for a group of `size` ranks; raise RepositoryBusy if a live process of this host is the writer."""
    writer = acquire_lease(repo, serials)
    return GroupLease(writer, 0, size, writer.new_group_number())
