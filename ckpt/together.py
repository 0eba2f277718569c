"""Loading by the ranks of a group: all load the same step, or all raise.

A rank that fell back to an older step alone would train on beside the others, and nobody would see it.
"""

from __future__ import annotations

import functools
import json
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckpt import session as sessions
from ckpt.checkpoint import Checkpoint
from ckpt.fill import Rename
from ckpt.groups.base import Alone, Group
from ckpt.read import Progress
from ckpt.repository import Repository, commit_name
from ckpt.select import Patterns
from ckpt.sharing import ShareReads
from ckpt.storage.errors import GroupError, IntegrityError

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


def together(group: Group, work: Callable[[], T]) -> T:
    """Do something on every rank. Where it fails on one, it fails on all: there with its own error, elsewhere with GroupError
    (IntegrityError where that was it)."""
    if group.size == 1:
        return work()
    error: BaseException | None = None
    try:
        made = work()
    except BaseException as failed:
        error = failed
    told = "" if error is None else json.dumps([type(error).__name__, str(error)])
    answers = group.all_gather(told.encode())
    if error is not None:
        raise error
    for rank, answer in enumerate(answers):
        if answer:
            kind, message = json.loads(answer)
            if kind == "IntegrityError":
                raise IntegrityError(message)
            raise GroupError(f"rank {rank} of {group.size} failed, so no rank goes on: {kind}: {message}")
    return made


def load_newest_together(
    repo: Repository, strict: bool, wish: Wish, load: Callable[[Callable[[], Checkpoint], Wish], Any]
) -> tuple[int, Any] | None:
    """`load_newest` for a group. Rank 0 says which steps there are."""
    group = wish.group
    group.meet_at(repo.store)
    mine = [n for n in repo.step_numbers() if repo.store.exists(commit_name(n))] if group.rank == 0 else []
    numbers = json.loads(group.broadcast(json.dumps(mine).encode() if group.rank == 0 else None))
    damage: dict[int, IntegrityError] = {}
    found: tuple[int, Any] | None = None
    for number in reversed(numbers):
        try:
            found = number, load(functools.partial(repo.of_rank, number, group.rank), wish)
            break
        except IntegrityError as error:
            if strict:
                raise
            damage[number] = error
    sessions.distrusted(repo).update(damage)
    for passed_over in damage.values():
        if found is None:
            raise passed_over
        message = f"loaded the older step {found[0]} because a newer one is damaged: {passed_over}"
        log.error(message)
        warnings.warn(message, stacklevel=4)
    return found


