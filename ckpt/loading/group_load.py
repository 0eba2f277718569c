"""Loads by the ranks of a group, which all load the same step or all raise.

Otherwise one rank could fall back to an older step alone and train with a state that differs from the others, unnoticed.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckpt import errors
from ckpt.block_io.block_reader import Progress
from ckpt.errors import GroupError, StepNotFound
from ckpt.format.json_records import encode_commit
from ckpt.groups.base import Group, SingleProcessGroup, step_mismatch_error
from ckpt.loading.shared_read import ShareReads
from ckpt.repository.checkpoint import Checkpoint
from ckpt.repository.damage_registry import mark_damaged_in_all_tiers
from ckpt.repository.repository import Repository, commit_name, steps_text
from ckpt.state.name_mapping import Rename
from ckpt.state.name_patterns import Patterns
from ckpt.storage.base.errors import CkptError, IntegrityError, StoreError
from ckpt.support.user_warning import warn_user
from ckpt.support.validation import check_progress, check_rename, check_share_reads, checked_patterns

log = logging.getLogger("ckpt")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The arguments of a load, apart from the step. See `ckpt.load`."""

    like: Any = None
    only: Patterns | None = None
    progress: Progress | None = None
    rename: Rename | None = None
    group: Group = field(default_factory=SingleProcessGroup)
    share_reads: ShareReads = "auto"
    bypass_cache: bool = False
    """Whether to bypass the page cache, because a job that resumes does not read the step again soon."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "only", checked_patterns(self.only))
        check_rename(self.rename)
        check_progress(self.progress)
        check_share_reads(self.share_reads)


def run_on_all_ranks(group: Group, work: Callable[[], T]) -> T:
    """Run `work` on every rank and return its result. If it fails on one rank, it raises on all.

    If all failures are damage, every rank raises IntegrityError, so that all fall back together. Otherwise a failed rank raises
    its own error, and the others raise GroupError.
    """
    if group.size == 1:
        return work()
    error: BaseException | None = None
    try:
        result = work()
    except BaseException as failed:
        error = failed
    failure = "" if error is None else json.dumps([type(error).__name__, str(error)])
    try:
        answers = [json.loads(a) if a else None for a in group.all_gather(failure.encode())]
    except GroupError:
        if error is not None:
            raise error from None
        raise
    damage = next((a for a in answers if a is not None and _is_integrity_error(a[0])), None)
    other = next(((rank, a) for rank, a in enumerate(answers) if a is not None and not _is_integrity_error(a[0])), None)
    if other is not None and (error is None or isinstance(error, IntegrityError)):
        rank, (kind, message) = other
        raise _remote_error(rank, group, kind, message) from error
    if error is not None:
        raise error
    if damage is not None:
        raise getattr(errors, damage[0])(damage[1])
    return result


def _is_integrity_error(kind: str) -> bool:
    """Return whether an error class of this name means damage, after which an older step is tried."""
    found = getattr(errors, kind, None)
    return isinstance(found, type) and issubclass(found, IntegrityError)


class _RemoteStoreError(GroupError):
    """The store failed on another rank."""


def _remote_error(rank: int, group: Group, kind: str, message: str) -> GroupError:
    of_store = isinstance(found := getattr(errors, kind, None), type) and issubclass(found, StoreError)
    made = _RemoteStoreError if of_store else GroupError
    return made(f"rank {rank} of {group.size} failed, so no rank continues: {kind}: {message}")


def broadcast_from_rank_0(group: Group, read: Callable[[], str]) -> str:
    """Return on all ranks what `read` returns on rank 0; if it raises there, raise the error on all ranks."""
    if group.size == 1:
        return read()
    error: BaseException | None = None
    answer = ["", ""]
    if group.rank == 0:
        try:
            answer[1] = read()
        except BaseException as failed:
            error = failed
            answer = [type(failed).__name__ if isinstance(failed, CkptError) else "GroupError", str(failed)]
    kind, text = json.loads(group.broadcast(json.dumps(answer).encode() if group.rank == 0 else None))
    if error is not None:
        raise error
    if kind:
        raise getattr(errors, kind, GroupError)(text)
    return str(text)


def open_agreed_checkpoint(repo: Repository, step: int, group: Group) -> Checkpoint:
    """Return a checkpoint with the commit record that rank 0 read: another attempt at the step may be committed meanwhile."""
    if group.size == 1:
        return repo[step]

    def read() -> str:
        repo.check()
        return encode_commit(repo.commit(step)).decode()

    data = broadcast_from_rank_0(group, read)
    # A rank with another key rejects the record, and then all ranks must raise.
    return run_on_all_ranks(group, lambda: repo.checkpoint(repo.decode(step, data.encode()), group.rank))


def require_same_step(group: Group, step: int | None) -> None:
    """Raise InvalidArgument if this rank requests another step than rank 0, and GroupError if another rank does.

    step: the requested number; None for the newest step.

    Without this check, such ranks would wait for messages of each other that never arrive.
    """
    steps_by_rank = [json.loads(answer) for answer in group.all_gather(json.dumps(step).encode())]
    rank = (
        group.rank
        if step != steps_by_rank[0]
        else next((rank for rank, its in enumerate(steps_by_rank) if its != steps_by_rank[0]), None)
    )
    if rank is None:
        return
    different = step_mismatch_error("load", rank, group.size, steps_by_rank[rank], steps_by_rank[0])
    if rank == group.rank:
        raise different
    raise _remote_error(rank, group, "InvalidArgument", str(different))


def load_newest_on_all_ranks(
    repo: Repository,
    strict: bool,
    request: LoadRequest,
    load: Callable[[Callable[[], Checkpoint], LoadRequest], Any],
    before: int | None = None,
) -> tuple[int, Any] | None:
    """Load the newest complete step on all ranks; return its number and the state, or None if no step is committed.

    load: loads one checkpoint, given a function that opens it.
    before: load the newest step below this number, if there is one.

    Rank 0 lists the steps. If a listed step can't be loaded, rank 0 decides whether it was deleted after the listing.
    """
    group = request.group

    def listed_steps() -> str:
        repo.check()
        return json.dumps(repo.order().newest_first(before))

    if group.size > 1:
        group.meet_at(repo.store)
        require_same_step(group, None)
    numbers: list[int] = json.loads(broadcast_from_rank_0(group, listed_steps))
    while True:
        damage: dict[int, IntegrityError] = {}
        missing: set[int] = set()  # never committed, or deleted after they were listed
        found: tuple[int, Any] | None = None
        for number in numbers:
            try:
                found = number, load(functools.partial(open_agreed_checkpoint, repo, number, group), request)
                break
            except StepNotFound:
                missing.add(number)
            except (IntegrityError, StoreError, _RemoteStoreError) as error:
                if _is_deleted(repo, number, group):
                    missing.add(number)
                elif strict or not isinstance(error, IntegrityError):
                    raise
                else:
                    damage[number] = error
        # A missing step means that another process saves and deletes, so it may have committed a newer step than `found`.
        if not missing:
            return report_fallback(repo, found, damage)
        tried_and_present = {*numbers} - missing
        relisted: list[int] = json.loads(broadcast_from_rank_0(group, listed_steps))
        if found is None and not {*relisted} <= {*numbers}:
            numbers = relisted  # the writer has committed new steps since; even if it has deleted them too, more will follow
            continue
        newer = relisted[: relisted.index(found[0])] if found is not None and found[0] in relisted else relisted
        if not _has_committed(repo, [number for number in newer if number not in tried_and_present], group):
            return report_fallback(repo, found, damage)
        numbers = relisted


def _is_deleted(repo: Repository, step: int, group: Group) -> bool:
    """Return whether a step that can't be loaded was deleted."""

    def ask() -> str:
        try:
            return json.dumps(not repo.store.exists(commit_name(step)))
        except StoreError:  # the caller then raises the error of the load
            return json.dumps(False)

    return bool(json.loads(broadcast_from_rank_0(group, ask)))


def _has_committed(repo: Repository, steps: Sequence[int], group: Group) -> bool:
    return bool(
        json.loads(broadcast_from_rank_0(group, lambda: json.dumps(any(repo.store.exists(commit_name(n)) for n in steps))))
    )


def report_fallback(repo: Repository, found: tuple[int, T] | None, damage: dict[int, IntegrityError]) -> tuple[int, T] | None:
    """Warn of the skipped damaged steps, mark them as damaged, and return `found`. Raise IntegrityError if all are damaged."""
    mark_damaged_in_all_tiers(repo, damage)
    if found is None and damage:
        newest, *others = damage.values()
        for error in others:
            log.error("%s", error)
        if not others:
            raise newest
        raise type(newest)(f"no step of {repo.url} is whole, of {steps_text(sorted(damage))}; the newest: {newest}") from newest
    for passed_over in damage.values():
        assert found is not None
        message = f"loaded the older step {found[0]} because a newer one is damaged: {passed_over}"
        log.error(message)
        warn_user(message)
    return found
