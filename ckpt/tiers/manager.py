"""The class TierManager, which saves to the nearest tier and has steps copied to further ones.

A save ends when the nearest tier has committed it. Rank 0 copies committed steps to further tiers in the background
(background_copier.py). Each tier has its own `every` and `keep`. A load reads each block from the nearest undamaged copy
(block_io/replicated_store.py).

All ranks of a group choose the same tier for a save. It follows from the results of earlier saves, which every rank knows.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from ckpt.errors import SaveFailed, StepSkipped
from ckpt.format.signature import NO_KEYS, Keys
from ckpt.groups.base import Group
from ckpt.repository.attempt import SerialCounter
from ckpt.repository.damage_registry import damaged_steps
from ckpt.repository.repository import Repository, Url
from ckpt.repository.retention import Keep, as_keep
from ckpt.repository.tiered_repository import TieredRepository
from ckpt.saving import session_registry
from ckpt.saving.handle import SaveHandle
from ckpt.saving.lineage import Lineage
from ckpt.saving.options import Options
from ckpt.saving.pipeline import BegunSave, save_after_failure
from ckpt.saving.save_plan import flatten_state, planned_bytes
from ckpt.saving.skipped_step import skip_step
from ckpt.saving.writer_session import WriterSession
from ckpt.storage.base.errors import StoreError
from ckpt.storage.base.plural import format_count
from ckpt.storage.base.store import Store
from ckpt.support.user_warning import warn_user
from ckpt.tiers.background_copier import BackgroundCopier
from ckpt.tiers.copy_check import remove_damaged_copies
from ckpt.tiers.earlier_steps import EarlierSteps, newest_step_of, warn_of_unpromoted_step
from ckpt.tiers.freed_memory import free_memory, remove_freed_commits
from ckpt.tiers.open_tier import OpenTier, can_fall_through, cancel_promotion, next_tier, publish_durable, require_end_of
from ckpt.tiers.previous_memory import previous_memories
from ckpt.tiers.tier_note import bind_to_repository, can_read_steps_of, repair_marker
from ckpt.tiers.tier_repositories import open_repositories, require_shared_memory
from ckpt.tiers.tier_spec import MEMORY, Tier, capacity_bytes
from ckpt.tiers.unlisted_tiers import may_have_later_step, spare_unlisted
from ckpt.training.save_interval import Every

log = logging.getLogger("ckpt")


class TierManager:
    """The tiers of a Checkpointer, the repository of record included. It takes the writer leases of all of them."""

    def __init__(
        self, url: Url, every: Every, keep: int | Keep | None, tiers: Sequence[Tier], group: Group, keys: Keys = NO_KEYS
    ) -> None:
        """Open all tiers. Every rank of the group must call it. The arguments are those of `Checkpointer`."""
        repos = open_repositories(url, keep, tiers, keys)
        main_repo = repos[-1]
        self._group = group
        self._open_tiers: list[OpenTier] = []
        self._at_end = ExitStack()
        self._last_save: SaveHandle | None = None
        self._skipped_step: int | None = None
        """A step that this rank has left out since the last save: the other ranks may still write it."""
        self._step_bytes: int | None = None
        """The bytes of a step of all ranks; None before they are known."""
        # The attributes have no lock: `_save_ended` changes them in the thread that ends a save, and the training thread waits
        # for the end of that save before it changes them itself.
        self._line_and_step: tuple[int, int] | None = None
        """Training line and number of the step that this job restored or saved last."""
        self._is_newest_in_main_repo = False
        """Whether this job saved that step to the repository of record directly."""
        self._unlisted_tiers = set[str]()  # URLs of those whose steps could not be listed at the last restore
        self._earlier_steps = EarlierSteps()
        series = SerialCounter(repos)
        try:
            # The repository of record is first, so that a job which is refused there has changed nothing.
            self._enter_tier(Tier(url, every, keep), main_repo, series, main_repo.store)
            require_shared_memory(tiers, group)
            for spec, repo in zip(reversed(tiers), reversed(repos[:-1]), strict=True):
                try:
                    self._enter_tier(spec, repo, series, main_repo.store)
                except StoreError as error:  # all ranks of a group get the same error
                    message = f"the tier {repo.url} is not used, and saves go to the next tier: {error}"
                    log.error(message)
                    warn_user(message)
            # A session that this process has already has a repository object of its own.
            entered = {tier.session.repo.url: tier.session.repo for tier in self._open_tiers}
            bind_to_repository(list(entered.values()), group.rank == 0)
            self._previous_memories = previous_memories(main_repo) if any(spec.url == MEMORY for spec in tiers) else []
            self._read_only_tiers = [r for r in repos[:-1] if r.url not in entered and can_read_steps_of(r, main_repo)]
            near = [entered.get(r.url, r) for r in repos[:-1] if r.url in entered or r in self._read_only_tiers]
            self.repository = TieredRepository([*near, *self._previous_memories, entered[main_repo.url]])
            # All tiers share one lineage: a save to the nearest tier may continue from a step restored from another tier.
            writer = self.nearest
            newest = max(tier.session.lineage.newest_step for tier in self._open_tiers)
            lineage = Lineage(self.repository, writer.writer_lease.generation, partial(damaged_steps, writer.repo), newest)
            for tier in self._open_tiers:
                tier.session.lineage = lineage
            if group.rank == 0:
                self._start_copiers()
        except BaseException:
            self._leave_sessions()
            raise

    def _enter_tier(self, tier: Tier, repo: Repository, series: SerialCounter, rendezvous_store: Store) -> None:
        """Open one tier, in front of those that are open.

        rendezvous_store: where the ranks meet: at the repository of record, so that they agree on a tier that can't be written.
        """

        def prepare() -> None:
            if self._open_tiers:
                repair_marker(repo, tier)
                remove_freed_commits(repo, self._open_tiers[-1].session.repo)

        session = session_registry.enter(repo, self._group, series, rendezvous_store, prepare=prepare)
        self._open_tiers.insert(0, OpenTier(tier, session))

    def _start_copiers(self) -> None:
        """Start copying to all tiers that have a nearer one, and measure the sizes of the near tiers, on rank 0."""
        for number, tier in enumerate(self._open_tiers):
            repo = tier.session.repo
            spared_steps = partial(self._steps_to_promote_from, number)
            tier.session.writer_lease.spare(spared_steps)
            self._at_end.callback(tier.session.writer_lease.stop_sparing, spared_steps)
            if number or (repo is self.main_repo and len(self.repository.tiers) > 1):  # the others can only be read
                tier.copier = BackgroundCopier(
                    self._repositories_except(repo), tier.session, as_keep(tier.spec.keep), partial(publish_durable, tier)
                )
            if repo is not self.main_repo:
                tier.capacity_bytes = capacity_bytes(tier.spec, repo)
                tier.measure_stored_bytes()

    def _repositories_except(self, repo: Repository) -> TieredRepository:
        return TieredRepository([other for other in self.repository.tiers if other is not repo])

    def _leave_sessions(self) -> None:
        self._at_end.close()
        for tier in self._open_tiers:
            session_registry.leave(tier.session)

    @property
    def every(self) -> Every:
        """When a save to the nearest tier is due."""
        return self._open_tiers[0].spec.every

    @property
    def nearest(self) -> WriterSession:
        """The writer session of the nearest tier."""
        return self._open_tiers[0].session

    @property
    def main_repo(self) -> Repository:
        """The repository of record."""
        return self._open_tiers[-1].session.repo

    @property
    def _copiers(self) -> list[BackgroundCopier]:
        return [tier.copier for tier in self._open_tiers if tier.copier is not None]

    def _steps_to_promote_from(self, number: int) -> set[int]:
        """Return the steps that a tier must keep, because they are still to be copied to further tiers."""
        further = (tier.copier for tier in self._open_tiers[number + 1 :] if tier.copier is not None)
        return set[int]().union(*(copier.needed_steps() for copier in further))

    # --- saving ------------------------------------------------------------------------------------------------

    def is_due_by_number(self, step: int, step_before: int | None = None) -> bool:
        """Return whether a further tier gets this step because of its number. Tiers with an interval of time do not count."""
        reached = [tier.reaches(step, step_before) for tier in self._open_tiers[1:]]  # each tier notes the step
        return any(reached)

    def save(self, step: int, state: Any, options: Options, blocking: bool, all_tiers: bool) -> BegunSave:
        """Save to the nearest tier that can take the step, and return what `save_after_failure` returns.

        all_tiers: whether the step is due in all tiers, whatever its number.
        """
        self._earlier_steps.offer_after_pause(self._open_tiers, self._read_only())
        start = self._choose_first_tier(step)
        due = {n for n, tier in enumerate(self._open_tiers) if n and (all_tiers or tier.is_due(step))}
        for number, tier in enumerate(self._open_tiers[start:], start):
            further_tiers = [self._open_tiers[n] for n in due if n > number]
            try:
                for other in further_tiers:
                    if other.copier is not None:
                        other.copier.expect(step)
                handle, earlier_failure = self._save_to_tier(tier, step, state, options, blocking)
            except BaseException as error:
                cancel_promotion(further_tiers, step)
                if number == len(self._open_tiers) - 1 or not can_fall_through(error, self._group.size):
                    raise
                self._skip_after_failure(number, step, error)
                if self._group.size > 1 and not blocking:  # the other ranks learn of the failure only after this step
                    self._last_save = tier.failed_handle(step, error)
                    return self._last_save, None
                continue
            self._last_save, self._skipped_step = handle, None
            handle.when_done(partial(self._save_ended, handle, number, further_tiers))
            return handle, earlier_failure
        raise AssertionError("the last tier raises")

    def _save_to_tier(self, tier: OpenTier, step: int, state: Any, options: Options, blocking: bool) -> BegunSave:
        try:  # what only rank 0 checks
            for copier in self._copiers:
                copier.raise_fenced()
            if tier.capacity_bytes is not None:
                self._require_room(tier, state, options)
        except BaseException as error:
            if self._group.size > 1:  # the others wait for this step
                skip_step(tier.session, step, error)
            raise
        options = dataclasses.replace(options, keep=as_keep(tier.spec.keep))
        return save_after_failure(tier.session, state, step, options, blocking)

    def _require_room(self, tier: OpenTier, state: Any, options: Options) -> None:
        if self._step_bytes is None:
            self._step_bytes = planned_bytes(flatten_state(state, self._group), options, self._group) * self._group.size
        tier.require_room(self._step_bytes)

    def skip_step(self, step: int, error: StepSkipped) -> None:
        """Publish that this rank does not save a step that the other ranks may save."""
        skip_step(self._open_tiers[self._choose_first_tier(step)].session, step, error)
        self._skipped_step = step

    def _choose_first_tier(self, step: int) -> int:
        """Wait for the end of the previous save, and return the first tier to try for a step; it is the same on all ranks.

        It counts one skipped save of each tier in front of that one.
        """
        if self._last_save is not None:
            require_end_of(self._last_save, self._open_tiers, step)
        return next_tier(self._open_tiers)

    def _save_ended(self, handle: SaveHandle, number: int, further_tiers: Sequence[OpenTier]) -> None:
        tier, error = self._open_tiers[number], handle.error()
        if error is not None:
            cancel_promotion(further_tiers, handle.step)
            if number < len(self._open_tiers) - 1 and can_fall_through(error, self._group.size):
                tier.let_next_save_supersede(handle)
                self._skip_after_failure(number, handle.step, error)
            return
        for other in self._open_tiers:
            other.session.superseded_failure = None
        tier.consecutive_failures = 0
        tier.last_promotion_at = time.monotonic()
        commit = handle.checkpoint().commit
        publish_durable(tier, handle.step, commit.line)
        self._line_and_step = commit.line, handle.step
        self._is_newest_in_main_repo = tier is self._open_tiers[-1]
        self._step_bytes = commit.raw_bytes
        with suppress(StoreError):
            tier.measure_stored_bytes()
        for other in further_tiers:
            other.last_promotion_at = time.monotonic()
            other.offer(handle.step, commit.line, commit.raw_bytes)
        if self._previous_memories and not any(copier.needed_steps() - {handle.step} for copier in self._copiers):
            self._release_previous_memories(handle.step)

    def _skip_after_failure(self, number: int, step: int, error: BaseException) -> None:
        tier = self._open_tiers[number]
        tier.skip_next_saves()
        log.warning(
            "step %d could not be saved to the tier %s: %s; %s gets the next %s", step, tier.url, error,
            self._open_tiers[number + 1].url, format_count(tier.saves_to_skip, "save"),
        )  # fmt: skip

    def _release_previous_memories(self, step: int) -> None:
        """Stop reading the memory of earlier attempts, so that `ckpt-run` may free it: this newer step exists."""
        if may_have_later_step(self._previous_memories, self._unlisted_tiers, step):
            return
        released, self._previous_memories = self._previous_memories, []
        self.repository = TieredRepository([r for r in self.repository.tiers if r not in released])
        self.nearest.lineage.repo = self.repository
        for tier in self._open_tiers:
            if tier.copier is not None and len(self.repository.tiers) > 1:
                tier.copier.set_source(self._repositories_except(tier.session.repo))

    # --- promoting ---------------------------------------------------------------------------------------------

    def forget_previous(self) -> None:
        """Let the next save to each tier read the committed steps again."""
        for tier in self._open_tiers:
            tier.session.forget_previous()

    def load_ended(self, step: int) -> None:
        """Record the end of a load, and remove the damaged copies that it found.

        step: the loaded step; -1 if there was none.
        """
        self._unlisted_tiers = spare_unlisted(self.repository, self._open_tiers, lambda: self._line_and_step, self._at_end)
        self._line_and_step = self._earlier_steps.restored = self.repository.training_line_of(step), step
        self._is_newest_in_main_repo = False
        for copier in self._copiers:
            copier.withdraw_later(*self._line_and_step)
        remove_damaged_copies(self.repository)
        self._earlier_steps.offer(self._open_tiers, self._read_only())

    def _read_only(self) -> list[Repository]:
        """Return the repositories with steps of earlier jobs that are not open tiers."""
        return [*self._read_only_tiers, *self._previous_memories]

    def wait(self, progress: Callable[[], None] | None = None) -> None:
        """Wait for the running saves, and until each tier has the steps that are due there; raise SaveFailed if one failed.

        progress: called from time to time while a copy makes progress.
        """
        for tier in self._open_tiers:
            tier.session.wait()
        errors = []
        for copier in reversed(self._copiers):  # the repository of record first; a failure does not stop the others
            try:
                copier.wait(progress)
            except SaveFailed as error:
                errors.append(error)
        self.raise_failed()
        if errors:
            raise errors[0]

    def wait_ignoring_errors(self) -> None:
        """Wait for the running saves and copies; a later call raises their errors.

        Raises SaveFailed if a save makes no progress any more.
        """
        for tier in self._open_tiers:
            tier.session.wait()
        for copier in self._copiers:
            with suppress(SaveFailed):
                copier.wait()

    def wait_staged(self) -> None:
        """Wait until all running saves have copied the state."""
        for tier in self._open_tiers:
            tier.session.wait_staged()

    def raise_failed(self) -> None:
        """Raise an error of a save, or Fenced, but not an error of a copy, which is retried."""
        for tier in self._open_tiers:
            tier.session.raise_failed()
            if tier.copier is not None:
                tier.copier.raise_fenced()

    def close(self, promote: bool, progress: Callable[[], None] | None = None) -> None:
        """Wait for the running saves, and release all writer leases.

        promote: whether to copy the newest step to the repository of record first, and then to free the memory tiers.
        """
        try:
            for tier in self._open_tiers:
                tier.session.wait()
            if promote:
                step = self._promote_newest()
                self.wait(progress)
                self._free_memory(step)
            else:
                if self._group.rank == 0 and self._line_and_step is not None:
                    warn_of_unpromoted_step(self.main_repo, self._line_and_step)
                self.raise_failed()
            for tier in self._open_tiers:
                tier.session.raise_last_failure()
        finally:
            for copier in self._copiers:
                copier.close(wait=promote)
            self._leave_sessions()

    def _promote_newest(self) -> int:
        """Start copying the newest step to the repository of record, and return its number; -1 if there is none."""
        self._earlier_steps.offer(self._open_tiers, self._read_only())
        last_tier = self._open_tiers[-1]
        if last_tier.copier is None:
            return -1
        newest = self._line_and_step
        if newest is None:
            newest = newest_step_of(self._open_tiers, self._read_only())
        step = newest[1]
        if step >= 0 and not self._is_newest_in_main_repo:
            last_tier.copier.offer(step, newest[0])
        return step

    def _free_memory(self, step: int) -> None:
        """Delete the steps in memory tiers, after a check that the repository of record has the newest step."""
        free_memory(self._open_tiers, self._group, step, self._line_and_step, self._skipped_step)
