"""What one group of ranks, or one process alone, has of a writer lease: a number of its own, and what its ranks know of each
other."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ckpt.errors import RanksMissing
from ckpt.format import json_records
from ckpt.groups.process_identity import ProcessIdentity, is_dead, this_process
from ckpt.repository.lease_records import EndMarker, end_markers, generation_name, list_lease_records
from ckpt.repository.repository import Repository
from ckpt.repository.writer_lease import Attempt, AttemptCounter, SerialCounter, WriterLease, acquire_lease
from ckpt.storage.base.checked_decode import decode
from ckpt.storage.base.errors import CkptError
from ckpt.support.fork_check import CreatorProcess

log = logging.getLogger("ckpt")

_NUMBERS_PER_GROUP = 10**9
"""Between the numbers of groups that share a lease: none makes so many attempts."""


class GroupLease:
    """The use of a writer lease by one group, until `release` or `abandon`. Belongs to one session.

    number: which of the groups that this generation serves. A rank may be another process in each of them, so their attempts
        are told apart by number.
    """

    def __init__(
        self, writer: WriterLease, rank: int = 0, size: int = 1, number: int = 0, processes: Sequence[ProcessIdentity] = ()
    ) -> None:
        self.writer = writer
        self.rank = rank
        self.size = size
        self.number = number
        self.rank_processes = processes
        """The processes of the group, by rank, where they are known."""
        self.progress_count = 0
        """Grows as long as the saves of this group make progress. Two threads may count one step: only its growth matters."""
        self._creator_process = CreatorProcess()
        self._own_attempts = AttemptCounter(None, rank, number * _NUMBERS_PER_GROUP, 0)
        # Rank 0 counts for all groups of its process, so that its serials grow.
        first_serial = number * _NUMBERS_PER_GROUP if rank else 0
        self._group_attempts = AttemptCounter(number, rank, number * _NUMBERS_PER_GROUP, first_serial)
        writer.add_user(has_ranks=size > 1)

    def count_progress(self) -> None:
        """A save of this group has made progress."""
        self.progress_count += 1

    def for_other_group(self, size: int) -> GroupLease:
        """The lease of another group of which this process is rank 0. Attempts of one are known to all."""
        self.writer.sweep_temporaries_once()
        return GroupLease(self.writer, 0, size, self.writer.new_group_number())

    def for_process_alone(self) -> GroupLease:
        """The lease for saves of this process without a group."""
        return GroupLease(self.writer, 0, 1, self.number)

    def begin_attempt(self, step: int) -> Attempt:
        """Begin to save a step with this group: no sweep touches the files of the attempt until it ends."""
        return self.writer.begin_attempt(step, self._group_attempts if self.size > 1 else self._own_attempts)

    def begin_own_attempt(self, step: int) -> Attempt:
        """The same for this process alone, which the other ranks do not count."""
        return self.writer.begin_attempt(step, self._own_attempts)

    def rank_0_error(self) -> RanksMissing | None:
        """The error where rank 0, the holder, has ended or is dead; None where it lives or can't be seen from here."""
        name = generation_name(self.writer.generation)
        try:
            body = json_records.load(self.writer.repo.store, "generation", name)
            if body["owner"] is None:
                return RanksMissing(f"rank 0 of {self.size} has ended its saves: no step can be committed any more")
            owner = decode(ProcessIdentity, body["owner"])
        except (CkptError, KeyError, ValueError):
            return None
        if not is_dead(owner, this_process()):
            return None
        return RanksMissing(f"rank 0 of {self.size} (process {owner.pid} on {owner.host}) is dead: no step can be committed")

    def release(self) -> bool:
        """This group writes no more; with the last user in this process the writer lease is released.

        False where the store can't be reached, so that others do not see it.
        """
        if self.rank:
            return not self._creator_process.is_current or self._write_end_marker()
        return self.writer.release() if self.writer.drop_user() else True

    def abandon(self) -> None:
        """The same where the store does not answer: nothing is written."""
        self.writer.drop_user()

    def _write_end_marker(self) -> bool:
        """Record that this rank ends its saves, unless rank 0 has ended. Whether that could be done."""
        repo, generation = self.writer.repo, self.writer.generation
        try:
            if json_records.load(repo.store, "generation", generation_name(generation))["owner"] is not None:
                repo.store.put(EndMarker(generation, self.number, self.rank).name, json_records.encode("left", {}))
        except (CkptError, KeyError) as error:
            log.info("%s: that rank %d has ended its saves can't be recorded there: %s", repo.url, self.rank, error)
            return False
        return True

    def ended_ranks(self) -> set[int]:
        """The ranks of this group that have ended their saves, or are dead: what is not there of them now never comes."""
        this_group, me = (self.writer.generation, self.number), this_process()
        markers = end_markers(list_lease_records(self.writer.repo))
        marked = {marker.rank for marker in markers if (marker.generation, marker.group_number) == this_group}
        return marked | {rank for rank, owner in enumerate(self.rank_processes) if is_dead(owner, me)}


def acquire_group_lease(repo: Repository, size: int = 1, serials: SerialCounter | None = None) -> GroupLease:
    """Become the writer of a repository, for a group of `size`; raise RepositoryBusy where a live process is."""
    return GroupLease(acquire_lease(repo, serials), 0, size)
