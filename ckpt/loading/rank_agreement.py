"""Loads by the ranks of a group, which all load the same step or all raise.

Otherwise one rank could fall back to an older step alone and train with a state that differs from the others, unnoticed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckpt import errors
from ckpt.errors import GroupError
from ckpt.format.json_records import encode_commit
from ckpt.groups.base import Group, SingleProcessGroup, step_mismatch_error
from ckpt.loading.shared_read import ShareReads
from ckpt.repository.checkpoint import Checkpoint
from ckpt.repository.repository import Repository
from ckpt.state.name_mapping import Rename
from ckpt.state.name_patterns import Patterns
from ckpt.storage.base.errors import CkptError, IntegrityError, StoreError
from ckpt.storage.base.store import ByteProgress
from ckpt.support.validation import check_progress, check_rename, check_share_reads, checked_patterns

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The arguments of a load without the step. See `ckpt.load`."""

    like: Any = None
    only: Patterns | None = None
    progress: ByteProgress | None = None
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

    If all failures are damage, every rank raises IntegrityError, so that all fall back together. Otherwise the gravest kind
    counts, which is the same on all ranks: failures of a store are graver than damage, and all others are graver than these. A
    rank with a failure of this kind raises its own error, and the others raise GroupError.
    """
    if group.size == 1:
        return work()
    error: BaseException | None = None
    try:
        result = work()
    except BaseException as failed:
        error = failed
    failure = "" if error is None else json.dumps([errors.shared_class_name(error), str(error)])
    try:
        answers = [json.loads(a) if a else None for a in group.all_gather(failure.encode())]
    except GroupError:
        if error is not None:
            raise error from None
        raise
    failures = [(_gravity(answer[0]), rank, *answer) for rank, answer in enumerate(answers) if answer is not None]
    if not failures:
        return result
    gravest, rank, kind, message = max(failures, key=lambda failure: failure[0])  # of the first rank with that kind
    if error is not None and _gravity(errors.shared_class_name(error)) == gravest:
        raise error
    if gravest == _DAMAGE:
        raise getattr(errors, kind)(message)
    raise _remote_error(rank, group, kind, message) from error


_DAMAGE, _OF_STORE, _OTHER = range(3)
"""How grave the failure of a rank is. After damage, all ranks try an older step. After a failure of the store, they first look
together whether the step was deleted. After any other failure, none of them calls another rank."""


def _gravity(kind: str) -> int:
    """Return the gravity of a failure from the name of its class."""
    return _DAMAGE if _is_integrity_error(kind) else _OF_STORE if _is_store_error(kind) else _OTHER


def _is_integrity_error(kind: str) -> bool:
    """Return whether an error class of this name means damage, after which an older step is tried."""
    found = getattr(errors, kind, None)
    return isinstance(found, type) and issubclass(found, IntegrityError)


class RemoteStoreError(GroupError):
    """The store failed on another rank."""


def _is_store_error(kind: str) -> bool:
    found = getattr(errors, kind, None)
    return isinstance(found, type) and issubclass(found, StoreError)


def _remote_error(rank: int, group: Group, kind: str, message: str) -> GroupError:
    made = RemoteStoreError if _is_store_error(kind) else GroupError
    return made(_remote_error_text(rank, group, kind, message))


def _remote_error_text(rank: int, group: Group, kind: str, message: str) -> str:
    return f"rank {rank} of {group.size} failed, so no rank continues: {kind}{': ' if message else ''}{message}"


def broadcast_from_rank_0(group: Group, read: Callable[[], str]) -> str:
    """Return on all ranks what `read` returns on rank 0; if it raises there, raise on all ranks.

    The others raise the same error if it is one of ckpt, otherwise GroupError. The message names rank 0, unless the error is
    about the repository, as damage or a missing step: that holds for all ranks.
    """
    if group.size == 1:
        return read()
    error: BaseException | None = None
    answer = ["", ""]
    if group.rank == 0:
        try:
            answer[1] = read()
        except BaseException as failed:
            error = failed
            answer = [errors.shared_class_name(failed), str(failed)]
    kind, text = json.loads(group.broadcast(json.dumps(answer).encode() if group.rank == 0 else None))
    if error is not None:
        raise error
    if kind:
        found = getattr(errors, kind, None)
        if not isinstance(found, type) or not issubclass(found, CkptError):
            raise _remote_error(0, group, kind, text)
        raise found(_remote_error_text(0, group, kind, text) if issubclass(found, (StoreError, GroupError)) else text)
    return str(text)


def is_true_on_rank_0(group: Group, ask: Callable[[], bool]) -> bool:
    """Return on all ranks what `ask` returns on rank 0; if it raises there, raise as `broadcast_from_rank_0` does."""
    return bool(json.loads(broadcast_from_rank_0(group, lambda: json.dumps(ask()))))


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
