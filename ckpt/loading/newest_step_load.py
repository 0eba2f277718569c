"""The load of the newest step, and the fallback to an older one if it is damaged, on all ranks together."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from ckpt.errors import LeafMismatch, LeafNotFound, StepNotFound
from ckpt.groups.base import Group
from ckpt.loading.rank_agreement import (
    LoadRequest,
    RemoteStoreError,
    broadcast_from_rank_0,
    is_true_on_rank_0,
    open_agreed_checkpoint,
    require_same_step,
)
from ckpt.repository.checkpoint import Checkpoint
from ckpt.repository.damage_registry import mark_damaged_in_all_tiers
from ckpt.repository.file_names import commit_name
from ckpt.repository.repository import Repository, steps_text
from ckpt.storage.base.errors import CkptError, IntegrityError, StoreError
from ckpt.support.user_warning import warn_user

log = logging.getLogger("ckpt")

T = TypeVar("T")


def load_newest_on_all_ranks(
    repo: Repository,
    strict: bool,
    request: LoadRequest,
    load: Callable[[Callable[[], Checkpoint], LoadRequest], T],
    restore_step_limit: int | None = None,
) -> tuple[int, T] | None:
    """Load the newest complete step on all ranks; return its number and the state, or None if no step is committed.

    strict: raise the first damage, and try no other step.
    load: loads one checkpoint, given a function that opens it.
    restore_step_limit: load the newest step below this number, if there is one.

    Raises IntegrityError if every step is damaged, StoreError or RemoteStoreError if a step can't be read now, and StepNotFound
    if nothing exists at the URL. Rank 0 lists the steps. If a listed step can't be loaded, it decides whether the step was
    deleted after the listing.
    """
    group = request.group

    def listed_steps() -> str:
        repo.check()
        return json.dumps(repo.order().newest_first(restore_step_limit))

    if group.size > 1:
        group.meet_at(repo.store)
        require_same_step(group, None)
    numbers: list[int] = json.loads(broadcast_from_rank_0(group, listed_steps))
    failed: CkptError | None = None  # the last load that may have changed arrays
    while True:
        damage: dict[int, IntegrityError] = {}
        missing: set[int] = set()  # never committed, or deleted after they were listed
        found: tuple[int, T] | None = None
        for number in numbers:
            try:
                found = number, load(functools.partial(open_agreed_checkpoint, repo, number, group), request)
                break
            except StepNotFound:
                missing.add(number)
            except (LeafNotFound, LeafMismatch) as error:
                raise _unless_changed(error, failed, number)  # noqa: B904  it has the cause
            except (IntegrityError, StoreError, RemoteStoreError) as error:
                failed = error
                if _is_deleted(repo, number, group):
                    missing.add(number)
                elif strict or not isinstance(error, IntegrityError):
                    raise
                else:
                    damage[number] = error
        # A missing step means that another process saves and deletes, so it may have committed a newer step than `found`.
        if not missing:
            return _finish_fallback(repo, found, damage, restore_step_limit)
        tried_and_present = {*numbers} - missing
        relisted: list[int] = json.loads(broadcast_from_rank_0(group, listed_steps))
        if found is None and not {*relisted} <= {*numbers}:
            numbers = relisted  # the writer has committed new steps since; even if it has deleted them too, more will follow
            continue
        newer = relisted[: relisted.index(found[0])] if found is not None and found[0] in relisted else relisted
        if not _has_committed(repo, [number for number in newer if number not in tried_and_present], group):
            return _finish_fallback(repo, found, damage, restore_step_limit)
        numbers = relisted


def _unless_changed(error: CkptError, failed: CkptError | None, step: int) -> CkptError:
    """Return an error of a step that does not fit; IntegrityError if arrays may have changed, which that error denies.

    failed: the error of an earlier load, which may have changed them; None if there was none.
    step: the number of the older step that does not fit.
    """
    if failed is None:
        return error
    damage = IntegrityError(f"{failed}; the older step {step} does not fit: {error}; build the state anew before you continue")
    damage.__cause__ = error
    return damage


def _is_deleted(repo: Repository, step: int, group: Group) -> bool:
    """Return whether a step that can't be loaded was deleted."""

    def ask() -> bool:
        try:
            return not repo.store.exists(commit_name(step))
        except StoreError:  # the caller then raises the error of the load
            return False

    return is_true_on_rank_0(group, ask)


def _has_committed(repo: Repository, steps: Sequence[int], group: Group) -> bool:
    return is_true_on_rank_0(group, lambda: any(repo.store.exists(commit_name(n)) for n in steps))


def _finish_fallback(
    repo: Repository, found: tuple[int, T] | None, damage: dict[int, IntegrityError], restore_step_limit: int | None
) -> tuple[int, T] | None:
    """Warn of the skipped damaged steps, mark them as damaged, and return `found`. Raise IntegrityError if all are damaged."""
    mark_damaged_in_all_tiers(repo, damage)
    if found is None and damage:
        newest, *others = damage.values()
        for error in others:
            log.error("%s", error)
        if not others:
            raise newest
        damaged = steps_text(sorted(damage))
        raise type(newest)(f"every step of {repo.url} is damaged ({damaged}); the newest: {newest}") from newest
    for number, skipped in damage.items():
        assert found is not None
        is_older = restore_step_limit is None or found[0] < restore_step_limit  # there may be no step below the limit
        loaded = "the older step" if is_older else "step"
        message = f"step {number} is damaged, so {loaded} {found[0]} was loaded: {skipped}"
        log.error(message)
        warn_user(message)
    return found
