"""Who may write to a repository. Each writer takes a generation; a higher one fences off the lower ones.

A lease is `generations/<n>.json`, made by put-if-absent, so that two at once cannot have the same number. The holder is
named in it by host, boot, process-id namespace, process and start time: a second writer on the same host is refused as
long as that process lives, and takes over at once when it is dead, so that a restart never waits. On another host nobody can
see whether the holder lives; the newcomer takes over, and the earlier writer fails with Fenced when it next commits.

In a group rank 0 is the holder. Another rank that ends its saves before rank 0 writes an end marker, `generations/<n>-left-…`,
so that nobody waits for it (`group_lease.py`).
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from ckpt.errors import Fenced, RepositoryBusy
from ckpt.format import json_records
from ckpt.groups.process_identity import ProcessIdentity, is_alive, this_process
from ckpt.repository.lease_records import end_markers, generation_name, lease_holder, list_lease_records, newest_generation
from ckpt.repository.repository import Repository
from ckpt.storage.base.errors import AlreadyExists, CkptError, NotFound, StoreError, Unavailable
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.fencing_probe import require_conditional_puts
from ckpt.support.fork_check import CreatorProcess

log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try to save one step by one rank."""

    name: str
    """<rank>-<generation>-<serial>, never used twice: the files of the attempt begin with it."""
    rank: int
    generation: int
    step: int
    number: int
    """Tries of this step by this rank in this generation before. Equal on all ranks, whatever else failed on one of them:
    by it the committer tells what belongs together."""

    @property
    def serial(self) -> tuple[int, int]:
        """Grows with each attempt of this rank."""
        return self.generation, int(self.name.rpartition("-")[2])


class SerialCounter:
    """Numbers that the leases of several repositories share: what is copied from one to the other keeps its name, which no
    other file of any of them may have had."""

    def __init__(self, repos: Sequence[Repository] = ()) -> None:
        self._repos = repos
        self.serials = itertools.count()

    @functools.cached_property
    def highest_generation(self) -> int:
        """No generation of any of them is higher."""
        return max(map(newest_generation, self._repos), default=0)


@dataclass(frozen=True, slots=True)
class AttemptCounter:
    """Which tries of a step are counted together, and with which numbers they begin."""

    group: int | None
    """The number of the group; None: the process saves the step for itself alone, and counts apart from its groups."""
    rank: int
    first_number: int
    first_serial: int


class WriterLease:
    """The right of one process to write to a repository, until `release`. Each of its groups uses it by a `GroupLease`.

    Safe to use from many threads. A process that takes part as another rank than 0 has one as well, of the generation that
    rank 0 named: it never releases that.
    """

    def __init__(self, repo: Repository, generation: int, token: str = "", serials: SerialCounter | None = None) -> None:
        self.repo = repo
        self.generation = generation
        self.token = token
        """Of the holder in the record. A repository that was begun anew at this URL has another one in the same generation."""
        self.has_shared_serials = serials is not None
        """Whether leases of other repositories count on with the same numbers."""
        self.publish_lock = threading.Lock()
        """Taken while a commit record is put: of two saves of one step, one waits for the outcome of the other."""
        self.sweep_lock = threading.Lock()
        """Taken to pin the packs that an attempt refers to, and by a sweep."""
        self._creator_process = CreatorProcess()
        self._serials = (serials or SerialCounter()).serials
        self._temporaries_lock = threading.Lock()
        """Guards `_are_temporaries_swept`."""
        self._are_temporaries_swept = False
        self._lock = threading.Lock()
        """Guards what follows."""
        self._attempt_counts: dict[tuple[int, int | None], int] = {}
        self._active_attempts: dict[str, frozenset[str]] = {}
        self._user_count = 0
        self._last_group_number = 0
        self._has_ranks = False

    # --- who uses it -------------------------------------------------------------------------------------------

    def add_user(self, *, has_ranks: bool = False) -> None:
        """One more in this process uses the lease. has_ranks: other processes write end markers in this generation."""
        with self._lock:
            self._user_count += 1
            self._has_ranks = self._has_ranks or has_ranks

    def drop_user(self) -> bool:
        """One fewer uses it. True where that was the last one, which is to `release` it."""
        with self._lock:
            self._user_count -= 1
            return self._user_count == 0

    def new_group_number(self) -> int:
        """The number of a further group that this generation serves; the first one has 0."""
        with self._lock:
            self._last_group_number += 1
            return self._last_group_number

    # --- attempts ----------------------------------------------------------------------------------------------

    def sweep_temporaries_once(self) -> None:
        """Once, before the first file is written with this lease: remove the temporary files of killed writers."""
        self._require_own_process()
        with self._temporaries_lock:
            if not self._are_temporaries_swept:
                self.repo.store.sweep_temporaries("")
                self._are_temporaries_swept = True

    def begin_attempt(self, step: int, counter: AttemptCounter) -> Attempt:
        """Begin to save a step: no sweep touches the files of the attempt until `end_attempt`."""
        self._require_own_process()
        with self._lock:
            key = step, counter.group
            number = self._attempt_counts[key] = self._attempt_counts.get(key, counter.first_number - 1) + 1
            name = f"{counter.rank}-{self.generation}-{counter.first_serial + next(self._serials)}"
            self._active_attempts[name] = frozenset()
            return Attempt(name, counter.rank, self.generation, step, number)

    def pin_packs(self, attempt: Attempt, packs: Iterable[str]) -> None:
        """The attempt may refer to these packs of earlier steps: no sweep takes them until `end_attempt`."""
        with self._lock:
            self._active_attempts[attempt.name] = frozenset(packs)

    def end_attempt(self, attempt: Attempt) -> None:
        """The attempt is committed or given up."""
        with self._lock:
            self._active_attempts.pop(attempt.name, None)

    def active_attempts(self) -> dict[str, frozenset[str]]:
        """Attempts that are under way, and the packs of earlier steps that they may refer to."""
        with self._lock:
            return dict(self._active_attempts)

    # --- whether it is still the newest ------------------------------------------------------------------------

    def require_newest(self) -> None:
        """Raise Fenced where a newer writer has taken over, StoreError where the repository has been removed."""
        self._require_own_process()
        if (error := self.lease_error()) is not None:
            raise error

    def _require_own_process(self) -> None:
        self._creator_process.require_current(
            f"the right to write to {self.repo.url}", "save from one of them, or to another URL from the child"
        )

    def explain_failure(self, error: BaseException | None) -> BaseException | None:
        """The error of a save; Fenced in its place where files were missing because a newer writer has removed them."""
        if not isinstance(error, StoreError) or isinstance(error, (Fenced, Unavailable)):
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
        """What `require_newest` raises, None where this is the newest generation."""
        newest = newest_generation(self.repo)
        if newest <= self.generation:
            if self._has_own_record():
                return None
            return StoreError(
                f"{self.repo.url}/{generation_name(self.generation)} is gone: the folder was removed or emptied while it "
                "is written to. "
                "What was saved there is lost; begin to save anew"
            )
        owner, me = lease_holder(self.repo, newest), this_process()
        if owner and (owner.pid, is_alive(owner, me)) == (me.pid, True):
            return Fenced(
                f"{self.repo.url}: this very process has begun to save there for another group too (generation {newest}, this "
                f"group has {self.generation}); save to one URL through one group"
            )
        who = f" by process {owner.pid} on {owner.host} since {owner.since}" if owner else ""
        return Fenced(
            f"{self.repo.url} was taken over{who} (generation {newest}, this process has {self.generation}); "
            "this process may not write to it any more: stop it"
        )

    def _has_own_record(self) -> bool:
        """Whether the record of this lease exists, and is not that of another which was made after all was removed."""
        name = generation_name(self.generation)
        try:
            owner = json_records.load(self.repo.store, "generation", name)["owner"]
        except NotFound:
            return False
        except (CkptError, KeyError):  # damaged, or not to be had just now
            return True
        return not isinstance(owner, dict) or owner.get("token") == self.token

    def release(self) -> bool:
        """Let others write. The record stays, marked as released, so that its number is never used again.

        False where the store can't be reached, so that others do not see it.
        """
        if not self._creator_process.is_current:
            return True
        name = generation_name(self.generation)
        try:
            if not self._has_own_record():  # the repository was removed, and is not to be begun again
                return True
            with self._temporaries_lock:  # a copy under way would take this record's temporary file for one of a killed writer
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
    """Become the writer of a repository; raise RepositoryBusy where a live process is."""
    process = this_process()
    generation = _take_generation(repo, serials.highest_generation if serials else 0, process)
    lease = WriterLease(repo, generation, process.token, serials)
    try:
        require_conditional_puts(repo.store, generation_name(lease.generation))
    except BaseException:
        lease.release()
        raise
    return lease


def _take_generation(repo: Repository, above_generation: int, process: ProcessIdentity) -> int:
    for _ in range(20):
        current = newest_generation(repo)
        newest = max(current, above_generation)
        owner = lease_holder(repo, current) if current else None
        if owner is not None and owner.pid != process.pid:
            lives = is_alive(owner, process)
            if lives:
                raise RepositoryBusy(
                    f"{repo.url} is being written by process {owner.pid} on {owner.host} since {owner.since}; "
                    "wait for it, stop it, or save to another URL"
                )
            if lives is None:
                log.warning(
                    "taking %s over from process %d on %s: it can't be seen from here, and may not commit any more",
                    repo.url, owner.pid, owner.host,
                )  # fmt: skip
        failpoint("claim")
        try:
            repo.store.put_new(generation_name(newest + 1), json_records.encode("generation", {"owner": asdict(process)}))
        except (AlreadyExists, NotFound):  # not found: the winner has swept this one's temporary file
            continue
        if newest_generation(repo) == newest + 1:  # else this was an old listing, and others have moved on
            return newest + 1
    raise RepositoryBusy(f"{repo.url}: many processes start to write at once; let one of them")
