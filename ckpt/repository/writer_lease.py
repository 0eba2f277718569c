"""Who may write to a repository. Each writer takes a generation; a higher one fences off the lower ones.

A claim is `generations/<n>.json`, made by put-if-absent, so that two at once cannot hold the same number. The owner is
named in it by host, boot, process-id namespace, process and start time: a second writer on the same host is refused as
long as that process lives, and takes over at once when it is dead, so that a restart never waits. On another host the
owner's life cannot be told; the newcomer takes over, and the earlier writer is told when it next commits.

In a group rank 0 holds the claim. Another rank that ends its saves while rank 0 has not leaves a word,
`generations/<n>-left-…`, so that nobody waits for it.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from ckpt.errors import Fenced, RanksMissing, RepositoryBusy
from ckpt.format import json_records
from ckpt.groups.process_identity import ProcessIdentity, is_alive, is_dead, this_process
from ckpt.repository.repository import Repository
from ckpt.storage.base.checked_decode import decode
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
    """Numbers that the claims of several repositories share: what is copied from one to the other keeps its name, which no
    other file of any of them may have had."""

    def __init__(self, repos: Sequence[Repository] = ()) -> None:
        self._repos = repos
        self.serials = itertools.count()

    @functools.cached_property
    def highest_generation(self) -> int:
        """No generation of any of them is higher."""
        return max((max(_list_generations(repo), default=0) for repo in self._repos), default=0)


_SERIALS_PER_GROUP = 10**9
"""Between the numbers of groups that share a claim: none makes so many attempts."""


class WriterLease:
    """The right to write to a repository, until `release`. Rank 0 of a group holds it, for all of them.

    lane: which of the groups that this generation serves. A rank may be another process in each of them, so their attempts
        are told apart by number.
    """

    def __init__(
        self,
        repo: Repository,
        generation: int,
        rank: int = 0,
        size: int = 1,
        serials: SerialCounter | None = None,
        group_number: int = 0,
        token: str = "",
    ) -> None:
        self.repo = repo
        self.generation = generation
        self.token = token
        """Of the owner in the record: by it this claim is told from that of a repository which was begun anew at this URL."""
        self.rank = rank
        self.size = size
        self.group_number = group_number
        self.has_shared_serials = serials is not None
        """Whether claims of other repositories count on with the same numbers."""
        self.publish_lock = threading.Lock()
        """Held while a commit record is put: of two saves of one step, one waits for what comes of the other."""
        self.sweep_lock = threading.Lock()
        """Held to say which packs an attempt refers to, and by a sweep."""
        self._temporaries_lock = threading.Lock()
        self._are_temporaries_swept = False
        self._serials = (serials or SerialCounter()).serials
        self._other_group_sizes: list[int] = []  # the sizes of the groups beside the first
        self._creator_process = CreatorProcess()
        self.rank_processes: Sequence[ProcessIdentity] = ()
        """The processes of the group, by rank, where they are known."""
        self._attempt_counts: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()
        self.progress_count = 0
        """Grows as long as the saves with this claim make progress. Two threads may count one step: only its growth matters."""
        self._active_attempts: dict[str, frozenset[str]] = {}

    def sweep_temporaries_once(self) -> None:
        """Once, before the first file is written with this claim: remove the temporary files of killed writers."""
        self._require_own_process()
        with self._temporaries_lock:
            if not self._are_temporaries_swept:
                self.repo.store.sweep_temporaries("")
                self._are_temporaries_swept = True

    def lease_for_group(self, size: int) -> WriterLease:
        """The same right, for another group of which this process is rank 0. Attempts of one are known to all."""
        self.sweep_temporaries_once()
        other = copy.copy(self)
        self._other_group_sizes.append(size)
        other.size, other.group_number = size, len(self._other_group_sizes)
        return other

    def is_same_lease(self, other: WriterLease) -> bool:
        """Whether these are one right to write."""
        return self._active_attempts is other._active_attempts

    def begin_attempt(self, step: int, size: int = 1) -> Attempt:
        """Begin to save a step by a group of `size`: no sweep touches the files of the attempt until `end`."""
        self._require_own_process()
        with self._lock:
            key = step, self.group_number if size > 1 else -1  # apart: rank 0 may save for itself as well
            number = self._attempt_counts[key] = self._attempt_counts.get(key, self.group_number * _SERIALS_PER_GROUP - 1) + 1
            first_serial = (
                self.group_number * _SERIALS_PER_GROUP if self.rank else 0
            )  # rank 0 counts for all of them, so that its numbers grow
            name = f"{self.rank}-{self.generation}-{first_serial + next(self._serials)}"
            self._active_attempts[name] = frozenset()
            return Attempt(name, self.rank, self.generation, step, number)

    def pin_packs(self, attempt: Attempt, packs: Iterable[str]) -> None:
        """The attempt may refer to these packs of earlier steps: no sweep takes them until `end`."""
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
        """What `check` raises, None where this is the newest generation."""
        newest = max(_list_generations(self.repo), default=0)
        if newest <= self.generation:
            if self._has_own_record():
                return None
            return StoreError(
                f"{self.repo.url}/{_generation_name(self.generation)} is gone: the folder was removed or emptied while it "
                "is written to. "
                "What was saved there is lost; begin to save anew"
            )
        owner, me = _lease_holder(self.repo, newest), this_process()
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
        """Whether the record of this claim is there, and not that of another which was made after all was removed."""
        name = _generation_name(self.generation)
        try:
            owner = json_records.load(self.repo.store, "generation", name)["owner"]
        except NotFound:
            return False
        except (CkptError, KeyError):  # damaged, or not to be had just now
            return True
        return not isinstance(owner, dict) or owner.get("token") == self.token

    def rank_0_error(self) -> RanksMissing | None:
        """What tells a rank that rank 0, which holds the claim, is dead; None where it lives or can't be seen from here."""
        name = _generation_name(self.generation)
        try:
            body = json_records.load(self.repo.store, "generation", name)
            if body["owner"] is None:
                return RanksMissing(f"rank 0 of {self.size} has ended its saves: no step can be committed any more")
            owner = decode(ProcessIdentity, body["owner"])
        except (CkptError, KeyError, ValueError):
            return None
        if not is_dead(owner, this_process()):
            return None
        return RanksMissing(f"rank 0 of {self.size} (process {owner.pid} on {owner.host}) is dead: no step can be committed")

    def release(self) -> bool:
        """Let others write. The record stays, marked as released, so that its number is never used again.

        False where the store can't be reached, so that others do not see it.
        """
        if not self._creator_process.is_current:
            return True
        if self.rank:
            return self._write_end_marker()
        name = _generation_name(self.generation)
        try:
            if not self._has_own_record():  # the repository was removed, and is not to be begun again
                return True
            with self._temporaries_lock:  # a copy under way would take this record's temporary file for one of a killed writer
                self._are_temporaries_swept = True
                self.repo.store.put(name, json_records.encode("generation", {"owner": None}))
            if self.size > 1 or self._other_group_sizes:
                self.repo.store.delete(
                    [word.name for word in _end_markers(_list_names(self.repo)) if word.generation == self.generation]
                )
        except CkptError as error:
            log.warning("%s could not be released: %s", name, error)
            return False
        return True

    def _write_end_marker(self) -> bool:
        """Say that this rank brings nothing more, where that is not plain. Whether that could be done."""
        store, name = self.repo.store, _generation_name(self.generation)
        try:
            if json_records.load(store, "generation", name)["owner"] is not None:
                store.put(_EndMarker(self.generation, self.group_number, self.rank).name, json_records.encode("left", {}))
        except (CkptError, KeyError) as error:
            log.info("%s: that rank %d has ended its saves can't be recorded there: %s", self.repo.url, self.rank, error)
            return False
        return True

    def ended_ranks(self) -> set[int]:
        """The ranks of this group that have ended their saves, or are dead: what is not there of them now never comes."""
        this_group, me = (self.generation, self.group_number), this_process()
        marked = {
            word.rank for word in _end_markers(_list_names(self.repo)) if (word.generation, word.group_number) == this_group
        }
        return marked | {rank for rank, owner in enumerate(self.rank_processes) if is_dead(owner, me)}


def acquire_lease(repo: Repository, size: int = 1, serials: SerialCounter | None = None) -> WriterLease:
    """Become the writer of a repository, for a group of `size`; raise RepositoryBusy where a live process is."""
    process = this_process()
    lease = WriterLease(
        repo,
        _take_generation(repo, serials.highest_generation if serials else 0, process),
        0,
        size,
        serials,
        token=process.token,
    )
    try:
        require_conditional_puts(repo.store, _generation_name(lease.generation))
    except BaseException:
        lease.release()
        raise
    return lease


def _take_generation(repo: Repository, above_generation: int, process: ProcessIdentity) -> int:
    for _ in range(20):
        current = max(_list_generations(repo), default=0)
        newest = max(current, above_generation)
        owner = _lease_holder(repo, current) if current else None
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
            repo.store.put_new(_generation_name(newest + 1), json_records.encode("generation", {"owner": asdict(process)}))
        except (AlreadyExists, NotFound):  # not found: the winner has swept this one's temporary file
            continue
        if max(_list_generations(repo)) == newest + 1:  # else this was an old listing, and others have moved on
            return newest + 1
    raise RepositoryBusy(f"{repo.url}: many processes start to write at once; let one of them")


def _generation_name(generation: int) -> str:
    return f"generations/{generation:08d}.json"


def _list_names(repo: Repository) -> list[str]:
    return [entry.name for entry in repo.store.list("generations")]


def _list_generations(repo: Repository) -> list[int]:
    return _generation_numbers(_list_names(repo))


def _generation_numbers(names: Iterable[str]) -> list[int]:
    found = (name.removeprefix("generations/").removesuffix(".json") for name in names)
    return [int(n) for n in found if n.isdigit()]


class _EndMarker(NamedTuple):
    """Says that a rank has ended its saves."""

    generation: int
    group_number: int
    rank: int

    @property
    def name(self) -> str:
        return f"generations/{self.generation:08d}-left-{self.group_number}-{self.rank}.json"


def _end_markers(names: Iterable[str]) -> list[_EndMarker]:
    found = (re.fullmatch(r"generations/(\d+)-left-(\d+)-(\d+)\.json", name) for name in names)
    return [_EndMarker(*map(int, word.groups())) for word in found if word]


def obsolete_lease_records(repo: Repository) -> list[str]:
    """Records that nobody needs any more: all but those of the newest."""
    names = _list_names(repo)
    *old, newest = sorted(_generation_numbers(names)) or [0]
    return [*map(_generation_name, old), *(word.name for word in _end_markers(names) if word.generation < newest)]


def _lease_holder(repo: Repository, generation: int) -> ProcessIdentity | None:
    """Who holds a generation, None where it was released or its record does not say."""
    try:
        body = json_records.load(repo.store, "generation", _generation_name(generation))
        return decode(ProcessIdentity, body["owner"]) if body["owner"] else None
    except NotFound:
        return None
    except (KeyError, ValueError, CkptError) as error:
        log.warning("%s: the claim of generation %d is not readable: %s", repo.url, generation, error)
        return None
