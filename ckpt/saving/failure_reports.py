"""Reports of ranks that failed or ended: files in the store and notes in the group, which end the wait of the other ranks."""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping

from ckpt.errors import RanksMissing, SaveFailed, StepRefused, StepSkipped, UnsupportedLeaf
from ckpt.format import json_records
from ckpt.groups.base import Group
from ckpt.repository.attempt import Attempt
from ckpt.repository.group_lease import GroupLease
from ckpt.saving.rank_part_files import part_stem
from ckpt.storage.base.errors import CkptError, IntegrityError, NoSpace, NotFound, StoreError
from ckpt.storage.base.store import Store

log = logging.getLogger("ckpt")


def publish_failure(store: Store, lease: GroupLease, group: Group, attempt: Attempt, error: BaseException) -> None:
    """Report that this rank will write no part: first to the group, because the store may take long to fail."""
    store.put(f"{part_stem(attempt)}-failed.json", leave_failure_note(store, lease, group, attempt, error))


def leave_failure_note(store: Store, lease: GroupLease, group: Group, attempt: Attempt, error: BaseException) -> bytes:
    """Report through the group alone that this rank will write no part, and return the report. It calls no store."""
    reason = str(error) or type(error).__name__
    unreachable = isinstance(error, (StoreError, OSError))
    if unreachable and store.url not in reason:
        reason = f"{store.url}: {reason}"
    # Rank 0 adds this text to the reports of other ranks. Its own errors need it unless they already name the ranks.
    needs_rank = unreachable or isinstance(error, (UnsupportedLeaf, SaveFailed)) or not isinstance(error, CkptError)
    if attempt.rank == 0 and needs_rank:
        reason = give_up_reason(attempt, 0, reason)
    is_uncertain = attempt.name in lease.writer.unsettled_commits()  # its record may still take effect
    failure = {
        "reason": reason,
        "missing": isinstance(error, (RanksMissing, SaveFailed)),  # no rank may use another tier for SaveFailed
        "skipped": isinstance(error, StepSkipped),
        "full": lacks_space(error),
        "rank": attempt.rank,
        "uncertain": is_uncertain,
    }
    data = json_records.encode("failure", failure)
    group.leave_note(_note_key(lease, attempt, attempt.rank == 0), data)
    return data


def lacks_space(error: BaseException) -> bool:
    """Return whether a save failed because the store of this rank, or of the rank that reported the error, is full."""
    if isinstance(error, StepRefused):
        return error.is_store_full
    numbers = [getattr(each, "errno", None) for each in (error, error.__cause__)]
    return isinstance(error, NoSpace) or errno.ENOSPC in numbers


def leave_uncertainty_note(store: Store, lease: GroupLease, group: Group, attempt: Attempt, error: BaseException) -> None:
    """Report, from rank 0, that the store failed during the commit, so that the other ranks check the record once more."""
    reason = (
        f"rank 0 failed in the commit of step {attempt.step} of {store.url}, and the step may exist: {error}; list the "
        "steps with ckpt-inspect"
    )
    failure = {"reason": reason, "missing": False, "full": lacks_space(error), "rank": 0, "uncertain": True}
    group.leave_note(_note_key(lease, attempt, True), json_records.encode("failure", failure))


def leave_end_note(lease: GroupLease, group: Group) -> None:
    """Report through the group that this rank saves no more, in case the store can't be reached."""
    if group.size > 1:
        group.leave_note(_end_key(lease, lease.rank == 0), str(lease.rank).encode())


def _note_key(lease: GroupLease, attempt: Attempt, from_rank_0: bool) -> str:
    """Return the key of a note about an attempt, from rank 0 to all or from another rank to rank 0."""
    return f"{lease.writer.token}/{lease.number}/{attempt.step}/{attempt.number}/{'given-up' if from_rank_0 else 'failed'}"


def _end_key(lease: GroupLease, from_rank_0: bool) -> str:
    return f"{lease.writer.token}/{lease.number}/ended{'-0' if from_rank_0 else ''}"


def noted_failure(lease: GroupLease, group: Group, attempt: Attempt) -> StepRefused | None:
    """Return the error in a note about this attempt: on rank 0 of another rank that failed, elsewhere of rank 0."""
    data = group.note(_note_key(lease, attempt, lease.rank != 0))
    if data is None:
        return None
    try:
        failure = json_records.decode("failure", data, "a note of another rank")
        rank, refusal = int(failure["rank"]), _refusal(failure)
    except (CkptError, KeyError, TypeError, ValueError) as error:
        log.debug("ignoring a note of another rank: %s", error)
        return None
    if lease.rank == 0:
        return rank_0_error(attempt, rank, refusal)
    return refusal


def rank_0_error(attempt: Attempt, rank: int, refusal: StepRefused) -> StepRefused:
    """Return the error of rank 0 for an attempt that another rank ends. refusal: the error that the rank has reported."""
    if isinstance(refusal, StepSkipped):
        return refusal  # its text is for all ranks
    kind = RanksMissing if isinstance(refusal, RanksMissing) else StepRefused  # the kind decides which tier is next
    error = kind(give_up_reason(attempt, rank, refusal))
    error.is_store_full = refusal.is_store_full
    return error


def give_up_reason(attempt: Attempt, rank: int, reason: object) -> str:
    """Return the message of rank 0 for an attempt that another rank's error ends."""
    return f"step {attempt.step} is given up because rank {rank} failed: {reason}"


def read_failure(store: Store, name: str) -> StepRefused:
    """Return the error that a rank has reported instead of its part."""
    try:
        failure = json_records.load(store, "failure", name)
        return _refusal(failure)
    except (NotFound, IntegrityError) as error:
        return StepRefused(str(error))
    except KeyError:
        return StepRefused(f"{store.url}/{name} gives no reason; look at the log of that rank")


def _refusal(failure: Mapping[str, object]) -> StepRefused:
    """Return the error of a report. Raises KeyError if it has no reason."""
    reason = str(failure["reason"])
    kind = RanksMissing if failure.get("missing") else StepSkipped if failure.get("skipped") else StepRefused
    error = kind(reason)
    if isinstance(error, RanksMissing):
        error.given_up = True
    error.may_be_committed, error.is_store_full = bool(failure.get("uncertain")), bool(failure.get("full"))
    return error


def ranks_noted_as_ended(lease: GroupLease, group: Group) -> set[int]:
    """Return the rank that has left a note that it ended its saves: on rank 0 the last one of the others, elsewhere rank 0."""
    text = group.note(_end_key(lease, lease.rank != 0)) or b""
    return {int(text)} if text.isdigit() else set()
