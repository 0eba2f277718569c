"""Places before the repository of record that are nearer and faster: shared memory, a local disk.

A save lands in the nearest place and is acknowledged there; rank 0 copies committed steps on in the background (promoter.py),
each place at its own rhythm and with its own keep policy. A load takes each block from the nearest good copy (places.py).

The ranks of a group agree without talking: which steps are due follows from their numbers, and the place of a save from how
the saves before it ended, which every rank has seen.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import time
import warnings
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
from ckpt.saving.pipeline import planned_bytes, skip_step
from ckpt.saving.pipeline import save as run_save
from ckpt.saving.writer_session import Session
from ckpt.storage.base.errors import CkptError, IntegrityError, InvalidArgument, NoSpace, NotFound, StoreError
from ckpt.storage.base.store import Store
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

_MAX_SKIP_EXPONENT = 6  # a place that could not take a save is passed over for 1, 2, 4 … 64 saves


@dataclass(slots=True)
class _OpenTier:
    """A tier that is open. The last one is the repository of record."""

    spec: Tier
    session: Session
    capacity_bytes: int | None = None
    stored_bytes: int = 0
    promoter: Promoter | None = None
    last_promotion_at: float = field(default_factory=time.monotonic)
    saves_to_skip: int = 0
    """Saves that pass this place over."""
    consecutive_failures: int = 0
    """In a row."""

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
    """The places of a Checkpointer. Opening takes the right to write to all of them; every rank of the group must."""

    def __init__(
        self, url: Url, every: Every, keep: int | Keep | None, tiers: Sequence[Tier], group: Group, keys: Keys = NO_KEYS
    ) -> None:
        record = open_repository(url, keys)
        repos = [*(open_repository(tier_location(tier, record.url), keys) for tier in tiers), record]
        if any(kept is not None and kept.copies > 1 for kept in map(as_keep, (keep, *(tier.keep for tier in tiers)))):
            raise InvalidArgument(
                "ckpt.Keep(copies=…) with tiers: which steps come to a tier is not known when they are saved, so that all of "
                "them may refer to the same copy; leave copies= out, or the tiers"
            )
        if len({repo.url for repo in repos}) < len(repos):
            raise InvalidArgument(f"tiers and {record.url}: a place is named twice; each must be another one")
        self._group = group
        self._open_tiers: list[_OpenTier] = []
        self._last_save: SaveHandle | None = None
        self._step_bytes: int | None = None
        self._line_and_step: tuple[int, int] | None = None  # line and step: what this job restored, or has saved since
        self._caught_up = False
        series = SerialCounter(repos)
        try:
            # Of record first: who is refused there has changed nothing.
            self._enter_tier(Tier(url, every, keep), record, series, record.store)
            if group.size > 1 and any(map(is_host_memory, tiers)) and not group.one_host():
                raise InvalidArgument(
                    'Tier("memory"): the ranks are on several hosts, which share no memory; start them with ckpt-run, which '
                    "keeps it for all hosts, or says what it needs for that, or name nodes that run on them: "
                    'Tier("ckpt://host1:7070,host2:7070/run?redundancy=2x")'
                )
            for tier, repo in zip(reversed(tiers), reversed(repos[:-1]), strict=True):
                try:
                    self._enter_tier(tier, repo, series, record.store)
                except StoreError as error:  # of a group, every rank is told the same
                    message = f"the tier {repo.url} is left out, saves go to the next: {error}"
                    log.error(message)
                    warnings.warn(message, stacklevel=3)
            entered = [place.session.repo for place in self._open_tiers]
            bind_to_repository(entered, group.rank == 0)
            self._previous_memories = previous_memories(record) if any(tier.url == MEMORY for tier in tiers) else []
            near = [r for r in repos[:-1] if r in entered or has_steps_of(r, record)]
            self.repository = TieredRepository([*near, *self._previous_memories, record])
            # One for all: a save in the nearest place may go on from a step that was restored from another one.
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
        """where: the ranks meet at the repository of record, for a tier that can't be written is no place to agree on that."""
        if self._open_tiers and self._group.rank == 0:
            repair_marker(repo, tier)
            _remove_freed_commits(repo, self._open_tiers[-1].session.repo)
        self._open_tiers.insert(0, _OpenTier(tier, sessions.enter(repo, self._group, series, rendezvous_store)))

    def _start_promoters(self) -> None:
        """What rank 0 does for all."""
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
        """When a save is due in the nearest place."""
        return self._open_tiers[0].spec.every

    @property
    def nearest(self) -> Session:
        """Of the place where saves land."""
        return self._open_tiers[0].session

    @property
    def record(self) -> Repository:
        """The repository of record."""
        return self._open_tiers[-1].session.repo

    @property
    def _promoters(self) -> list[Promoter]:
        return [place.promoter for place in self._open_tiers if place.promoter is not None]

    def _steps_to_promote_from(self, number: int) -> set[int]:
        """Steps of a place that are still to be copied from it."""
        further = (place.promoter for place in self._open_tiers[number + 1 :] if place.promoter is not None)
        return set[int]().union(*(promoter.needed_steps() for promoter in further))

    # --- saving ------------------------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Whether a further place wants this step by its number."""
        return any(place.spec.counts(step) for place in self._open_tiers[1:])

    def save(self, step: int, state: Any, options: Options, blocking: bool, all_tiers: bool) -> SaveHandle:
        """Save in the nearest place that can take it. everywhere: the step is due in all."""
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
                if self._group.size > 1 and not blocking:  # the others are told later: they are beyond this step then
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
                f"{tier.url} holds {tier.stored_bytes / 1e9:.3f} GB of at most {tier.capacity_bytes / 1e9:.3f} GB, and a "
                "step has "
                f"{self._step_bytes / 1e9:.3f} GB: give its Tier a higher limit=, or a lower keep="
            )

    def skip_step(self, step: int, error: BaseException) -> None:
        """This rank does not save a step that the others may save."""
        number = self._choose_first_tier()
        place = self._open_tiers[number]
        skip_step(place.session, step, error)
        if number < len(self._open_tiers) - 1:  # the others see this step fail there
            self._skip(place)

    def _choose_first_tier(self) -> int:
        """Where the next save begins, once the one before has ended: the same on all ranks."""
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
        """Whether the next place may do better. In a group only what all ranks see, for they must choose alike."""
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
        """The next save makes up for this one, in a further place."""
        handle.excuse()
        tier.session.excused_save = handle

    def _release_previous_memories(self) -> None:
        """There is a newer step: ckpt-run may give that memory free."""
        before, self._previous_memories = self._previous_memories, []
        self.repository = TieredRepository([r for r in self.repository.places if r not in before])
        self.nearest.lineage.repo = self.repository
        for place in self._open_tiers:
            if place.promoter is not None:
                place.promoter.set_source(self._repositories_except(place.session.repo))

    # --- promoting ---------------------------------------------------------------------------------------------

    def load_ended(self, step: int) -> None:
        """A load has ended: with this step, -1 where there was none. Bad copies that it met are put aside."""
        self._line_and_step = self._training_line_of(step), step
        try:
            for name in remove_bad_copies(self.repository.store, partial(is_intact_copy, self.repository)):
                message = f"{name} was damaged, and is removed: a further tier has a copy, which was read and is whole"
                log.error(message)
                warnings.warn(message, stacklevel=3)
        except StoreError as error:
            log.warning("a damaged copy is still there, and is not used: %s", error)
        self.catch_up()

    def _training_line_of(self, step: int) -> int:
        try:
            return self.repository.record(step).line if step >= 0 and self.repository.line_numbers() else 0
        except CkptError as error:
            log.warning("the line of training of step %d is not known: %s", step, error)
            return 0

    def catch_up(self) -> None:
        """Once: promote what an earlier job left in near places, and what is due further on; nothing that a load went back
        behind."""
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
        """Wait for the saves under way, and until what is due further on is there; raise SaveFailed.

        progress: called now and then, as long as the copying goes on.
        """
        for place in self._open_tiers:
            place.session.wait()
        errors = []
        for promoter in reversed(self._promoters):  # of record first; each, whatever becomes of the others
            try:
                promoter.wait(progress)
            except SaveFailed as error:
                errors.append(error)
        self.raise_failed()
        if errors:
            raise errors[0]

    def wait_ignoring_errors(self) -> None:
        """Wait for what is under way, whatever comes of it."""
        for place in self._open_tiers:
            place.session.wait()
        for promoter in self._promoters:
            with suppress(SaveFailed):
                promoter.wait()

    def wait_staged(self) -> None:
        for place in self._open_tiers:
            place.session.wait_staged()

    def raise_failed(self) -> None:
        """Raise what went wrong in the background and can't be mended by waiting."""
        for place in self._open_tiers:
            place.session.raise_failed()
            if place.promoter is not None:
                place.promoter.raise_fenced()

    def close(self, promote: bool, progress: Callable[[], None] | None = None) -> None:
        """End. promote: bring the newest step to the repository of record, and give the memory free."""
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
        """Begin to copy the newest step to the repository of record. Its number, -1 where there is none."""
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
        """Where a program fails, nobody may have the time to wait for a copy."""
        record, newest = self._open_tiers[-1].session.repo, self._line_and_step
        if self._group.rank == 0 and newest is not None and newest > (there := record.newest()):
            log.warning(
                "step %d is in %s, and %s has step %d: the next job with these tiers goes on from there", newest[1],
                self._open_tiers[0].url, record.url, there[1],
            )  # fmt: skip

    def _free_memory(self, step: int) -> None:
        """Give the memory back, once the repository of record is seen to have the newest step."""
        record = self._open_tiers[-1].session.repo
        try:
            if self._group.rank == 0 and step >= 0 and record.record(step).step != step:
                raise IntegrityError(f"{record.url}/{commit_name(step)} is not the record of step {step}")
        except CkptError as error:
            log.warning("the memory is kept: step %d can't be read from %s (%s)", step, record.url, error)
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
                    log.warning("the memory at %s is not free yet: %s", place.url, error)


def _remove_freed_commits(repo: Repository, record: Repository) -> None:
    """Remove the commits that `_free` has left for ranks which waited for them: of their steps nothing else is there.

    Only where the repository of record has a readable record of the same save or a later one: else this may be the only one.
    """
    for step in repo.step_numbers():
        name = commit_name(step)
        if [entry.name for entry in repo.store.list(f"steps/{step}")] != [name]:
            continue
        with suppress(NotFound, IntegrityError):
            if record.record(step).save_order >= repo.record(step).save_order:
                repo.store.delete([name])


def _publish_durable(tier: _OpenTier, step: int) -> None:
    """Let `ckpt-run` know that a step is not only in the memory of hosts."""
    if tier.spec.url != MEMORY and (page := heartbeat_page.own_page()) is not None:
        page.publish_durable(step)


def _accept_any(step: int) -> bool:
    return True


def _has_steps(repo: Repository) -> bool:
    """Whether a step is committed there."""
    return any(repo.store.exists(commit_name(step)) for step in reversed(repo.step_numbers()))


def drain(memory: Url, *before: Url) -> str:
    """Bring the newest step of every repository in a memory folder (the value of CKPT_MEMORY) to where it belongs, without
    the program that saved it. Says in words what was done, a line each; what went wrong, too.

    before: memory of earlier times, the newest first, for repositories of which there is no step in the later ones.
    """
    messages, drained_names = [], set[str]()
    for each in (memory, *before):
        store = open_repository(each).store
        try:
            names = sorted(store.list_folders("")) if store.answers(_ANSWER_SECONDS) else []
        except StoreError as error:
            if drained_names:
                log.info("%s is not needed any more, and can't be read: %s", store.url, error)
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
"""In what `drain` says of a memory that has to be kept."""
_ANSWER_SECONDS = 10.0


def _require_tier_note(repo: Repository) -> dict[str, Any] | None:
    """The note of a near place. None where no step can be lost there; raises IntegrityError where the place holds steps and
    nothing says to which repository they belong."""
    try:
        note = read_tier_note(repo)
    except IntegrityError as error:
        if not _has_steps(repo):
            return None
        raise IntegrityError(f"{error}. {repo.url} holds steps and counts as not drained") from error
    if note is None and _has_steps(repo):
        raise IntegrityError(f"{repo.url}/{TIER_NOTE_NAME} is missing, and {repo.url} holds steps: it counts as not drained")
    return note


def _drain_repository(repo: Repository) -> str:
    note = _require_tier_note(repo)
    if note is None:
        return ""
    repos = [repo if url == repo.url else open_repository(url) for url in note["places"]]
    record = repos[-1]
    if record.identity() != note["id"]:
        raise InvalidArgument(f"{record.url} is another repository now; copy what is wanted with ckpt-restore")
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
            except StoreError as error:  # as where a host is lost: the right to write to the record is what counts
                log.info("%s is only read: %s", near.url, error)
        done = promote(source, step, opened[0])
    finally:
        for session in opened:
            sessions.leave(session)
    return f"step {step} was brought from {repo.url} to {record.url}" if done else f"{record.url} has step {step} already"
