"""The class TierManager, which saves to the nearest tier and has steps copied to further ones; and `drain`.

A save ends when the nearest tier has committed it. Rank 0 copies committed steps to further tiers in the background
(background_copier.py). Each tier has its own `every` and `keep`. A load reads each block from the nearest undamaged copy
(block_io/replicated_store.py).

The ranks of a group agree without messages. Which steps are due follows from their numbers. The tier of a save follows from the
results of earlier saves, which every rank knows.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ckpt.block_io.replicated_store import remove_bad_copies
from ckpt.errors import RanksMissing, SaveFailed, StepRefused
from ckpt.format.signature import NO_KEYS, Keys
from ckpt.groups.base import Group, SingleProcessGroup
from ckpt.repository.damage_registry import damaged_steps
from ckpt.repository.repository import Repository, Url, commit_name, open_repository
from ckpt.repository.retention import Keep, as_keep
from ckpt.repository.tiered_repository import TieredRepository
from ckpt.repository.writer_lease import SerialCounter
from ckpt.saving import session_registry as sessions
from ckpt.saving.handle import SaveHandle
from ckpt.saving.lineage import Lineage
from ckpt.saving.options import Options
from ckpt.saving.pipeline import save as run_save
from ckpt.saving.save_plan import planned_bytes
from ckpt.saving.skipped_step import skip_step
from ckpt.saving.writer_session import Session
from ckpt.storage.base.errors import CkptError, IntegrityError, InvalidArgument, NoSpace, NotFound, StoreError
from ckpt.storage.base.store import Store
from ckpt.support.user_warning import warn_user
from ckpt.tiers.background_copier import Promoter
from ckpt.tiers.copy_check import is_intact_copy
from ckpt.tiers.copy_step import missing_packs, promote
from ckpt.tiers.tier_spec import (
    MEMORY,
    TIER_NOTE_NAME,
    Tier,
    bind_to_repository,
    capacity_bytes,
    has_steps_of,
    is_host_memory,
    previous_memories,
    read_tier_note,
    repair_marker,
    stored_step_bytes,
    tier_location,
    url_of_subfolder,
)
from ckpt.training import heartbeat_page
from ckpt.training.save_interval import Every, interval_seconds

log = logging.getLogger("ckpt")

_MAX_SKIP_EXPONENT = 6  # a tier that failed is skipped for 1, 2, 4 … 64 saves


@dataclass(slots=True)
class _OpenTier:
    """A tier with its writer session. The repository of record is the last one."""

    spec: Tier
    session: Session
    capacity_bytes: int | None = None
    stored_bytes: int = 0
    promoter: Promoter | None = None
    last_promotion_at: float = field(default_factory=time.monotonic)
    saves_to_skip: int = 0
    """How many more saves skip this tier."""
    consecutive_failures: int = 0

    @property
    def url(self) -> str:
        return self.session.repo.url

    def is_due(self, step: int) -> bool:
        every = self.spec.every
        if every is None or isinstance(every, int):
            return self.spec.counts(step)
        cost = self.promoter.last_copy_seconds if self.promoter else 0.0
        return time.monotonic() - self.last_promotion_at >= interval_seconds(every, cost)

    def measure_stored_bytes(self) -> None:
        if self.capacity_bytes is not None:
            self.stored_bytes = stored_step_bytes(self.session.repo)


class TierManager:
    """The tiers of a Checkpointer, the repository of record included. It takes the writer leases of all of them."""

    def __init__(
        self, url: Url, every: Every, keep: int | Keep | None, tiers: Sequence[Tier], group: Group, keys: Keys = NO_KEYS
    ) -> None:
        """Open all tiers. Every rank of the group must call it. The arguments are those of `Checkpointer`."""
        record = open_repository(url, keys)
        repos = [*(open_repository(tier_location(tier, record.url), keys) for tier in tiers), record]
        if any(kept is not None and kept.copies > 1 for kept in map(as_keep, (keep, *(tier.keep for tier in tiers)))):
            raise InvalidArgument(
                "ckpt.Keep(copies=…) with tiers: a save does not know which steps will be copied to a tier, so that all of "
                "those may refer to the same copy; leave copies= out, or the tiers"
            )
        if len({repo.url for repo in repos}) < len(repos):
            raise InvalidArgument(f"tiers and {record.url}: two of them have the same URL; give each another one")
        self._group = group
        self._open_tiers: list[_OpenTier] = []
        self._last_save: SaveHandle | None = None
        self._step_bytes: int | None = None
        self._line_and_step: tuple[int, int] | None = None
        """Training line and number of the step that this job restored or saved last."""
        self._caught_up = False
        series = SerialCounter(repos)
        try:
            # The repository of record is first, so that a job which is refused there has changed nothing.
            self._enter_tier(Tier(url, every, keep), record, series, record.store)
            if group.size > 1 and any(map(is_host_memory, tiers)) and not group.one_host():
                raise InvalidArgument(
                    'Tier("memory"): the ranks are on several hosts, which share no memory; start them with ckpt-run, which '
                    "keeps memory for all hosts, or give the nodes that run on the hosts: "
                    'Tier("ckpt://host1:7070,host2:7070/run?redundancy=2x")'
                )
            for tier, repo in zip(reversed(tiers), reversed(repos[:-1]), strict=True):
                try:
                    self._enter_tier(tier, repo, series, record.store)
                except StoreError as error:  # all ranks of a group get the same error
                    message = f"the tier {repo.url} is not used, and saves go to the next tier: {error}"
                    log.error(message)
                    warn_user(message)
            entered = [place.session.repo for place in self._open_tiers]
            bind_to_repository(entered, group.rank == 0)
            self._previous_memories = previous_memories(record) if any(tier.url == MEMORY for tier in tiers) else []
            near = [r for r in repos[:-1] if r in entered or has_steps_of(r, record)]
            self.repository = TieredRepository([*near, *self._previous_memories, record])
            # All tiers share one lineage: a save to the nearest tier may continue from a step restored from another tier.
            writer = self.nearest
            newest = max(place.session.lineage.newest_step for place in self._open_tiers)
            lineage = Lineage(self.repository, writer.lease.writer.generation, partial(damaged_steps, writer.repo), newest)
            for place in self._open_tiers:
                place.session.lineage = lineage
            if group.rank == 0:
                self._start_promoters()
        except BaseException:
            self._leave_sessions()
            raise

    def _enter_tier(self, tier: Tier, repo: Repository, series: SerialCounter, rendezvous_store: Store) -> None:
        """Open one tier, in front of those that are open.

        rendezvous_store: where the ranks meet. It is that of the repository of record, so that they can agree that a tier can't
            be written.
        """
        if self._open_tiers and self._group.rank == 0:
            repair_marker(repo, tier)
            _remove_freed_commits(repo, self._open_tiers[-1].session.repo)
        self._open_tiers.insert(0, _OpenTier(tier, sessions.enter(repo, self._group, series, rendezvous_store)))

    def _start_promoters(self) -> None:
        """Start copying to all tiers but the nearest, and measure their sizes, on rank 0."""
        for number, place in enumerate(self._open_tiers):
            repo = place.session.repo
            place.session.spared_steps = partial(self._steps_to_promote_from, number)
            if number:
                place.promoter = Promoter(
                    self._repositories_except(repo), place.session, as_keep(place.spec.keep), partial(_publish_durable, place)
                )
            if repo is not self.repository.places[-1]:
                place.capacity_bytes = capacity_bytes(place.spec, repo)
                place.measure_stored_bytes()

    def _repositories_except(self, repo: Repository) -> TieredRepository:
        return TieredRepository([other for other in self.repository.places if other is not repo])

    def _leave_sessions(self) -> None:
        for place in self._open_tiers:
            sessions.leave(place.session)

    @property
    def every(self) -> Every:
        """When a save to the nearest tier is due."""
        return self._open_tiers[0].spec.every

    @property
    def nearest(self) -> Session:
        """The writer session of the nearest tier."""
        return self._open_tiers[0].session

    @property
    def record(self) -> Repository:
        """The repository of record."""
        return self._open_tiers[-1].session.repo

    @property
    def _promoters(self) -> list[Promoter]:
        return [place.promoter for place in self._open_tiers if place.promoter is not None]

    def _steps_to_promote_from(self, number: int) -> set[int]:
        """Return the steps that a tier must keep, because they are still to be copied to further tiers."""
        further = (place.promoter for place in self._open_tiers[number + 1 :] if place.promoter is not None)
        return set[int]().union(*(promoter.needed_steps() for promoter in further))

    # --- saving ------------------------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Return whether a further tier gets this step because of its number."""
        return any(place.spec.counts(step) for place in self._open_tiers[1:])

    def save(self, step: int, state: Any, options: Options, blocking: bool, all_tiers: bool) -> SaveHandle:
        """Save to the nearest tier that can take the step, and return the handle.

        all_tiers: whether the step is due in all tiers, whatever its number.
        """
        for promoter in self._promoters:
            promoter.raise_fenced()
        self.catch_up()
        start = self._choose_first_tier()
        due = {n for n, place in enumerate(self._open_tiers) if n and (all_tiers or place.is_due(step))}
        for number, place in enumerate(self._open_tiers[start:], start):
            further_tiers = [self._open_tiers[n] for n in due if n > number]
            for other in further_tiers:
                if other.promoter is not None:
                    other.promoter.expect(step)
            try:
                handle = self._save_to_tier(place, step, state, options, blocking)
            except BaseException as error:
                self._cancel_promotion(further_tiers, step)
                if number == len(self._open_tiers) - 1 or not self._can_fall_through(error):
                    raise
                self._skip_after_failure(number, step, error)
                if self._group.size > 1 and not blocking:  # the other ranks learn of the failure only after this step
                    return self._failed_handle(place, step, error)
                continue
            self._last_save = handle
            handle.when_done(partial(self._save_ended, handle, number, further_tiers))
            return handle
        raise AssertionError("the last place raises")

    def _save_to_tier(self, tier: _OpenTier, step: int, state: Any, options: Options, blocking: bool) -> SaveHandle:
        if tier.capacity_bytes is not None:
            try:
                self._require_room(tier, state, options)
            except NoSpace as error:
                if self._group.size > 1:
                    skip_step(tier.session, step, error)
                raise
        return run_save(tier.session, state, step, dataclasses.replace(options, keep=as_keep(tier.spec.keep)), blocking)

    def _require_room(self, tier: _OpenTier, state: Any, options: Options) -> None:
        if self._step_bytes is None:
            self._step_bytes = planned_bytes(state, options, self._group) * self._group.size
        assert tier.capacity_bytes is not None
        if tier.stored_bytes + self._step_bytes > tier.capacity_bytes:
            raise NoSpace(
                f"{tier.url} has {tier.stored_bytes / 1e9:.3f} GB of at most {tier.capacity_bytes / 1e9:.3f} GB, and a step "
                f"has {self._step_bytes / 1e9:.3f} GB: give its Tier a higher limit= or a lower keep="
            )

    def skip_step(self, step: int, error: BaseException) -> None:
        """Publish that this rank does not save a step that the other ranks may save."""
        number = self._choose_first_tier()
        place = self._open_tiers[number]
        skip_step(place.session, step, error)
        if number < len(self._open_tiers) - 1:  # for the other ranks, this step fails in the tier
            self._skip(place)

    def _choose_first_tier(self) -> int:
        """Wait for the end of the previous save, and return the first tier to try next; it is the same on all ranks."""
        if self._last_save is not None:
            self._last_save.require_end()
        for number, place in enumerate(self._open_tiers[:-1]):
            if not place.saves_to_skip:
                return number
            place.saves_to_skip -= 1
        return len(self._open_tiers) - 1

    def _save_ended(self, handle: SaveHandle, number: int, further_tiers: Sequence[_OpenTier]) -> None:
        place, error = self._open_tiers[number], handle.error()
        if error is not None:
            self._cancel_promotion(further_tiers, handle.step)
            if number < len(self._open_tiers) - 1 and self._can_fall_through(error):
                self._excuse_until_next_save(place, handle)
                self._skip_after_failure(number, handle.step, error)
            return
        for other in self._open_tiers:
            other.session.excused_save = None
        place.consecutive_failures = 0
        place.last_promotion_at = time.monotonic()
        _publish_durable(place, handle.step)
        commit = handle.checkpoint().commit
        self._line_and_step = commit.line, handle.step
        self._step_bytes = commit.raw_bytes
        with suppress(StoreError):
            place.measure_stored_bytes()
        for other in further_tiers:
            if other.promoter is not None:
                other.last_promotion_at = time.monotonic()
                other.promoter.offer(handle.step)
        if self._previous_memories and not any(promoter.needed_steps() - {handle.step} for promoter in self._promoters):
            self._release_previous_memories()

    def _can_fall_through(self, error: BaseException) -> bool:
        """Return whether to try the next tier. In a group only errors that all ranks see count: all must choose alike."""
        if self._group.size == 1:
            return isinstance(error, StoreError)
        full = isinstance(error, NoSpace) or getattr(error.__cause__, "errno", None) == errno.ENOSPC
        return full or (isinstance(error, StepRefused) and not isinstance(error, RanksMissing))

    def _skip_after_failure(self, number: int, step: int, error: BaseException) -> None:
        place = self._open_tiers[number]
        self._skip(place)
        log.warning(
            "step %d could not be saved to the tier %s: %s; saves go to %s for the next %d",
            step, place.url, error, self._open_tiers[number + 1].url, place.saves_to_skip,
        )  # fmt: skip

    def _skip(self, tier: _OpenTier) -> None:
        tier.saves_to_skip = 1 << min(tier.consecutive_failures, _MAX_SKIP_EXPONENT)
        tier.consecutive_failures += 1

    def _cancel_promotion(self, tiers: Iterable[_OpenTier], step: int) -> None:
        for place in tiers:
            if place.promoter is not None:
                place.promoter.drop(step)

    def _failed_handle(self, tier: _OpenTier, step: int, error: BaseException) -> SaveHandle:
        handle = SaveHandle(step)
        self._excuse_until_next_save(tier, handle)
        handle.end(None, error)
        self._last_save = handle
        return handle

    def _excuse_until_next_save(self, tier: _OpenTier, handle: SaveHandle) -> None:
        """Excuse the error of this save, because the next save goes to a further tier."""
        handle.excuse()
        tier.session.excused_save = handle

    def _release_previous_memories(self) -> None:
        """Stop reading the memory of earlier attempts, so that `ckpt-run` may free it: a newer step exists."""
        before, self._previous_memories = self._previous_memories, []
        self.repository = TieredRepository([r for r in self.repository.places if r not in before])
        self.nearest.lineage.repo = self.repository
        for place in self._open_tiers:
            if place.promoter is not None:
                place.promoter.set_source(self._repositories_except(place.session.repo))

    # --- promoting ---------------------------------------------------------------------------------------------

    def load_ended(self, step: int) -> None:
        """Record the end of a load, and remove the damaged copies that it found.

        step: the loaded step; -1 if there was none.
        """
        self._line_and_step = self._training_line_of(step), step
        try:
            for name in remove_bad_copies(self.repository.store, partial(is_intact_copy, self.repository)):
                message = f"{name} was damaged, and is removed: a further tier has an intact copy, which was read"
                log.error(message)
                warn_user(message)
        except StoreError as error:
            log.warning("a damaged copy can't be removed, and is not used: %s", error)
        self.catch_up()

    def _training_line_of(self, step: int) -> int:
        try:
            return self.repository.record(step).line if step >= 0 and self.repository.line_numbers() else 0
        except CkptError as error:
            log.warning("the training line of step %d is unknown: %s", step, error)
            return 0

    def catch_up(self) -> None:
        """Promote, once, the newest step that an earlier job left in a nearer tier and that is due in a further one.

        A step newer than the restored one is abandoned, and is not promoted.
        """
        if self._caught_up:
            return
        self._caught_up = True
        for number, place in enumerate(self._open_tiers):
            if place.promoter is None:
                continue
            there = place.session.repo.newest()
            _publish_durable(place, there[1])
            is_due = place.spec.counts if isinstance(place.spec.every, int) else _accept_any
            nearer = [*(other.session.repo for other in self._open_tiers[:number]), *self._previous_memories]
            newest = max(repo.newest(is_due) for repo in nearer)
            if newest > there and (self._line_and_step is None or newest <= self._line_and_step):
                place.promoter.offer(newest[1])

    def wait(self, progress: Callable[[], None] | None = None) -> None:
        """Wait for the running saves, and until each tier has the steps that are due there; raise SaveFailed if one failed.

        progress: called from time to time while a copy makes progress.
        """
        for place in self._open_tiers:
            place.session.wait()
        errors = []
        for promoter in reversed(self._promoters):  # the repository of record first; a failure does not stop the others
            try:
                promoter.wait(progress)
            except SaveFailed as error:
                errors.append(error)
        self.raise_failed()
        if errors:
            raise errors[0]

    def wait_ignoring_errors(self) -> None:
        """Wait for the running saves and copies; a later call raises their errors."""
        for place in self._open_tiers:
            place.session.wait()
        for promoter in self._promoters:
            with suppress(SaveFailed):
                promoter.wait()

    def wait_staged(self) -> None:
        """Wait until all running saves have copied the state."""
        for place in self._open_tiers:
            place.session.wait_staged()

    def raise_failed(self) -> None:
        """Raise an error of a save, or Fenced, but not an error of a copy, which is retried."""
        for place in self._open_tiers:
            place.session.raise_failed()
            if place.promoter is not None:
                place.promoter.raise_fenced()

    def close(self, promote: bool, progress: Callable[[], None] | None = None) -> None:
        """Wait for the running saves, and release all writer leases.

        promote: whether to copy the newest step to the repository of record first, and then to free the memory tiers.
        """
        try:
            for place in self._open_tiers:
                place.session.wait()
            if promote:
                step = self._promote_newest()
                self.wait(progress)
                self._free_memory(step)
            else:
                self._warn_of_unpromoted_step()
                self.raise_failed()
            for place in self._open_tiers:
                place.session.raise_excused()
        finally:
            for promoter in self._promoters:
                promoter.close(wait=promote)
            self._leave_sessions()

    def _promote_newest(self) -> int:
        """Start copying the newest step to the repository of record, and return its number; -1 if there is none."""
        self.catch_up()
        record = self._open_tiers[-1]
        if record.promoter is None:
            return -1
        newest = self._line_and_step
        if newest is None:
            newest = max(
                repo.newest() for repo in [*(place.session.repo for place in self._open_tiers), *self._previous_memories]
            )
        step = newest[1]
        if step >= 0:
            record.promoter.offer(step)
        return step

    def _warn_of_unpromoted_step(self) -> None:
        """Log where the newest step is, after a failure of the program, which does not wait for a copy."""
        record, newest = self._open_tiers[-1].session.repo, self._line_and_step
        if self._group.rank == 0 and newest is not None and newest > (there := record.newest()):
            log.warning(
                "step %d is in %s, and %s has step %d: give the next job the same tiers to continue from the newest", newest[1],
                self._open_tiers[0].url, record.url, there[1],
            )  # fmt: skip

    def _free_memory(self, step: int) -> None:
        """Delete the steps in memory tiers, after a check that the repository of record has the newest step."""
        record = self._open_tiers[-1].session.repo
        try:
            if self._group.rank == 0 and step >= 0 and record.record(step).step != step:
                raise IntegrityError(f"{record.url}/{commit_name(step)} is not the record of step {step}")
        except CkptError as error:
            log.warning("the memory is not freed, because step %d can't be read from %s (%s)", step, record.url, error)
            return
        for place in self._open_tiers[:-1]:
            store = place.session.repo.store
            if self._group.rank == 0 and place.spec.url == MEMORY and place.session.user_count == 1:
                try:
                    names = [entry.name for entry in store.list("steps")]
                    if self._group.size > 1 and self._line_and_step is not None:  # another rank may still wait for this record
                        names = [name for name in names if name != commit_name(self._line_and_step[1])]
                    store.delete([name for name in names if name.endswith("/commit.json")])
                    store.delete(names)
                    store.sweep_temporaries("")
                except StoreError as error:
                    log.warning("the memory at %s could not be freed: %s", place.url, error)


def _remove_freed_commits(repo: Repository, record: Repository) -> None:
    """Remove commit records without files, which `_free_memory` has left for ranks that were waiting for them.

    A record is removed only if the repository of record has a readable record of the same save or a later one. Otherwise it may
    be the only one.
    """
    for step in repo.step_numbers():
        name = commit_name(step)
        if [entry.name for entry in repo.store.list(f"steps/{step}")] != [name]:
            continue
        with suppress(NotFound, IntegrityError):
            if record.record(step).save_order >= repo.record(step).save_order:
                repo.store.delete([name])


def _publish_durable(tier: _OpenTier, step: int) -> None:
    """Publish for `ckpt-run` that a step is not only in the memory of hosts."""
    if tier.spec.url != MEMORY and (page := heartbeat_page.own_page()) is not None:
        page.publish_durable(step)


def _accept_any(step: int) -> bool:
    return True


def _has_steps(repo: Repository) -> bool:
    """Return whether a repository has a committed step."""
    return any(repo.store.exists(commit_name(step)) for step in reversed(repo.step_numbers()))


def drain(memory: Url, *before: Url) -> str:
    """Copy the newest step of each repository in a memory tier to its repository of record, without the program that saved it.

        print(ckpt.tiers.drain("/dev/shm/ckpt-1000"))

    memory: the folder or URL of the memory, as in CKPT_MEMORY.
    before: memory of earlier attempts, the newest first. A repository is copied from there if the later ones have no step of
        it.

    Returns:
        A report with one line for each repository that was copied, was already up to date, or failed. It raises no error of a
        store or a repository; a line of a failure contains "could not be drained".
    """
    messages, drained_names = [], set[str]()
    for each in (memory, *before):
        store = open_repository(each).store
        try:
            names = sorted(store.list_folders("")) if store.answers(_ANSWER_SECONDS) else []
        except StoreError as error:
            if drained_names:
                log.info("%s can't be read, and is not needed any more: %s", store.url, error)
            else:
                messages.append(f"{store.url} {NOT_DRAINED}: {error}")
            continue
        for name in names:
            if name in drained_names:
                continue
            repo = open_repository(url_of_subfolder(store.url if isinstance(each, Store) else os.fspath(each), name))
            try:
                messages.append(_drain_repository(repo))
                if _has_steps(repo):  # files of attempts that never committed do not replace an older memory
                    drained_names.add(name)
            except (CkptError, OSError) as error:
                messages.append(f"{repo.url} {NOT_DRAINED}: {error}")
    return "\n".join(filter(None, messages))


NOT_DRAINED = "could not be drained"
"""Marks a line of the report of `drain` about memory that must be kept."""
_ANSWER_SECONDS = 10.0


def _require_tier_note(repo: Repository) -> dict[str, Any] | None:
    """Return the note of a tier, or None if the tier has no step that could be lost.

    Raises IntegrityError if the tier has steps, and its note is missing or damaged.
    """
    try:
        note = read_tier_note(repo)
    except IntegrityError as error:
        if not _has_steps(repo):
            return None
        raise IntegrityError(f"{error}. {repo.url} has steps and counts as not drained") from error
    if note is None and _has_steps(repo):
        raise IntegrityError(f"{repo.url}/{TIER_NOTE_NAME} is missing, and {repo.url} has steps: it counts as not drained")
    return note


def _drain_repository(repo: Repository) -> str:
    """Copy the newest step of one repository in memory to its repository of record; return a line of the report, or ""."""
    note = _require_tier_note(repo)
    if note is None:
        return ""
    repos = [repo if url == repo.url else open_repository(url) for url in note["places"]]
    record = repos[-1]
    if record.identity() != note["id"]:
        raise InvalidArgument(f"{record.url} is another repository now; copy the steps that you need with ckpt-restore")
    source = TieredRepository([r for r in repos if r is not record])
    newest, there = max(r.newest() for r in source.places), record.newest()
    step = newest[1]
    if step < 0:
        return ""
    with suppress(NotFound, IntegrityError):
        newer = there > newest and record.record(there[1]).save_order > source.commit(step).save_order
        if newer and not missing_packs(record, record.record(there[1])):
            return f"{record.url} has step {there[1]} already, which is newer than step {step} in {repo.url}"
    series = SerialCounter(repos)
    opened: list[Session] = []
    try:
        opened.append(sessions.enter(record, SingleProcessGroup(), series))
        for near in repos[:-1]:
            try:
                opened.append(sessions.enter(near, SingleProcessGroup(), series))
            except StoreError as error:  # e.g. a host is lost; the lease of the repository of record is enough
                log.info("%s can't be written, and is only read: %s", near.url, error)
        done = promote(source, step, opened[0])
    finally:
        for session in opened:
            sessions.leave(session)
    return f"step {step} was brought from {repo.url} to {record.url}" if done else f"{record.url} has step {step} already"
