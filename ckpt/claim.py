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

from ckpt import records
from ckpt.making_process import MakingProcess
from ckpt.process_identity import Owner, alive, is_dead, this_process
from ckpt.repository import Repository
from ckpt.storage.decode import decode
from ckpt.storage.errors import (
    AlreadyExists,
    CkptError,
    Fenced,
    NotFound,
    RanksMissing,
    RepositoryBusy,
    StoreError,
    Unavailable,
)
from ckpt.storage.failpoints import failpoint
from ckpt.storage.fencing_probe import require_conditional_puts

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


class Series:
    """Numbers that the claims of several repositories share: what is copied from one to the other keeps its name, which no
    other file of any of them may have had."""

    def __init__(self, repos: Sequence[Repository] = ()) -> None:
        self._repos = repos
        self.serials = itertools.count()

    @functools.cached_property
    def above(self) -> int:
        """No generation of any of them is higher."""
        return max((max(_generations(repo), default=0) for repo in self._repos), default=0)


_APART = 10**9
"""Between the numbers of groups that share a claim: none makes so many attempts."""


class Claim:
    """The right to write to a repository, until `release`. Rank 0 of a group holds it, for all of them.

    lane: which of the groups that this generation serves. A rank may be another process in each of them, so their attempts
        are told apart by number.
    """

    def __init__(
        self, repo: Repository, generation: int, rank: int = 0, size: int = 1, series: Series | None = None, lane: int = 0,
        token: str = "",
    ) -> None:  # fmt: skip
        self.repo = repo
        self.generation = generation
        self.token = token
        """Of the owner in the record: by it this claim is told from that of a repository which was begun anew at this URL."""
        self.rank = rank
        self.size = size
        self.lane = lane
        self.in_series = series is not None
        """Whether claims of other repositories count on with the same numbers."""
        self.publishing = threading.Lock()
        """Held while a commit record is put: of two saves of one step, one waits for what comes of the other."""
        self.sweeping = threading.Lock()
        """Held to say which packs an attempt refers to, and by a sweep."""
        self._cleaning = threading.Lock()
        self._is_clean = False
        self._serials = (series or Series()).serials
        self._beside: list[int] = []  # the sizes of the groups beside the first
        self._made_by = MakingProcess()
        self.ranks: Sequence[Owner] = ()
        """The processes of the group, by rank, where they are known."""
        self._tries: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()
        self.moves = 0
        """Grows as long as the saves with this claim make progress. Two threads may count one step: only its growth matters."""
        self._active: dict[str, frozenset[str]] = {}

    def clean(self) -> None:
        """Once, before the first file is written with this claim: remove the temporary files of killed writers."""
        self._require_own()
        with self._cleaning:
            if not self._is_clean:
                self.repo.store.sweep_temporaries("")
                self._is_clean = True

    def beside(self, size: int) -> Claim:
        """The same right, for another group of which this process is rank 0. Attempts of one are known to all."""
        self.clean()
        other = copy.copy(self)
        self._beside.append(size)
        other.size, other.lane = size, len(self._beside)
        return other

    def is_shared_with(self, other: Claim) -> bool:
        """Whether these are one right to write."""
        return self._active is other._active

    def begin(self, step: int, size: int = 1) -> Attempt:
        """Begin to save a step by a group of `size`: no sweep touches the files of the attempt until `end`."""
        self._require_own()
        with self._lock:
            key = step, self.lane if size > 1 else -1  # apart: rank 0 may save for itself as well
            number = self._tries[key] = self._tries.get(key, self.lane * _APART - 1) + 1
            apart = self.lane * _APART if self.rank else 0  # rank 0 counts for all of them, so that its numbers grow
            name = f"{self.rank}-{self.generation}-{apart + next(self._serials)}"
            self._active[name] = frozenset()
            return Attempt(name, self.rank, self.generation, step, number)

    def refer(self, attempt: Attempt, packs: Iterable[str]) -> None:
        """The attempt may refer to these packs of earlier steps: no sweep takes them until `end`."""
        with self._lock:
            self._active[attempt.name] = frozenset(packs)

    def end(self, attempt: Attempt) -> None:
        """The attempt is committed or given up."""
        with self._lock:
            self._active.pop(attempt.name, None)

    def active(self) -> dict[str, frozenset[str]]:
        """Attempts that are under way, and the packs of earlier steps that they may refer to."""
        with self._lock:
            return dict(self._active)

    def check(self) -> None:
        """Raise Fenced where a newer writer has taken over, StoreError where the repository has been removed."""
        self._require_own()
        if (over := self.over()) is not None:
            raise over

    def _require_own(self) -> None:
        self._made_by.require(
            f"the right to write to {self.repo.url}", "save from one of them, or to another URL from the child"
        )

    def why_failed(self, error: BaseException | None) -> BaseException | None:
        """The error of a save; Fenced in its place where files were missing because a newer writer has removed them."""
        if not isinstance(error, StoreError) or isinstance(error, (Fenced, Unavailable)):
            return error
        try:
            over = self.over()
        except StoreError:
            return error
        if not isinstance(over, Fenced):
            return error
        over.__cause__ = error
        return over

    def over(self) -> Fenced | StoreError | None:
        """What `check` raises, None where this is the newest generation."""
        newest = max(_generations(self.repo), default=0)
        if newest <= self.generation:
            if self._is_there():
                return None
            return StoreError(
                f"{self.repo.url}/{_name(self.generation)} is gone: the folder was removed or emptied while it is written to. "
                "What was saved there is lost; begin to save anew"
            )
        owner, me = _owner(self.repo, newest), this_process()
        if owner and (owner.pid, alive(owner, me)) == (me.pid, True):
            return Fenced(
                f"{self.repo.url}: this very process has begun to save there for another group too (generation {newest}, this "
                f"group has {self.generation}); save to one URL through one group"
            )
        who = f" by process {owner.pid} on {owner.host} since {owner.since}" if owner else ""
        return Fenced(
            f"{self.repo.url} was taken over{who} (generation {newest}, this process has {self.generation}); "
            "this process may not write to it any more: stop it"
        )

    def _is_there(self) -> bool:
        """Whether the record of this claim is there, and not that of another which was made after all was removed."""
        name = _name(self.generation)
        try:
            owner = records.load(self.repo.store, "generation", name)["owner"]
        except NotFound:
            return False
        except (CkptError, KeyError):  # damaged, or not to be had just now
            return True
        return not isinstance(owner, dict) or owner.get("token") == self.token

    def lost(self) -> RanksMissing | None:
        """What tells a rank that rank 0, which holds the claim, is dead; None where it lives or can't be seen from here."""
        name = _name(self.generation)
        try:
            body = records.load(self.repo.store, "generation", name)
            if body["owner"] is None:
                return RanksMissing(f"rank 0 of {self.size} has ended its saves: no step can be committed any more")
            owner = decode(Owner, body["owner"])
        except (CkptError, KeyError, ValueError):
            return None
        if not is_dead(owner, this_process()):
            return None
        return RanksMissing(f"rank 0 of {self.size} (process {owner.pid} on {owner.host}) is dead: no step can be committed")

    def release(self) -> bool:
        """Let others write. The record stays, marked as released, so that its number is never used again.

        False where the store can't be reached, so that others do not see it.
        """
        if not self._made_by.is_this:
            return True
        if self.rank:
            return self._leave()
        name = _name(self.generation)
        try:
            if not self._is_there():  # the repository was removed, and is not to be begun again
                return True
            with self._cleaning:  # a copy under way would take this record's temporary file for one of a killed writer
                self._is_clean = True
                self.repo.store.put(name, records.encode("generation", {"owner": None}))
            if self.size > 1 or self._beside:
                self.repo.store.delete([word.name for word in _words(_names(self.repo)) if word.generation == self.generation])
        except CkptError as error:
            log.warning("%s could not be released: %s", name, error)
            return False
        return True

    def _leave(self) -> bool:
        """Say that this rank brings nothing more, where that is not plain. Whether that could be done."""
        store, name = self.repo.store, _name(self.generation)
        try:
            if records.load(store, "generation", name)["owner"] is not None:
                store.put(_Word(self.generation, self.lane, self.rank).name, records.encode("left", {}))
        except (CkptError, KeyError) as error:
            log.info("%s: that rank %d has ended its saves can't be recorded there: %s", self.repo.url, self.rank, error)
            return False
        return True

    def left(self) -> set[int]:
        """The ranks of this group that have ended their saves, or are dead: what is not there of them now never comes."""
        ours, me = (self.generation, self.lane), this_process()
        said = {word.rank for word in _words(_names(self.repo)) if (word.generation, word.lane) == ours}
        return said | {rank for rank, owner in enumerate(self.ranks) if is_dead(owner, me)}


def claim(repo: Repository, size: int = 1, series: Series | None = None) -> Claim:
    """Become the writer of a repository, for a group of `size`; raise RepositoryBusy where a live process is."""
    me = this_process()
    mine = Claim(repo, _take(repo, series.above if series else 0, me), 0, size, series, token=me.token)
    try:
        require_conditional_puts(repo.store, _name(mine.generation))
    except BaseException:
        mine.release()
        raise
    return mine


def _take(repo: Repository, above: int, me: Owner) -> int:
    for _ in range(20):
        held = max(_generations(repo), default=0)
        newest = max(held, above)
        owner = _owner(repo, held) if held else None
        if owner is not None and owner.pid != me.pid:
            lives = alive(owner, me)
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
            repo.store.put_new(_name(newest + 1), records.encode("generation", {"owner": asdict(me)}))
        except (AlreadyExists, NotFound):  # not found: the winner has swept this one's temporary file
            continue
        if max(_generations(repo)) == newest + 1:  # else this was an old listing, and others have moved on
            return newest + 1
    raise RepositoryBusy(f"{repo.url}: many processes start to write at once; let one of them")


def _name(generation: int) -> str:
    return f"generations/{generation:08d}.json"


def _names(repo: Repository) -> list[str]:
    return [entry.name for entry in repo.store.list("generations")]


def _generations(repo: Repository) -> list[int]:
    return _numbers(_names(repo))


def _numbers(names: Iterable[str]) -> list[int]:
    found = (name.removeprefix("generations/").removesuffix(".json") for name in names)
    return [int(n) for n in found if n.isdigit()]


class _Word(NamedTuple):
    """Says that a rank has ended its saves."""

    generation: int
    lane: int
    rank: int

    @property
    def name(self) -> str:
        return f"generations/{self.generation:08d}-left-{self.lane}-{self.rank}.json"


def _words(names: Iterable[str]) -> list[_Word]:
    found = (re.fullmatch(r"generations/(\d+)-left-(\d+)-(\d+)\.json", name) for name in names)
    return [_Word(*map(int, word.groups())) for word in found if word]


def old_generations(repo: Repository) -> list[str]:
    """Records that nobody needs any more: all but those of the newest."""
    names = _names(repo)
    *old, newest = sorted(_numbers(names)) or [0]
    return [*map(_name, old), *(word.name for word in _words(names) if word.generation < newest)]


def _owner(repo: Repository, generation: int) -> Owner | None:
    """Who holds a generation, None where it was released or its record does not say."""
    try:
        body = records.load(repo.store, "generation", _name(generation))
        return decode(Owner, body["owner"]) if body["owner"] else None
    except NotFound:
        return None
    except (KeyError, ValueError, CkptError) as error:
        log.warning("%s: the claim of generation %d is not readable: %s", repo.url, generation, error)
        return None
