"""Steps that only nearer tiers have: those of earlier jobs that are due in a further one, and that of a failed program."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from ckpt.repository.repository import Repository
from ckpt.storage.base.errors import CkptError, StoreError
from ckpt.tiers.open_tier import OpenTier, publish_durable

log = logging.getLogger("ckpt")


CATCH_UP_PAUSE_SECONDS = 60.0
"""After a tier could not be read, saves wait this long before they try again to copy what earlier jobs have left."""


class EarlierSteps:
    """What earlier jobs have left in nearer tiers, until each further tier was offered the newest step that is due there."""

    def __init__(self) -> None:
        self.restored: tuple[int, int] | None = None
        """Training line and number of the step that this job has restored last, also after it has saved others."""
        self.is_done = False
        self.next_try = 0.0
        """The time of the monotonic clock from which a save tries again."""

    def offer(self, tiers: Sequence[OpenTier], read_only: Sequence[Repository]) -> None:
        """Do once what `offer_earlier_steps` does. If a tier can't be read now, a later call tries again."""
        if not self.is_done:
            self.is_done = offer_earlier_steps(tiers, read_only, self.restored)
            self.next_try = time.monotonic() + CATCH_UP_PAUSE_SECONDS

    def offer_after_pause(self, tiers: Sequence[OpenTier], read_only: Sequence[Repository]) -> None:
        """Call `offer` for a save, unless the last call was less than CATCH_UP_PAUSE_SECONDS ago, as the training waits."""
        if time.monotonic() >= self.next_try:
            self.offer(tiers, read_only)


def offer_earlier_steps(tiers: Sequence[OpenTier], read_only: Sequence[Repository], restored: tuple[int, int] | None) -> bool:
    """Let each tier copy the newest step that an earlier job left in a nearer one; return whether all could be read.

    A repository that can't be read now is named in the log, because neither a load nor a save may fail for it.

    tiers: the nearest first.
    read_only: repositories that are nearer than all of them, and can only be read.
    restored: line and number of the step that this job has restored. A newer step is abandoned, and not copied.
    """
    are_all_read = True
    for number, tier in enumerate(tiers):
        if tier.copier is None:
            continue
        try:
            newest = _find_earlier_step(tier, [*(other.session.repo for other in tiers[:number]), *read_only], restored)
        except CkptError as error:
            log.warning("what earlier jobs have left is not copied to %s yet: %s", tier.url, error)
            are_all_read = False
            continue
        if newest is not None:
            line, step = newest
            tier.offer(step, line)
    return are_all_read


def _find_earlier_step(
    tier: OpenTier, nearer: Iterable[Repository], restored: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Return line and number of the newest step of nearer repositories that is due in a tier and newer than its steps.

    Returns None if there is none.
    """
    newest_in_tier = tier.session.repo.newest()
    line, step = newest_in_tier if restored is None else min(newest_in_tier, restored)
    publish_durable(tier, step, line)
    # Only for an interval in steps does the number say whether a step is due. Otherwise the newest step is copied.
    has_due_number = tier.spec.counts if isinstance(tier.spec.every, int) else lambda _: True
    # `nearer` is empty once the memories of earlier attempts are released and no tier is open.
    newest = max((repo.newest(has_due_number) for repo in nearer), default=newest_in_tier)
    return newest if newest > newest_in_tier and (restored is None or newest <= restored) else None


def newest_step_of(tiers: Sequence[OpenTier], read_only: Iterable[Repository]) -> tuple[int, int]:
    """Return line and number of the newest step of the tiers and of those read-only repositories that can be read now."""
    found = [tier.session.repo.newest() for tier in tiers]
    for repo in read_only:
        with suppress(StoreError):  # what can't be read now stays there; `offer_earlier_steps` has logged it
            found.append(repo.newest())
    return max(found)


def warn_of_unpromoted_step(main_repo: Repository, newest: tuple[int, int]) -> None:
    """Log that only a nearer tier has the newest step, which nothing copies after a failure of the program.

    main_repo: the repository of record.
    newest: training line and number of the step that this job restored or saved last.
    """
    if newest[1] < 0 or newest <= (newest_there := main_repo.newest()):
        return
    has = f"has step {newest_there[1]}" if newest_there[1] >= 0 else "has no step"
    log.warning(
        "step %d is in a nearer tier, and %s %s: give the next job the same tiers to continue from the newest", newest[1],
        main_repo.url, has,
    )  # fmt: skip
