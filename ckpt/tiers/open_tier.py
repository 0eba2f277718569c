"""The class OpenTier, one tier of a Checkpointer with its writer session."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ckpt.errors import SaveFailed
from ckpt.saving.failure_reports import lacks_space
from ckpt.saving.handle import SaveHandle
from ckpt.saving.skipped_step import skip_step
from ckpt.saving.writer_session import WriterSession
from ckpt.storage.base.errors import NoSpace, StoreError
from ckpt.tiers.background_copier import BackgroundCopier
from ckpt.tiers.tier_spec import MEMORY, Tier, stored_step_bytes
from ckpt.training import heartbeat_page
from ckpt.training.save_interval import interval_seconds, reaches_multiple

log = logging.getLogger("ckpt")

_MAX_SKIP_EXPONENT = 6  # a tier that failed is skipped for 1, 2, 4 … 64 saves


@dataclass(slots=True)
class OpenTier:
    """A tier with its writer session. The repository of record is the last one.

    The training thread changes its attributes, and so does the thread that ends a save (see `TierManager`).
    """

    spec: Tier
    session: WriterSession
    capacity_bytes: int | None = None
    """The most bytes of steps in the tier; None if there is no limit, and on all ranks but rank 0."""
    stored_bytes: int = 0
    """The bytes of steps in the tier when they were measured last."""
    copier: BackgroundCopier | None = None
    """Copies steps to this tier, on rank 0; None if there is no nearer tier."""
    last_promotion_at: float = field(default_factory=time.monotonic)
    """When the tier got a step last, by a save or as an offer to the copier; a time of the monotonic clock."""
    saves_to_skip: int = 0
    """How many more saves skip this tier."""
    consecutive_failures: int = 0
    """How many saves to this tier have failed since the last one that succeeded."""
    reached_step: int | None = None
    """The last step that `reaches` has found due."""

    @property
    def url(self) -> str:
        """The URL of the repository of the tier."""
        return self.session.repo.url

    def reaches(self, step: int, step_before: int | None) -> bool:
        """Return whether the tier gets this step of a loop because of its number; `is_due` then returns it for the step, too.

        step_before: the step that the loop reported before it, which may be several numbers lower; None if that is unknown.
        """
        every = self.spec.every
        if not isinstance(every, int) or not reaches_multiple(step, step_before, every):
            return False
        self.reached_step = step
        return True

    def is_due(self, step: int) -> bool:
        """Return whether the tier gets this step because of its number, or because its interval of time has passed."""
        every = self.spec.every
        if every is None or isinstance(every, int):
            return self.spec.counts(step) or step == self.reached_step
        cost = self.copier.last_copy_seconds if self.copier else 0.0
        return time.monotonic() - self.last_promotion_at >= interval_seconds(every, cost)

    def measure_stored_bytes(self) -> None:
        """Set `stored_bytes` if the tier has a limit; raise StoreError if its files can't be listed."""
        if self.capacity_bytes is not None:
            self.stored_bytes = stored_step_bytes(self.session.repo)

    def require_room(self, step_bytes: int) -> None:
        """Raise NoSpace if a step of this size would exceed the capacity, which must be known.

        Files that no step needs, such as those of a killed save, do not count: they are deleted before it is raised.
        """
        assert self.capacity_bytes is not None
        if self.stored_bytes + step_bytes > self.capacity_bytes:
            self.session.make_room(None)
            self.measure_stored_bytes()
        if self.stored_bytes + step_bytes > self.capacity_bytes:
            raise NoSpace(
                f"{self.url} has {self.stored_bytes / 1e9:.3f} GB of at most {self.capacity_bytes / 1e9:.3f} GB, and a step "
                f"has {step_bytes / 1e9:.3f} GB: give its Tier a higher limit= or a lower keep="
            )

    def offer(self, step: int, line: int, step_bytes: int = 0) -> None:
        """Let the copier copy a step that a nearer tier has committed on this training line. Skip a step that does not fit.

        step_bytes: the size of the step; 0 if it is unknown.
        """
        if self.copier is None:
            return
        with suppress(StoreError):
            self.measure_stored_bytes()
        if self.capacity_bytes is not None:
            try:
                self.require_room(step_bytes)
            except StoreError as error:  # NoSpace, or the tier can't be listed
                self.copier.drop(step)
                log.warning("step %d is not copied: %s", step, error)
                return
        self.copier.offer(step, line)

    def skip_next_saves(self) -> None:
        """Skip this tier after a failure, for longer after each further one."""
        self.saves_to_skip = 1 << min(self.consecutive_failures, _MAX_SKIP_EXPONENT)
        self.consecutive_failures += 1

    def let_next_save_supersede(self, handle: SaveHandle) -> None:
        """Let the next save, which goes to a further tier, supersede the error of this one."""
        handle.supersede_error()
        self.session.superseded_failure = handle

    def failed_handle(self, step: int, error: BaseException) -> SaveHandle:
        """Return the handle of a save that has failed when it began. The next save supersedes its error."""
        handle = SaveHandle(step)
        self.let_next_save_supersede(handle)
        handle.end(None, error)
        return handle


def publish_durable(tier: OpenTier, step: int, line: int) -> None:
    """Publish for `ckpt-run` that a step is not only in the memory of hosts."""
    if tier.spec.url != MEMORY and (page := heartbeat_page.own_page()) is not None:
        page.publish_durable(step, line)


def cancel_promotion(tiers: Iterable[OpenTier], step: int) -> None:
    """Do not copy this step to these tiers."""
    for tier in tiers:
        if tier.copier is not None:
            tier.copier.drop(step)


def require_end_of(previous: SaveHandle, tiers: Sequence[OpenTier], step: int) -> None:
    """Wait for the end of the previous save. If it makes no progress, report that this rank doesn't save, and raise SaveFailed.

    The report is for the tier to which the other ranks save `step` if the previous save has succeeded there.
    """
    try:
        previous.require_end()
    except SaveFailed as error:
        skip_step(tiers[next_tier(tiers)].session, step, error, calls_store=False)
        raise


def next_tier(tiers: Sequence[OpenTier]) -> int:
    """Return the index of the tier to try next, and count one skipped save of each tier in front of it."""
    for number, tier in enumerate(tiers[:-1]):
        if not tier.saves_to_skip:
            return number
        tier.saves_to_skip -= 1
    return len(tiers) - 1


def can_fall_through(error: BaseException, group_size: int) -> bool:
    """Return whether to try the next tier. All ranks of a group must choose alike: only a lack of space counts, which a rank
    reports to all others."""
    return isinstance(error, StoreError) if group_size == 1 else lacks_space(error)
