"""The waits of a commit: rank 0 waits for the parts of all ranks, the others for its commit record.

Each wait ends early, with the reason, if a rank has reported a failure, has ended its saves or is dead, or if a newer
generation of writers has begun. A rank other than 0 looks only at rank 0 for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import TypeVar

from ckpt.errors import Fenced, RanksMissing, StepRefused
from ckpt.format.json_records import CommitRecord
from ckpt.groups.base import Group, ranks_text
from ckpt.repository.attempt import Attempt
from ckpt.repository.group_lease import GroupLease, rank_0_ended_error
from ckpt.repository.repository import Repository
from ckpt.saving.failure_reports import noted_failure, rank_0_error, ranks_noted_as_ended, read_failure
from ckpt.saving.rank_part_files import ListedPart, list_parts, other_step_text
from ckpt.storage.base.call_timeout import WaitTimer
from ckpt.storage.base.errors import IntegrityError, NotFound, StoreError
from ckpt.storage.base.failpoints import failpoint

COMMIT_TIMEOUT_SECONDS = 600.0
"""How long the committer waits for the last rank. The other ranks wait twice as long for the commit."""

_POLL_SECONDS = (0.002, 0.5)  # the first and the longest interval between two polls
_FENCE_CHECK_SECONDS = 1.0  # the interval between two checks for a newer generation
T = TypeVar("T")


def gather_parts(
    repo: Repository, lease: GroupLease, group: Group, attempt: Attempt, timeout_seconds: float
) -> list[ListedPart]:
    """Wait for the parts of all ranks, and return them in the order of the ranks.

    Raises StepRefused if a rank reports that it failed, RanksMissing after `timeout_seconds` or if a rank has ended its saves,
    and Fenced if a newer generation has begun.
    """
    found: dict[int, ListedPart] = {}

    def find_all_parts() -> list[ListedPart] | None:
        for part in list_parts(repo.store, attempt):
            if part.digest is None and part.rank != lease.rank:
                raise rank_0_error(attempt, part.rank, read_failure(repo.store, part.name))
            found[part.rank] = part
        return [found[rank] for rank in sorted(found)] if len(found) == lease.size else None

    def missing_error(missing: Sequence[int], why: str) -> RanksMissing:
        one, instead = len(missing) == 1, other_step_text(repo.store, attempt, missing)
        return RanksMissing(
            f"{ranks_text(missing)} of {lease.size} did not write {'its' if one else 'their'} part of step {attempt.step} "
            f"{why}{instead}; look at {'its log' if one else 'their logs'}; all ranks must save the same steps to one URL, or "
            "one alone with group=None"
        )

    def give_up_error() -> StepRefused | None:
        if (noted := noted_failure(lease, group, attempt)) is not None:
            return noted
        # Read before the parts are listed: those of an ended rank are stored by now.
        ended = lease.ended_ranks() | ranks_noted_as_ended(lease, group)
        if ended and find_all_parts() is None and (missing := sorted(ended - found.keys())):
            return missing_error(missing, f"and {'has' if len(missing) == 1 else 'have'} ended")
        return None

    failpoint("ranks.gather")
    parts = _poll(find_all_parts, lease, timeout_seconds, give_up_error)
    if parts is None:
        raise missing_error([rank for rank in range(lease.size) if rank not in found], f"within {timeout_seconds:g} s")
    return parts


def await_commit(repo: Repository, lease: GroupLease, group: Group, attempt: Attempt, timeout_seconds: float) -> CommitRecord:
    """Wait until rank 0 has committed this attempt, and return the commit record.

    Raises StepRefused with the reason if rank 0 abandons the attempt, RanksMissing if rank 0 does neither within
    `timeout_seconds`, and Fenced if a newer generation has begun.
    """

    def find_commit() -> CommitRecord | None:
        # Listed before the record is read: rank 0 abandons only an attempt that it has not committed.
        listed = list(list_parts(repo.store, attempt))
        try:
            commit = repo.record(attempt.step)
            if (commit.generation, commit.attempt) == (attempt.generation, attempt.number):
                return commit
        except (NotFound, IntegrityError):
            pass
        for part in listed:
            if part.rank == 0 and part.digest is None:
                raise read_failure(repo.store, part.name)
        return None

    def give_up_error() -> StepRefused | None:
        if (noted := noted_failure(lease, group, attempt)) is not None:
            return noted
        if ranks_noted_as_ended(lease, group):
            return rank_0_ended_error(lease.size)
        return lease.rank_0_error()

    commit = _poll(find_commit, lease, timeout_seconds, give_up_error)
    if commit is None:
        raise RanksMissing(
            f"rank 0 of {lease.size} has not committed step {attempt.step} within {timeout_seconds:g} s"
            f"{other_step_text(repo.store, attempt, [0])}; look at its log; all ranks must save the same steps, or one alone "
            "with group=None"
        )
    return commit


def _poll(
    find: Callable[[], T | None], lease: GroupLease, timeout_seconds: float, give_up_error: Callable[[], StepRefused | None]
) -> T | None:
    """Poll `find` at growing intervals, and return its first result; None after `timeout_seconds` of waiting.

    Raises Fenced if a newer generation has begun, StoreError if the repository is gone, and the error of `give_up_error`.
    Before it raises, it calls `find` once more. If the store fails, rank 0 raises that at once, which ends the wait of all
    ranks. Another rank polls on, as rank 0 may commit the step meanwhile, and raises it at the timeout.
    """
    timer = WaitTimer(timeout_seconds)
    pause = _POLL_SECONDS[0]
    next_fence_check = time.monotonic() + _FENCE_CHECK_SECONDS
    while True:
        store_error: StoreError | None = None
        try:
            if (found := find()) is not None:
                return found
        except StoreError as error:
            if not lease.rank:
                raise
            store_error = error
        lease.count_progress()
        if not (remaining_seconds := timer.remaining_seconds()):
            if store_error is not None:
                raise store_error
            return None
        if (now := time.monotonic()) >= next_fence_check:
            next_fence_check = now + _FENCE_CHECK_SECONDS
            hopeless = _lease_error(lease) or give_up_error()
            if hopeless is not None:
                # If rank 0 has announced that it does not commit, this rank needs no answer of the store.
                is_certain = isinstance(hopeless, StepRefused) and hopeless.is_certain
                with suppress(StoreError) if lease.rank and is_certain else nullcontext():
                    if (found := find()) is not None:
                        return found
                raise hopeless
        time.sleep(min(pause, remaining_seconds))
        pause = min(pause * 1.5, _POLL_SECONDS[1])


def _lease_error(lease: GroupLease) -> Fenced | StoreError | None:
    """Return `WriterLease.lease_error`; None on another rank than 0 if the store does not answer now."""
    try:
        return lease.writer.lease_error()
    except StoreError:
        if not lease.rank:
            raise
        return None
