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

from ckpt import pulse
from ckpt import session as sessions
from ckpt.claim import Series
from ckpt.damage_registry import damaged_steps
from ckpt.groups.base import Alone, Group
from ckpt.handle import SaveHandle
from ckpt.interval import Every, interval_seconds
from ckpt.lineage import Lineage
from ckpt.options import Options
from ckpt.places import put_aside
from ckpt.promote import missing_packs, promote
from ckpt.promoter import Promoter
from ckpt.repository import Repository, Url, commit_name, open_repository
from ckpt.retention import Keep, as_keep
from ckpt.session import Session
from ckpt.signature import NO_KEYS, Keys
from ckpt.storage.base import Store
from ckpt.storage.errors import (
    CkptError,
    IntegrityError,
    InvalidArgument,
    NoSpace,
    NotFound,
    RanksMissing,
    SaveFailed,
    StepRefused,
    StoreError,
)
from ckpt.tier import (
    MEMORY,
    NOTE,
    Tier,
    belong_together,
    below,
    held_bytes,
    holds_steps_of,
    is_own_memory,
    kept_before,
    limit_of,
    mend_marker,
    note_of,
    store_of,
)
from ckpt.tiered import TieredRepository
from ckpt.whole_copy import is_whole_copy
from ckpt.write import leave_out, planned_bytes
from ckpt.write import save as run_save

log = logging.getLogger("ckpt")

_MOST_SKIPPED = 6  # a place that could not take a save is passed over for 1, 2, 4 … 64 saves


@dataclass(slots=True)
class _Place:
    """A tier that is open. The last one is the repository of record."""

    tier: Tier
    session: Session
    limit: int | None = None
    held_bytes: int = 0
    promoter: Promoter | None = None
    promoted: float = field(default_factory=time.monotonic)
    skip: int = 0
    """Saves that pass this place over."""
    failures: int = 0
    """In a row."""

    @property
    def url(self) -> str:
        return self.session.repo.url

    def is_due(self, step: int) -> bool:
        every = self.tier.every
        if every is None or isinstance(every, int):
            return self.tier.counts(step)
        cost = self.promoter.seconds if self.promoter else 0.0
        return time.monotonic() - self.promoted >= interval_seconds(every, cost)

    def measure(self) -> None:
        if self.limit is not None:
            self.held_bytes = held_bytes(self.session.repo)


class Tiers:
    """The places of a Checkpointer. Opening takes the right to write to all of them; every rank of the group must."""

    def __init__(
        self, url: Url, every: Every, keep: int | Keep | None, tiers: Sequence[Tier], group: Group, keys: Keys = NO_KEYS
    ) -> None:
        record = open_repository(url, keys)
        repos = [*(open_repository(store_of(tier, record.url), keys) for tier in tiers), record]
        if any(kept is not None and kept.copies > 1 for kept in map(as_keep, (keep, *(tier.keep for tier in tiers)))):
            raise InvalidArgument(
                "ckpt.Keep(copies=…) with tiers: which steps come to a tier is not known when they are saved, so that all of "
                "them may refer to the same copy; leave copies= out, or the tiers"
            )
        if len({repo.url for repo in repos}) < len(repos):
            raise InvalidArgument(f"tiers and {record.url}: a place is named twice; each must be another one")
        self._group = group
        self._places: list[_Place] = []
        self._last: SaveHandle | None = None
        self._step_bytes: int | None = None
        self._position: tuple[int, int] | None = None  # line and step: what this job restored, or has saved since
        self._caught_up = False
        series = Series(repos)
        try:
            # Of record first: who is refused there has changed nothing.
            self._enter(Tier(url, every, keep), record, series, record.store)
            if group.size > 1 and any(map(is_own_memory, tiers)) and not group.one_host():
                raise InvalidArgument(
                    'Tier("memory"): the ranks are on several hosts, which share no memory; start them with ckpt-run, which '
                    "keeps it for all hosts, or says what it needs for that, or name nodes that run on them: "
                    'Tier("ckpt://host1:7070,host2:7070/run?redundancy=2x")'
                )
            for tier, repo in zip(reversed(tiers), reversed(repos[:-1]), strict=True):
                try:
                    self._enter(tier, repo, series, record.store)
                except StoreError as error:  # of a group, every rank is told the same
                    message = f"the tier {repo.url} is left out, saves go to the next: {error}"
                    log.error(message)
                    warnings.warn(message, stacklevel=3)
            entered = [place.session.repo for place in self._places]
            belong_together(entered, group.rank == 0)
            self._before = kept_before(record) if any(tier.url == MEMORY for tier in tiers) else []
            near = [r for r in repos[:-1] if r in entered or holds_steps_of(r, record)]
            self.repository = TieredRepository([*near, *self._before, record])
            # One for all: a save in the nearest place may go on from a step that was restored from another one.
            writer = self.nearest
            newest = max(place.session.lineage.newest for place in self._places)
            lineage = Lineage(self.repository, writer.claim.generation, partial(damaged_steps, writer.repo), newest)
            for place in self._places:
                place.session.lineage = lineage
            if group.rank == 0:
                self._prepare()
        except BaseException:
            self._leave()
            raise

    def _enter(self, tier: Tier, repo: Repository, series: Series, where: Store) -> None:
        """where: the ranks meet at the repository of record, for a tier that can't be written is no place to agree on that."""
        if self._places and self._group.rank == 0:
            mend_marker(repo, tier)
            _forget_freed(repo, self._places[-1].session.repo)
        self._places.insert(0, _Place(tier, sessions.enter(repo, self._group, series, where)))

    def _prepare(self) -> None:
        """What rank 0 does for all."""
        for number, place in enumerate(self._places):
            repo = place.session.repo
            place.session.spared = partial(self._needed, number)
            if number:
                place.promoter = Promoter(
                    self._all_but(repo), place.session, as_keep(place.tier.keep), partial(_report_durable, place)
                )
            if repo is not self.repository.places[-1]:
                place.limit = limit_of(place.tier, repo)
                place.measure()

    def _all_but(self, repo: Repository) -> TieredRepository:
        return TieredRepository([other for other in self.repository.places if other is not repo])

    def _leave(self) -> None:
        for place in self._places:
            sessions.leave(place.session)

    @property
    def every(self) -> Every:
        """When a save is due in the nearest place."""
        return self._places[0].tier.every

    @property
    def nearest(self) -> Session:
        """Of the place where saves land."""
        return self._places[0].session

    @property
    def record(self) -> Repository:
        """The repository of record."""
        return self._places[-1].session.repo

    @property
    def _promoters(self) -> list[Promoter]:
        return [place.promoter for place in self._places if place.promoter is not None]

    def _needed(self, number: int) -> set[int]:
        """Steps of a place that are still to be copied from it."""
        further = (place.promoter for place in self._places[number + 1 :] if place.promoter is not None)
        return set[int]().union(*(promoter.needed() for promoter in further))

    # --- saving ------------------------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Whether a further place wants this step by its number."""
        return any(place.tier.counts(step) for place in self._places[1:])

    def save(self, step: int, state: Any, options: Options, blocking: bool, everywhere: bool) -> SaveHandle:
        """Save in the nearest place that can take it. everywhere: the step is due in all."""
        for promoter in self._promoters:
            promoter.raise_fenced()
        self.catch_up()
        start = self._choose()
        due = {n for n, place in enumerate(self._places) if n and (everywhere or place.is_due(step))}
        for number, place in enumerate(self._places[start:], start):
            further = [self._places[n] for n in due if n > number]
            for other in further:
                if other.promoter is not None:
                    other.promoter.expect(step)
            try:
                handle = self._save_at(place, step, state, options, blocking)
            except BaseException as error:
                self._drop(further, step)
                if number == len(self._places) - 1 or not self._falls_through(error):
                    raise
                self._passed_over(number, step, error)
                if self._group.size > 1 and not blocking:  # the others are told later: they are beyond this step then
                    return self._given_up(place, step, error)
                continue
            self._last = handle
            handle.when_done(partial(self._ended, handle, number, further))
            return handle
        raise AssertionError("the last place raises")

    def _save_at(self, place: _Place, step: int, state: Any, options: Options, blocking: bool) -> SaveHandle:
        if place.limit is not None:
            try:
                self._require_room(place, state, options)
            except NoSpace as error:
                if self._group.size > 1:
                    leave_out(place.session, step, error)
                raise
        return run_save(place.session, state, step, dataclasses.replace(options, keep=as_keep(place.tier.keep)), blocking)

    def _require_room(self, place: _Place, state: Any, options: Options) -> None:
        if self._step_bytes is None:
            self._step_bytes = planned_bytes(state, options, self._group) * self._group.size
        assert place.limit is not None
        if place.held_bytes + self._step_bytes > place.limit:
            raise NoSpace(
                f"{place.url} holds {place.held_bytes / 1e9:.3f} GB of at most {place.limit / 1e9:.3f} GB, and a step has "
                f"{self._step_bytes / 1e9:.3f} GB: give its Tier a higher limit=, or a lower keep="
            )

    def leave_out(self, step: int, error: BaseException) -> None:
        """This rank does not save a step that the others may save."""
        number = self._choose()
        place = self._places[number]
        leave_out(place.session, step, error)
        if number < len(self._places) - 1:  # the others see this step fail there
            self._skip(place)

    def _choose(self) -> int:
        """Where the next save begins, once the one before has ended: the same on all ranks."""
        if self._last is not None:
            self._last.require_end()
        for number, place in enumerate(self._places[:-1]):
            if not place.skip:
                return number
            place.skip -= 1
        return len(self._places) - 1

    def _ended(self, handle: SaveHandle, number: int, further: Sequence[_Place]) -> None:
        place, error = self._places[number], handle.error()
        if error is not None:
            self._drop(further, handle.step)
            if number < len(self._places) - 1 and self._falls_through(error):
                self._excuse(place, handle)
                self._passed_over(number, handle.step, error)
            return
        for other in self._places:
            other.session.excused = None
        place.failures = 0
        place.promoted = time.monotonic()
        _report_durable(place, handle.step)
        commit = handle.checkpoint().commit
        self._position = commit.line, handle.step
        self._step_bytes = commit.raw_bytes
        with suppress(StoreError):
            place.measure()
        for other in further:
            if other.promoter is not None:
                other.promoted = time.monotonic()
                other.promoter.offer(handle.step)
        if self._before and not any(promoter.needed() - {handle.step} for promoter in self._promoters):
            self._forget_before()

    def _falls_through(self, error: BaseException) -> bool:
        """Whether the next place may do better. In a group only what all ranks see, for they must choose alike."""
        if self._group.size == 1:
            return isinstance(error, StoreError)
        full = isinstance(error, NoSpace) or getattr(error.__cause__, "errno", None) == errno.ENOSPC
        return full or (isinstance(error, StepRefused) and not isinstance(error, RanksMissing))

    def _passed_over(self, number: int, step: int, error: BaseException) -> None:
        place = self._places[number]
        self._skip(place)
        log.warning(
            "step %d could not be saved to the tier %s: %s; saves go to %s for the next %d",
            step, place.url, error, self._places[number + 1].url, place.skip,
        )  # fmt: skip

    def _skip(self, place: _Place) -> None:
        place.skip = 1 << min(place.failures, _MOST_SKIPPED)
        place.failures += 1

    def _drop(self, places: Iterable[_Place], step: int) -> None:
        for place in places:
            if place.promoter is not None:
                place.promoter.drop(step)

    def _given_up(self, place: _Place, step: int, error: BaseException) -> SaveHandle:
        handle = SaveHandle(step)
        self._excuse(place, handle)
        handle.end(None, error)
        self._last = handle
        return handle

    def _excuse(self, place: _Place, handle: SaveHandle) -> None:
        """The next save makes up for this one, in a further place."""
        handle.excuse()
        place.session.excused = handle

    def _forget_before(self) -> None:
        """There is a newer step: ckpt-run may give that memory free."""
        before, self._before = self._before, []
        self.repository = TieredRepository([r for r in self.repository.places if r not in before])
        self.nearest.lineage.repo = self.repository
        for place in self._places:
            if place.promoter is not None:
                place.promoter.reads(self._all_but(place.session.repo))

    # --- promoting ---------------------------------------------------------------------------------------------

    def restored(self, step: int) -> None:
        """A load has ended: with this step, -1 where there was none. Bad copies that it met are put aside."""
        self._position = self._line_of(step), step
        try:
            for name in put_aside(self.repository.store, partial(is_whole_copy, self.repository)):
                message = f"{name} was damaged, and is removed: a further tier has a copy, which was read and is whole"
                log.error(message)
                warnings.warn(message, stacklevel=3)
        except StoreError as error:
            log.warning("a damaged copy is still there, and is not used: %s", error)
        self.catch_up()

    def _line_of(self, step: int) -> int:
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
        for number, place in enumerate(self._places):
            if place.promoter is None:
                continue
            there = place.session.repo.newest()
            _report_durable(place, there[1])
            wanted = place.tier.counts if isinstance(place.tier.every, int) else _any
            nearer = [*(other.session.repo for other in self._places[:number]), *self._before]
            newest = max(repo.newest(wanted) for repo in nearer)
            if newest > there and (self._position is None or newest <= self._position):
                place.promoter.offer(newest[1])

    def wait(self, progress: Callable[[], None] | None = None) -> None:
        """Wait for the saves under way, and until what is due further on is there; raise SaveFailed.

        progress: called now and then, as long as the copying goes on.
        """
        for place in self._places:
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

    def settle(self) -> None:
        """Wait for what is under way, whatever comes of it."""
        for place in self._places:
            place.session.wait()
        for promoter in self._promoters:
            with suppress(SaveFailed):
                promoter.wait()

    def wait_staged(self) -> None:
        for place in self._places:
            place.session.wait_staged()

    def raise_failed(self) -> None:
        """Raise what went wrong in the background and can't be mended by waiting."""
        for place in self._places:
            place.session.raise_failed()
            if place.promoter is not None:
                place.promoter.raise_fenced()

    def close(self, promote: bool, progress: Callable[[], None] | None = None) -> None:
        """End. promote: bring the newest step to the repository of record, and give the memory free."""
        try:
            for place in self._places:
                place.session.wait()
            if promote:
                step = self._promote_newest()
                self.wait(progress)
                self._free(step)
            else:
                self._tell_what_stays()
                self.raise_failed()
            for place in self._places:
                place.session.raise_excused()
        finally:
            for promoter in self._promoters:
                promoter.close(wait=promote)
            self._leave()

    def _promote_newest(self) -> int:
        """Begin to copy the newest step to the repository of record. Its number, -1 where there is none."""
        self.catch_up()
        record = self._places[-1]
        if record.promoter is None:
            return -1
        newest = self._position
        if newest is None:
            newest = max(repo.newest() for repo in [*(place.session.repo for place in self._places), *self._before])
        step = newest[1]
        if step >= 0:
            record.promoter.offer(step)
        return step

    def _tell_what_stays(self) -> None:
        """Where a program fails, nobody may have the time to wait for a copy."""
        record, newest = self._places[-1].session.repo, self._position
        if self._group.rank == 0 and newest is not None and newest > (there := record.newest()):
            log.warning(
                "step %d is in %s, and %s has step %d: the next job with these tiers goes on from there", newest[1],
                self._places[0].url, record.url, there[1],
            )  # fmt: skip

    def _free(self, step: int) -> None:
        """Give the memory back, once the repository of record is seen to have the newest step."""
        record = self._places[-1].session.repo
        try:
            if self._group.rank == 0 and step >= 0 and record.record(step).step != step:
                raise IntegrityError(f"{record.url}/{commit_name(step)} is not the record of step {step}")
        except CkptError as error:
            log.warning("the memory is kept: step %d can't be read from %s (%s)", step, record.url, error)
            return
        for place in self._places[:-1]:
            store = place.session.repo.store
            if self._group.rank == 0 and place.tier.url == MEMORY and place.session.holders == 1:
                try:
                    names = [entry.name for entry in store.list("steps")]
                    if self._group.size > 1 and self._position is not None:  # another rank may still wait for this record
                        names = [name for name in names if name != commit_name(self._position[1])]
                    store.delete([name for name in names if name.endswith("/commit.json")])
                    store.delete(names)
                    store.sweep_temporaries("")
                except StoreError as error:
                    log.warning("the memory at %s is not free yet: %s", place.url, error)


def _forget_freed(repo: Repository, record: Repository) -> None:
    """Remove the commits that `_free` has left for ranks which waited for them: of their steps nothing else is there.

    Only where the repository of record has a readable record of the same save or a later one: else this may be the only one.
    """
    for step in repo.step_numbers():
        name = commit_name(step)
        if [entry.name for entry in repo.store.list(f"steps/{step}")] != [name]:
            continue
        with suppress(NotFound, IntegrityError):
            if record.record(step).order >= repo.record(step).order:
                repo.store.delete([name])


def _report_durable(place: _Place, step: int) -> None:
    """Let `ckpt-run` know that a step is not only in the memory of hosts."""
    if place.tier.url != MEMORY and (page := pulse.mine()) is not None:
        page.durable(step)


def _any(step: int) -> bool:
    return True


def _holds_steps(repo: Repository) -> bool:
    """Whether a step is committed there."""
    return any(repo.store.exists(commit_name(step)) for step in reversed(repo.step_numbers()))


def drain(memory: Url, *before: Url) -> str:
    """Bring the newest step of every repository in a memory folder (the value of CKPT_MEMORY) to where it belongs, without
    the program that saved it. Says in words what was done, a line each; what went wrong, too.

    before: memory of earlier times, the newest first, for repositories of which there is no step in the later ones.
    """
    said, done = [], set[str]()
    for each in (memory, *before):
        store = open_repository(each).store
        try:
            names = sorted(store.list_folders("")) if store.answers(_ANSWER_SECONDS) else []
        except StoreError as error:
            if done:
                log.info("%s is not needed any more, and can't be read: %s", store.url, error)
            else:
                said.append(f"{store.url} {NOT_DRAINED}: {error}")
            continue
        for name in names:
            if name in done:
                continue
            repo = open_repository(below(store.url if isinstance(each, Store) else os.fspath(each), name))
            try:
                said.append(_drained(repo))
                if _holds_steps(repo):  # files of attempts that never committed do not replace an older memory
                    done.add(name)
            except (CkptError, OSError) as error:
                said.append(f"{repo.url} {NOT_DRAINED}: {error}")
    return "\n".join(filter(None, said))


NOT_DRAINED = "could not be drained"
"""In what `drain` says of a memory that has to be kept."""
_ANSWER_SECONDS = 10.0


def _readable_note(repo: Repository) -> dict[str, Any] | None:
    """The note of a near place. None where no step can be lost there; raises IntegrityError where the place holds steps and
    nothing says to which repository they belong."""
    try:
        note = note_of(repo)
    except IntegrityError as error:
        if not _holds_steps(repo):
            return None
        raise IntegrityError(f"{error}. {repo.url} holds steps and counts as not drained") from error
    if note is None and _holds_steps(repo):
        raise IntegrityError(f"{repo.url}/{NOTE} is missing, and {repo.url} holds steps: it counts as not drained")
    return note


def _drained(repo: Repository) -> str:
    note = _readable_note(repo)
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
        newer = there > newest and record.record(there[1]).order > source.commit(step).order
        if newer and not missing_packs(record, record.record(there[1])):
            return f"{record.url} has step {there[1]} already, which is newer than step {step} in {repo.url}"
    series = Series(repos)
    opened: list[Session] = []
    try:
        opened.append(sessions.enter(record, Alone(), series))
        for near in repos[:-1]:
            try:
                opened.append(sessions.enter(near, Alone(), series))
            except StoreError as error:  # as where a host is lost: the right to write to the record is what counts
                log.info("%s is only read: %s", near.url, error)
        done = promote(source, step, opened[0])
    finally:
        for session in opened:
            sessions.leave(session)
    return f"step {step} was brought from {repo.url} to {record.url}" if done else f"{record.url} has step {step} already"
