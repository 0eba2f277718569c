"""Tiers whose steps can't be listed at a restore: the restore waits for them, and their later steps are not deleted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from functools import partial

from ckpt.repository.repository import Repository
from ckpt.repository.tiered_repository import TieredRepository
from ckpt.storage.base.errors import StoreError
from ckpt.support.user_warning import warn_user
from ckpt.tiers.open_tier import OpenTier

log = logging.getLogger("ckpt")

LISTING_PATIENCE_SECONDS = 60.0
"""How long a restore waits for a tier whose steps can't be listed."""

_MAX_PAUSE_SECONDS = 5.0


def wait_until_listed(repo: TieredRepository, patience_seconds: float | None = None) -> None:
    """Wait until the steps of all tiers can be listed. After `patience_seconds`, warn of those that can't, and return.

    One of them may have the newest step. Without it, the training continues from an older one.

    patience_seconds: None means LISTING_PATIENCE_SECONDS.
    """
    deadline = time.monotonic() + (LISTING_PATIENCE_SECONDS if patience_seconds is None else patience_seconds)
    pause = 0.25
    repo.take_listing_failures()
    while True:
        try:
            repo.step_numbers()
        except StoreError:  # the repository of record; the load raises it
            return
        if not (failures := repo.take_listing_failures()):
            return
        if time.monotonic() >= deadline:
            break
        log.warning("the restore waits until it can list the steps of %s", ", ".join(sorted(failures)))
        time.sleep(pause)
        pause = min(2 * pause, _MAX_PAUSE_SECONDS)
    for url, error in failures.items():
        message = f"the steps of the tier {url} can't be listed, so an older step may be restored: {error}"
        log.error(message)
        warn_user(message)


def spare_unlisted(
    repo: TieredRepository, tiers: Iterable[OpenTier], newest: Callable[[], tuple[int, int] | None], at_end: ExitStack
) -> set[str]:
    """Let no sweep delete the later steps of tiers that the restore could not list, until the training has passed them.

    Such a step counts as abandoned, as if the training had gone back on purpose.

    newest: returns training line and number of the step that this job restored or saved last.
    at_end: gets a callback for each of these tiers, by which the end of the job lets sweeps delete the steps again.

    Returns the URLs of the tiers that could not be listed.
    """
    failures = repo.take_listing_failures()
    for tier in tiers:
        if tier.url in failures:
            later = partial(_later_steps, tier.session.repo, newest)
            tier.session.writer_lease.spare(later)
            at_end.callback(tier.session.writer_lease.stop_sparing, later)
    return {*failures}


def _later_steps(repo: Repository, newest: Callable[[], tuple[int, int] | None]) -> set[int]:
    _, number = newest() or (0, -1)
    return {step for step in repo.step_numbers() if step > number}


def may_have_later_step(repos: Iterable[Repository], unlisted: Collection[str], step: int) -> bool:
    """Return whether a repository that could not be listed at the restore has a later step, or can't be listed now, either."""
    for repo in repos:
        if repo.url in unlisted:
            try:
                if any(other > step for other in repo.step_numbers()):
                    return True
            except StoreError as error:
                log.warning("%s is not released, because its steps can't be listed: %s", repo.url, error)
                return True
    return False
