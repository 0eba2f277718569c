"""The class WriterLease, the right of one process to write a repository. A newer lease fences the older ones.

A lease is a generation with the record `generations/<n>.json`. The record is written by put-if-absent, so that two writers
never have the same number. It identifies the holder by host, boot, process-id namespace, process id and start time. On the same
host, a second writer is refused while that process lives, and takes over at once when it is dead, so that a restart never
waits. If the holder is on another host, or its record is damaged, nobody can see whether it lives: a new writer takes over, and
the earlier writer fails with Fenced at its next commit. If the record can't be read now, no writer takes over. A lease is valid
until it is taken over: it has no time limit and is never renewed.

In a group, rank 0 is the holder. A rank that ends its saves before rank 0 writes an end marker, `generations/<n>-left-…`, so
that no other rank waits for it (`group_lease.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict

from ckpt.errors import Fenced, RepositoryBusy
from ckpt.format import json_records
from ckpt.format.json_records import CommitRecord
from ckpt.groups.process_identity import ProcessIdentity, is_alive, this_process
from ckpt.repository.attempt import Attempt, AttemptSeries, SerialCounter
from ckpt.repository.file_names import FOLDERS
from ckpt.repository.lease_records import end_markers, generation_name, lease_holder, list_lease_records, newest_generation
from ckpt.repository.repository import Repository
from ckpt.storage.base.errors import AlreadyExists, CkptError, IntegrityError, NotFound, StoreError, Unavailable
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.fencing_probe import require_conditional_puts
from ckpt.support.fork_check import CreatorProcess

log = logging.getLogger("ckpt")

UNSEEN_SECONDS = 60.0
"""How long no other saver of this process deletes the last steps of a group: a rank may not have seen their commits yet."""

_ACQUIRE_TRIES = 20
"""How often a process tries to take the next generation while other writers are faster."""


class WriterLease:
    """The right of one process to write to a repository, until `release`. Each of its groups has a `GroupLease` of it.

    Safe to use from many threads. The processes of the other ranks have an object with the generation of rank 0, too. They
    never release it.
    """

    def __init__(self, repo: Repository, generation: int, token: str = "", serials: SerialCounter | None = None) -> None:
        self.repo = repo
        self.generation = generation
        self.token = token
        """The token of the holder in the record. If the repository was deleted and created again, its record of the same
        generation has another token."""
        self.has_shared_serials = serials is not None
        """Whether leases of other repositories use the same counter of serials."""
        self.publish_lock = threading.Lock()
        """Taken while a commit record is written: of two saves of one step, one waits for the result of the other."""
        self.sweep_lock = threading.Lock()
        """Taken by a sweep, and to pin the packs to which an attempt refers."""
        self._creator_process = CreatorProcess()
        self._serials = serials or SerialCounter()
        self._temporaries_lock = threading.Lock()
        """Guards `_are_temporaries_swept`."""
        self._are_temporaries_swept = False
        self._lock = threading.Lock()
        """Guards the following attributes."""
        self._attempt_counts: dict[tuple[int, AttemptSeries], int] = {}
        """The number of the last attempt, by step and series."""
        self._active_attempts: dict[str, frozenset[str]] = {}
        """The pinned packs of each attempt that has not ended, by its name."""
        self._active_steps: dict[str, int] = {}
        """The step of each of these attempts."""
        self._unsettled_commits: dict[str, CommitRecord] = {}
        """The commit records whose publication may still take effect, by the name of the attempt that saved the step."""
        self._watched_steps: list[list[int]] = []
        """Lists to which each attempt that begins adds its step, see `_watch_steps`."""
        self._spared_steps: list[Callable[[], Collection[int]]] = []
        self._unseen_steps: dict[int, tuple[float, frozenset[int]]] = {}
        """The time (monotonic clock) and the steps of the last commits of each group, by its number."""
        self._user_count = 0
        self._has_ranks = False

    # --- users -------------------------------------------------------------------------------------------------

    def add_user(self, *, has_ranks: bool = False) -> None:
        """Add a user of the lease in this process, such as a `GroupLease`.

        has_ranks: other processes may write end markers in this generation.
        """
        with self._lock:
            self._user_count += 1
            self._has_ranks = self._has_ranks or has_ranks

    def drop_user(self) -> bool:
        """Remove a user. Return whether it was the last one, which must then call `release`."""
        with self._lock:
            self._user_count -= 1
            return self._user_count == 0

    def new_group_number(self) -> int:
        """Return the number of a further group, or process alone, in this generation, also of other tiers; the first has 0."""
        return next(self._serials.group_numbers)

    # --- attempts ----------------------------------------------------------------------------------------------

    def sweep_temporaries_once(self) -> None:
        """Remove the temporary files of killed writers. Only the first call does; it must come before the first write."""
        self._require_own_process()
        with self._temporaries_lock:
            if not self._are_temporaries_swept:
                self.repo.store.sweep_temporaries("", folders=False)
                for folder in FOLDERS:
                    self.repo.store.sweep_temporaries(folder)
                self._are_temporaries_swept = True

    def begin_attempt(self, step: int, series: AttemptSeries) -> Attempt:
        """Return a new attempt at a step. No sweep deletes its files before `end_attempt`."""
        self._require_own_process()
        with self._lock:
            return self._begin_attempt(step, series)

    def begin_next_attempt(self, series: AttemptSeries) -> Attempt:
        """Return a new attempt at the step of `next_step`, which no other attempt has got meanwhile."""
        self._require_own_process()
        with self._watch_steps() as steps:
            newest = self.repo.newest()[1]
            with self._lock:
                return self._begin_attempt(max(newest, *steps) + 1, series)

    def next_step(self) -> int:
        """Return the number after the newest committed step and after the steps of all attempts that may still be committed."""
        with self._watch_steps() as steps:
            newest = self.repo.newest()[1]
            with self._lock:
                return max(newest, *steps) + 1

    def _begin_attempt(self, step: int, series: AttemptSeries) -> Attempt:
        """Needs `_lock`."""
        key = step, series
        number = self._attempt_counts[key] = self._attempt_counts.get(key, series.first_number - 1) + 1
        name = f"{series.rank}-{self.generation}-{series.first_serial + next(self._serials.serials)}"
        self._active_attempts[name], self._active_steps[name] = frozenset(), step
        for steps in self._watched_steps:
            steps.append(step)
        return Attempt(name, series.rank, self.generation, step, number)

    @contextmanager
    def _watch_steps(self) -> Iterator[list[int]]:
        """A context with -1 and the steps of the attempts that may still be committed, to which those that begin are added.

        An attempt may begin and end while the committed steps are listed, and then be in no list but this one.
        """
        with self._lock:
            steps = [-1, *self._active_steps.values(), *(each.step for each in self._unsettled_commits.values())]
            self._watched_steps = [*self._watched_steps, steps]
        try:
            yield steps
        finally:
            with self._lock:
                self._watched_steps = [other for other in self._watched_steps if other is not steps]

    def pin_packs(self, attempt: Attempt, packs: Iterable[str]) -> None:
        """Protect the packs of earlier steps to which the attempt may refer from sweeps, until `end_attempt`."""
        with self._lock:
            self._active_attempts[attempt.name] = frozenset(packs)

    def end_attempt(self, attempt: Attempt) -> None:
        """Record that the attempt was committed or abandoned."""
        with self._lock:
            self._active_attempts.pop(attempt.name, None)
            self._active_steps.pop(attempt.name, None)

    def active_attempts(self) -> dict[str, frozenset[str]]:
        """Return the names of the attempts that have not ended, with the packs of earlier steps to which they may refer."""
        with self._lock:
            return dict(self._active_attempts)

    def active_steps(self) -> frozenset[int]:
        """Return the steps of the attempts that have not ended: each may get a new commit record at any time."""
        with self._lock:
            return frozenset(self._active_steps.values())

    def begin_publication(self, commit: CommitRecord) -> None:
        """Record that this commit record may be written from now on, also after an error, until `settle`."""
        with self._lock:
            self._unsettled_commits[commit.attempt_name] = commit

    def settle(self, attempt_name: str) -> None:
        """Record that the attempt is committed, or that nothing can commit it any more."""
        with self._lock:
            self._unsettled_commits.pop(attempt_name, None)

    def unsettled_commits(self) -> dict[str, CommitRecord]:
        """Return the commit records whose publication has begun, and may still take effect, by the name of their attempt."""
        with self._lock:
            return dict(self._unsettled_commits)

    # --- steps that no sweep deletes ---------------------------------------------------------------------------

    def spare(self, steps: Callable[[], Collection[int]]) -> None:
        """Let no sweep delete the steps that this function returns, for example because they must still be copied from here."""
        with self._lock:
            self._spared_steps.append(steps)

    def stop_sparing(self, steps: Callable[[], Collection[int]]) -> None:
        """Withdraw a call of `spare` with this function, if there was one."""
        with self._lock:
            self._spared_steps = [other for other in self._spared_steps if other is not steps]

    def note_commits(self, group: int, steps: Iterable[int]) -> None:
        """Record the last commits of a group, by its number, just after one."""
        now = time.monotonic()
        with self._lock:
            recent = {number: each for number, each in self._unseen_steps.items() if each[0] > now - UNSEEN_SECONDS}
            self._unseen_steps = recent | {group: (now, frozenset(steps))}

    def spared_steps(self, group: int) -> set[int]:
        """Return the steps that a sweep of a group, or of a process alone, with this number must not delete for the others."""
        since = time.monotonic() - UNSEEN_SECONDS
        with self._lock:
            functions = list(self._spared_steps)
            unseen = [steps for number, (at, steps) in self._unseen_steps.items() if number != group and at > since]
        return set[int]().union(*unseen, *(steps() for steps in functions))

    # --- fencing -----------------------------------------------------------------------------------------------

    def require_newest(self) -> None:
        """Raise Fenced if a newer writer has taken over, or StoreError if the repository was deleted."""
        self._require_own_process()
        if (error := self.lease_error()) is not None:
            raise error

    def _require_own_process(self) -> None:
        self._creator_process.require_current(
            f"the right to write to {self.repo.url}", "save from one of them, or to another URL from the child"
        )

    def explain_failure(self, error: BaseException | None) -> BaseException | None:
        """Return the error of a save, or Fenced instead if a newer writer took over, because it may have deleted the files."""
        if not isinstance(error, StoreError) or isinstance(error, Unavailable):
            return error
        try:
            fenced = self.lease_error()
        except StoreError:
            return error
        if not isinstance(fenced, Fenced):
            return error
        fenced.__cause__ = error
        return fenced

    def lease_error(self) -> Fenced | StoreError | None:
        """Return the error that `require_newest` raises; None if this is the newest generation."""
        newest = newest_generation(self.repo)
        if newest <= self.generation:
            if self._has_own_record():
                return None
            return StoreError(
                f"{self.repo.url}/{generation_name(self.generation)} is missing: the folder was deleted or emptied during a "
                "save, and the steps in it are lost; start the program again to save from the beginning"
            )
        owner: ProcessIdentity | None = None
        with suppress(CkptError):  # the name of the record is enough to know that there is a newer writer
            owner = lease_holder(self.repo, newest)
        me = this_process()
        if owner and owner.pid == me.pid and is_alive(owner, me):
            return Fenced(
                f"{self.repo.url}: this process has also begun to save there for another group (generation {newest}, this "
                f"group has {self.generation}); save to one URL through one group"
            )
        who = f" by process {owner.pid} on {owner.host} since {owner.since}" if owner else ""
        return Fenced(
            f"{self.repo.url} was taken over{who} (generation {newest}, this process has {self.generation}); "
            "this process may not write to it any more: stop it"
        )

    def _has_own_record(self) -> bool:
        """Return whether the record of this lease exists, and was not written by another holder after a deletion."""
        name = generation_name(self.generation)
        try:
            owner = json_records.load(self.repo.store, "generation", name)["owner"]
        except NotFound:
            return False
        except (CkptError, KeyError):  # damaged, or the store does not answer now
            return True
        return not isinstance(owner, dict) or owner.get("token") == self.token

    def release(self) -> bool:
        """Release the lease, so that other processes may write. Its record stays, so that its number is never used again.

        Returns False if the record could not be written, so that other processes can't see the release.
        """
        if not self._creator_process.is_current:
            return True
        name = generation_name(self.generation)
        try:
            if not self._has_own_record():  # the repository was deleted, and a release must not create it again
                return True
            with self._temporaries_lock:  # a later sweep of another thread could delete the temporary file of this record
                self._are_temporaries_swept = True
                self.repo.store.put(name, json_records.encode("generation", {"owner": None}))
            if self._has_ranks:
                markers = end_markers(list_lease_records(self.repo))
                self.repo.store.delete([marker.name for marker in markers if marker.generation == self.generation])
        except CkptError as error:
            log.warning("%s could not be released: %s", name, error)
            return False
        return True


def acquire_lease(repo: Repository, serials: SerialCounter | None = None) -> WriterLease:
    """Return a new writer lease of a repository.

    serials: the counter that the tiers of a repository share.

    Raises RepositoryBusy if a live process of this host is its writer, Refused if the store ignores the conditions of puts,
    StoreError if the record of the last writer can't be read now, and FormatError if a newer version has written that record.
    """
    process = this_process()
    generation = _take_generation(repo, serials.highest_generation if serials else 0, process)
    lease = WriterLease(repo, generation, process.token, serials)
    try:
        require_conditional_puts(repo.store, generation_name(lease.generation))
    except BaseException as error:
        explained = lease.explain_failure(error)  # a newer writer may have deleted the record meanwhile
        lease.release()
        if isinstance(explained, Fenced):
            raise explained from error
        raise
    return lease


def _take_generation(repo: Repository, above_generation: int, process: ProcessIdentity) -> int:
    """Write the record of the next generation above all existing ones, and return its number.

    Raises RepositoryBusy if a live process of this host is the holder, or if other writers are faster each time.
    """
    for _ in range(_ACQUIRE_TRIES):
        current = newest_generation(repo)
        newest = max(current, above_generation)
        if current:
            _require_no_live_holder(repo, current, process)
        failpoint("lease")
        try:
            repo.store.put_new(generation_name(newest + 1), json_records.encode("generation", {"owner": asdict(process)}))
        except (AlreadyExists, NotFound):  # another writer was faster; NotFound: its sweep deleted our temporary file
            continue
        if newest_generation(repo) == newest + 1:  # otherwise the first listing was old, and there is a newer generation
            return newest + 1
    raise RepositoryBusy(f"{repo.url}: many processes start to write at once; start one of them only")


def _require_no_live_holder(repo: Repository, generation: int, process: ProcessIdentity) -> None:
    """Raise RepositoryBusy if the holder of a generation lives; log a warning if nobody can see whether it does.

    Raises StoreError if the record can't be read now, and FormatError if a newer version has written it.
    """
    try:
        owner = lease_holder(repo, generation)
    except IntegrityError:  # no later read would show it either
        log.warning(
            "taking over %s from an unknown process, because %s is damaged: it may still run, but it can't commit any more",
            repo.url, generation_name(generation),
        )  # fmt: skip
        return
    if owner is None:
        return
    is_owner_alive = is_alive(owner, process)
    if is_owner_alive and owner.pid == process.pid:  # this process, for another of its groups
        return
    if is_owner_alive:
        raise RepositoryBusy(
            f"{repo.url} is being written by process {owner.pid} on {owner.host} since {owner.since}; "
            "wait for it, stop it, or save to another URL"
        )
    if is_owner_alive is None:  # it may run on another host, or in another container
        log.warning(
            "taking over %s from process %d on %s: it may still run, but it can't commit any more",
            repo.url, owner.pid, owner.host,
        )  # fmt: skip
