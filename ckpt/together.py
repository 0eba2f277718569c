"""Loading by the ranks of a group: all load the same step, or all raise.

A rank that fell back to an older step alone would train on beside the others, and nobody would see it.
"""

from __future__ import annotations

import functools
import json
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckpt.arguments import check_progress, check_rename, check_share_reads, checked_patterns
from ckpt.checkpoint import Checkpoint
from ckpt.damage_registry import mark_damaged_in_all_tiers
from ckpt.groups.base import Alone, Group, different_steps
from ckpt.read import Progress
from ckpt.records import encode_commit
from ckpt.rename import Rename
from ckpt.repository import Repository, commit_name, listed
from ckpt.select import Patterns
from ckpt.sharing import ShareReads
from ckpt.storage import errors
from ckpt.storage.errors import CkptError, GroupError, IntegrityError, StepNotFound, StoreError

log = logging.getLogger("ckpt")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wish:
    """What to load of a checkpoint, and where to. See `ckpt.load`."""

    like: Any = None
    only: Patterns | None = None
    progress: Progress | None = None
    rename: Rename | None = None
    group: Group = field(default_factory=Alone)
    share_reads: ShareReads = "auto"
    once: bool = False
    """To go on with a job: it will not be read again soon, and need not be kept in the page cache."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "only", checked_patterns(self.only))
        check_rename(self.rename)
        check_progress(self.progress)
        check_share_reads(self.share_reads)


def together(group: Group, work: Callable[[], T]) -> T:
    """Do something on every rank. Where it fails on one, it fails on all, and on all in the same way.

    IntegrityError where damage is all that went wrong, so that all fall back; else the rank's own error, and GroupError on
    the others.
    """
    if group.size == 1:
        return work()
    error: BaseException | None = None
    try:
        made = work()
    except BaseException as failed:
        error = failed
    told = "" if error is None else json.dumps([type(error).__name__, str(error)])
    try:
        answers = [json.loads(a) if a else None for a in group.all_gather(told.encode())]
    except GroupError:
        if error is not None:
            raise error from None
        raise
    damage = next((a for a in answers if a is not None and _is_damage(a[0])), None)
    other = next(((rank, a) for rank, a in enumerate(answers) if a is not None and not _is_damage(a[0])), None)
    if other is not None and (error is None or isinstance(error, IntegrityError)):
        rank, (kind, message) = other
        raise _failed_elsewhere(rank, group, kind, message) from error
    if error is not None:
        raise error
    if damage is not None:
        raise getattr(errors, damage[0])(damage[1])
    return made


def _is_damage(kind: str) -> bool:
    """Whether an error of this name is one after which an older step is tried."""
    found = getattr(errors, kind, None)
    return isinstance(found, type) and issubclass(found, IntegrityError)


class _StoreFailedElsewhere(GroupError):
    """The store failed on another rank."""


def _failed_elsewhere(rank: int, group: Group, kind: str, message: str) -> GroupError:
    of_store = isinstance(found := getattr(errors, kind, None), type) and issubclass(found, StoreError)
    made = _StoreFailedElsewhere if of_store else GroupError
    return made(f"rank {rank} of {group.size} failed, so no rank goes on: {kind}: {message}")


def told_by_rank_0(group: Group, ask: Callable[[], str]) -> str:
    """What rank 0 finds, on all ranks; its error is raised on all."""
    if group.size == 1:
        return ask()
    error: BaseException | None = None
    told = ["", ""]
    if group.rank == 0:
        try:
            told[1] = ask()
        except BaseException as failed:
            error = failed
            told = [type(failed).__name__ if isinstance(failed, CkptError) else "GroupError", str(failed)]
    kind, text = json.loads(group.broadcast(json.dumps(told).encode() if group.rank == 0 else None))
    if error is not None:
        raise error
    if kind:
        raise getattr(errors, kind, GroupError)(text)
    return str(text)


def find_together(repo: Repository, step: int, group: Group) -> Checkpoint:
    """A step, by the record that rank 0 read: another try of it may be committed while the others look."""
    if group.size == 1:
        return repo[step]

    def read() -> str:
        repo.check()
        return encode_commit(repo.commit(step)).decode()

    data = told_by_rank_0(group, read)
    # A rank with another key refuses the record alone: all must learn of that.
    return together(group, lambda: repo.checkpoint(repo.decode(step, data.encode()), group.rank))


def require_one_step(group: Group, step: int | None) -> None:
    """Raise InvalidArgument where this rank has named another step than rank 0, or one of them none; GroupError where another
    rank has. They would wait for each other's different messages."""
    told = [json.loads(answer) for answer in group.all_gather(json.dumps(step).encode())]
    rank = group.rank if step != told[0] else next((rank for rank, its in enumerate(told) if its != told[0]), None)
    if rank is None:
        return
    different = different_steps("load", rank, group.size, told[rank], told[0])
    if rank == group.rank:
        raise different
    raise _failed_elsewhere(rank, group, "InvalidArgument", str(different))


def load_newest_together(
    repo: Repository,
    strict: bool,
    wish: Wish,
    load: Callable[[Callable[[], Checkpoint], Wish], Any],
    before: int | None = None,
) -> tuple[int, Any] | None:
    """`load_newest`, by all ranks of the group. Rank 0 decides which steps there are, and which have been deleted since."""
    group = wish.group

    def listed_steps() -> str:
        repo.check()
        return json.dumps(repo.order().newest_first(before))

    if group.size > 1:
        group.meet_at(repo.store)
        require_one_step(group, None)
    numbers: list[int] = json.loads(told_by_rank_0(group, listed_steps))
    while True:
        damage: dict[int, IntegrityError] = {}
        gone: set[int] = set()  # never committed, or deleted since they were listed
        found: tuple[int, Any] | None = None
        for number in numbers:
            try:
                found = number, load(functools.partial(find_together, repo, number, group), wish)
                break
            except StepNotFound:
                gone.add(number)
            except (IntegrityError, StoreError, _StoreFailedElsewhere) as error:
                if _is_gone(repo, number, group):
                    gone.add(number)
                elif strict or not isinstance(error, IntegrityError):
                    raise
                else:
                    damage[number] = error
        # Another process saves and deletes meanwhile: it may have committed a newer step than what was found.
        if not gone:
            return settled(repo, found, damage, 5)
        known = {*numbers} - gone
        again: list[int] = json.loads(told_by_rank_0(group, listed_steps))
        newer = again[: again.index(found[0])] if found is not None and found[0] in again else again
        if not _any_committed(repo, [number for number in newer if number not in known], group):
            return settled(repo, found, damage, 5)
        numbers = again


def _is_gone(repo: Repository, step: int, group: Group) -> bool:
    """Whether a step that can't be loaded was deleted."""

    def ask() -> str:
        try:
            return json.dumps(not repo.store.exists(commit_name(step)))
        except StoreError:  # then the error of the load is what counts
            return json.dumps(False)

    return bool(json.loads(told_by_rank_0(group, ask)))


def _any_committed(repo: Repository, steps: Sequence[int], group: Group) -> bool:
    return bool(json.loads(told_by_rank_0(group, lambda: json.dumps(any(repo.store.exists(commit_name(n)) for n in steps)))))


def settled(
    repo: Repository, found: tuple[int, T] | None, damage: dict[int, IntegrityError], depth: int
) -> tuple[int, T] | None:
    """What was found, once the damaged steps that were passed over are told and distrusted. Raises where none is whole.

    depth: frames from here up to the user's call, which the warning names.
    """
    mark_damaged_in_all_tiers(repo, damage)
    if found is None and damage:
        newest, *others = damage.values()
        for error in others:
            log.error("%s", error)
        if not others:
            raise newest
        raise type(newest)(f"no step of {repo.url} is whole, of {listed(sorted(damage))}; the newest: {newest}") from newest
    for passed_over in damage.values():
        assert found is not None
        message = f"loaded the older step {found[0]} because a newer one is damaged: {passed_over}"
        log.error(message)
        warnings.warn(message, stacklevel=depth)
    return found
