"""How ranks meet at a store when they have no network: small objects, each put whole, and patience.

    meet/<job>-<size>-<token>/open             rank 0 is here; the token is random
                             /hello-<r>-<token>  rank r is here too; each process draws a token of its own
                             /members.json     rank 0 has heard all, and names one token for each rank
                             /<k>-<r>          what rank r brings to gather k
                             /<k>-all          all of it, put together by rank 0: n reads and not n², and one name to poll
                             /bye-<r>          rank r needs nothing of this any more
                             /gone-<r>         rank r was here, and has waited long enough

Rank r says hello in every open meeting of its job and takes the first whose members name its token. So one that a killed
incarnation left is never taken for the present one, for its rank 0 answers no more, and who comes early simply waits.
"""

from __future__ import annotations

import calendar
import json
import logging
import math
import secrets
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ckpt.groups.base import Group, late, ranks_text
from ckpt.groups.hello import Hello, decoded, hello
from ckpt.groups.meeting_notes import MeetingNotes
from ckpt.process_identity import alive
from ckpt.storage.base import Store
from ckpt.storage.decode import Malformed, read_json
from ckpt.storage.errors import CkptError, GroupError, IntegrityError, NotFound
from ckpt.storage.threads import Threads

log = logging.getLogger("ckpt")

PLACE = "meet"
_WORD_BYTES = 4 << 20
"""The longest object of a meeting that no gather brings: the tokens of two hundred thousand ranks."""
_GATHER_BYTES = 1 << 30
"""The longest that a rank brings to a gather: where each of ten million arrays lies that it needs."""
_FAREWELL_SECONDS = 2.0
"""How long rank 0 waits at the end to clean up. Short, for it may be leaving because another rank has died."""
_STALE_SECONDS = 86400.0
_UNSURE_SECONDS = 1.0
"""After so long without a meeting a rank looks whether it could write to the store at all."""
_LONG_SECONDS = 15.0
"""After so long a rank says for whom it waits."""
_SETTLE_SECONDS = 2.0
"""How long rank 0 looks whether a rank comes once more, where the job has no name and another process has started that rank;
five times as long where that process is gone."""


@dataclass(frozen=True, slots=True)
class Job:
    """What tells the meetings of one job from those of others."""

    digest: str
    named: bool
    """Whether the launcher gave the job a name, so that another of the same digest is this one, started again."""


class Meeting:
    """Ranks that have met at a store."""

    def __init__(self, group: Group, store: Store, job: Job, timeout: float) -> None:
        self._group = group
        self._store = store
        self._job = job
        self._timeout = timeout
        self._me = hello()
        self._others: dict[int, Hello] = {}
        """Those that this rank waits for: rank 0 for all, the others for rank 0."""
        self._gathers = 0
        self._notes = MeetingNotes(group, job.digest, store.url)
        self._folder = self._open() if group.rank == 0 else self._find()

    @property
    def url(self) -> str:
        """Of the meeting place."""
        return self._store.url

    def _looks(self) -> Iterator[bool]:
        """`_waits` for the other ranks; raises GroupError where one of them noted that it can't reach the store."""
        for is_long in _waits(self._timeout):
            self._notes.raise_failure()
            yield is_long

    # --- coming together ---------------------------------------------------------------------------------------

    def _open(self) -> str:
        """Rank 0: open a meeting and wait for the others."""
        token = secrets.token_hex(8)
        folder = f"{PLACE}/{self._job.digest}-{self._group.size}-{token}"
        _put(self._store, f"{folder}/open", self._me.encoded())
        came: dict[int, str] = {}
        all_came: float | None = None
        for is_long in self._looks():
            hellos = _words(self._store, folder, "hello")
            if is_long:
                self._tell([rank for rank in range(1, self._group.size) if rank not in hellos])
            if len(hellos) == self._group.size - 1:
                came, doubt = self._living(folder, hellos)
                if len(came) == len(hellos):
                    if all_came is None and doubt:
                        log.info("%r: waiting %g s for others that say to be one of its ranks: no CKPT_RUN_ID names this job",
                                 self._group, doubt)  # fmt: skip
                    all_came = all_came or time.monotonic()
                    if time.monotonic() >= all_came + doubt:
                        break
        else:
            came, _ = self._living(folder, _words(self._store, folder, "hello"))
            if len(came) < self._group.size - 1:
                gone = _words(self._store, folder, "gone")
                self._remove(folder)
                raise self._late({0, *came, *gone} if len({*came, *gone}) < self._group.size - 1 else {0, *came})
        names = [token, *(came[rank] for rank in range(1, self._group.size))]
        _put(self._store, f"{folder}/members.json", json.dumps(names).encode())
        self._clean(folder)
        return folder

    def _find(self) -> str:
        """Another rank: say hello in every meeting of the job until one answers."""
        rank, token = self._group.rank, secrets.token_hex(8)
        mine = f"{self._job.digest}-{self._group.size}-"
        greeted: set[str] = set()
        begun: set[str] = set()  # without this process
        unsure: float | None = time.monotonic() + _UNSURE_SECONDS
        for is_long in self._looks():
            if is_long:
                self._tell([] if greeted else [0])
            if unsure is not None and not greeted and time.monotonic() > unsure:
                unsure = None
                self._try(token)
            folders = {f"{PLACE}/{name}" for name in self._store.list_folders(PLACE) if name.startswith(mine)}
            for folder in folders - begun:
                members = _tokens(_get(self._store, f"{folder}/members.json"), self._group.size)
                if folder not in greeted:
                    if members is not None:
                        begun.add(folder)
                        continue
                    with suppress(NotFound):  # swept, as in _put, or the meeting is over: then not made anew by a hello
                        self._store.put(f"{folder}/hello-{rank}-{token}", self._me.encoded())
                        greeted.add(folder)
                elif members is not None and members[rank] == token:
                    self._withdraw(greeted - {folder}, token)
                    if (opener := decoded(_get(self._store, f"{folder}/open"))) is not None:
                        self._others[0] = opener
                    return folder
        # Where one is still open it is the others that are missing; if all are there, rank 0 answers no more.
        heard = [{0, rank, *_words(self._store, folder, "hello"), *_words(self._store, folder, "gone")} for folder in greeted]
        others = set(range(1, self._group.size))
        came = max(heard, key=len, default=others)
        for folder in greeted:  # who waits longer is not to blame this rank
            with suppress(CkptError):
                if self._store.exists(f"{folder}/open"):
                    self._store.put(f"{folder}/gone-{rank}", b"")
        self._withdraw(greeted, token)
        raise self._late(others if came > others else came)

    def _tell(self, missing: Sequence[int]) -> None:
        """Say who has not come by now, and what may be the reason."""
        here = self._store.list_folders(PLACE)
        others = [name for name in here if not name.startswith((f"{self._job.digest}-", "try-"))]
        perhaps = (
            "; ranks with another CKPT_RUN_ID, MASTER_ADDR or MASTER_PORT are or were here too: all of a job need the same"
        )
        log.warning(
            "%r: waiting for %s at %s, for %g s at most%s", self._group, ranks_text(missing) if missing else "the others",
            self._store.url, self._timeout, perhaps if others else "",
        )  # fmt: skip

    def _try(self, token: str) -> None:
        """Raise where this rank could not say hello, and rank 0 perhaps not open a meeting."""
        name = f"{PLACE}/try-{token}/try"
        _put(self._store, name, b"")
        self._store.delete([name])

    def _withdraw(self, folders: Collection[str], token: str) -> None:
        """Take the hellos back: nobody is to count on a process that does not come."""
        self._store.delete([f"{folder}/hello-{self._group.rank}-{token}" for folder in folders])

    def _living(self, folder: str, hellos: dict[int, list[str]]) -> tuple[dict[int, str], float]:
        """The token of each rank whose process may live: one that died since, and was started again, said hello too.

        Also how many seconds to look for others, where one of them may be of another job.
        """
        me, doubt = self._me, 0.0
        names = [f"{folder}/hello-{rank}-{token}" for rank, tokens in hellos.items() for token in tokens]
        said = iter(_get_all(self._store, names, _WORD_BYTES))
        living: dict[int, str] = {}
        for rank, tokens in hellos.items():
            came = [(token, decoded(next(said))) for token in tokens]
            here = [(token, one) for token, one in came if one is not None and one.lives(me)]
            if not self._job.named:
                here = [it for it in here if not it[1].is_left_over(me)] or here
                ours = [it for it in here if it[1].is_of(me)]
                here = ours if len(ours) == 1 else here
                for _, one in here:
                    left_over = one.is_left_over(me)
                    doubt = max(doubt, _SETTLE_SECONDS * (5 if left_over else 1 if one.is_of(me) is False else 0))
            if len(here) > 1:
                self._remove(folder)
                who = " and ".join(f"process {one.owner.pid} on {one.owner.host}" for _, one in here)
                raise GroupError(
                    f"{self._group!r}: {who} both say that they are rank {rank}: end what is left of an earlier start, "
                    f"and give jobs that use {self._store.url} at the same time a CKPT_RUN_ID each"
                )
            living.update((rank, token) for token, _ in here)
            self._others.update((rank, one) for _, one in here)
        return living, doubt

    def _late(self, came: Collection[int], doing: str = "meet") -> GroupError:
        missing = [rank for rank in range(self._group.size) if rank not in came]
        return late(self._group, missing, f"{doing} at {self._store.url}", self._timeout)

    # --- together ----------------------------------------------------------------------------------------------

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, by rank."""
        number = self._gathers
        self._gathers += 1
        mine = f"{self._folder}/{number}-{self._group.rank}"
        _put(self._store, mine, data)
        if self._group.rank:
            together = self._await(number)
            self._store.delete([mine])  # rank 0 has read it
        else:
            together = self._collect(number)
            _put(self._store, f"{self._folder}/{number}-all", together)
            # All have come to this gather, and each does so only when it has read the one before.
            self._store.delete([mine, f"{self._folder}/{number - 1}-all"])
        return _split(together)

    def _collect(self, number: int) -> bytes:
        """Rank 0: what all have brought, once they have."""
        names = [f"{self._folder}/{number}-{rank}" for rank in range(self._group.size)]
        dead: GroupError | None = None
        for _ in self._looks():
            here = {entry.name for entry in self._store.list(self._folder)}
            if here.issuperset(names):
                brought = [data for data in _get_all(self._store, names, _GATHER_BYTES) if data is not None]
                if len(brought) == self._group.size:  # else the store lists what it can't yet read
                    return _join(brought)
            elif dead is not None:
                raise dead
            dead = self._dead(rank for rank in range(self._group.size) if names[rank] not in here)
        raise self._absent(number)

    def _await(self, number: int) -> bytes:
        """Another rank: the same, from rank 0."""
        dead: GroupError | None = None
        for _ in self._looks():
            together = _get(self._store, f"{self._folder}/{number}-all", self._group.size * _GATHER_BYTES)
            if together is not None:
                return together
            if dead is not None:
                raise dead
            dead = self._dead([0])
        raise self._absent(number)

    def _dead(self, ranks: Iterable[int]) -> GroupError | None:
        """What to raise where one of these ranks, which was not heard, is dead: once it was looked for again."""
        for rank in ranks:
            other = self._others.get(rank)
            if other is not None and not other.lives(self._me):
                return GroupError(
                    f"{self._group!r}: rank {rank} (process {other.owner.pid} on {other.owner.host}) is dead; look at its log, "
                    "and restart the job"
                )
        return None

    def _absent(self, number: int) -> GroupError:
        here = {entry.name for entry in self._store.list(self._folder)}
        came = {rank for rank in range(self._group.size) if f"{self._folder}/{number}-{rank}" in here}
        return self._late(came if len(came) < self._group.size else came - {0}, "a gather")

    # --- and apart ---------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Rank 0 removes the meeting once nobody needs it; where a rank does not say so, the next meeting does."""
        if self._group.rank:
            if self._store.exists(f"{self._folder}/open"):  # else it is over, and a word would be left behind
                # Not twice, as other puts: it may have been seen already, and everything removed.
                self._store.put(f"{self._folder}/bye-{self._group.rank}", b"")
            return
        for _ in _waits(_FAREWELL_SECONDS):
            left = {entry.name for entry in self._store.list(self._folder)}
            if all(f"{self._folder}/bye-{rank}" in left for rank in range(1, self._group.size)):
                self._remove(self._folder)
                return

    def _remove(self, folder: str) -> None:
        self._store.delete([entry.name for entry in self._store.list(folder)])

    def _clean(self, mine: str) -> None:
        """Remove meetings whose rank 0 has died: nobody will ever need them."""
        for name in list(self._store.list_folders(PLACE)):
            folder = f"{PLACE}/{name}"
            if folder == mine:
                continue
            said = _get(self._store, f"{folder}/open")
            opener = decoded(said)
            if said is not None and opener is None:  # damaged, or of a newer version: its ranks may be in a gather
                log.info("%s/%s/open can't be read, so the meeting is left alone", self._store.url, folder)
                continue
            same_job = self._job.named and name.startswith(f"{self._job.digest}-")
            if opener is None or _is_over(opener, self._me, same_job):
                log.debug("removing %s of %s, which nobody needs", folder, self._store.url)
                self._remove(folder)


def _is_over(opener: Hello, me: Hello, same_job: bool) -> bool:
    """Whether nobody needs the meeting of this rank 0 any more. One of another job that lives may be in a gather."""
    lives = alive(opener.owner, me.owner)
    if lives is None:  # on another host
        return same_job or _age(opener.owner.since) > _STALE_SECONDS
    return not lives


def _age(since: str) -> float:
    return time.time() - calendar.timegm(time.strptime(since, "%Y-%m-%dT%H:%M:%SZ"))


def _words(store: Store, folder: str, word: str) -> dict[int, list[str]]:
    """The ranks that have left such a word, each with the tokens that it gave."""
    found: dict[int, list[str]] = {}
    for entry in store.list(folder):
        kind, *rest = entry.name.rpartition("/")[2].split("-")
        if kind == word:
            found.setdefault(int(rest[0]), []).extend(rest[1:])
    return found


def _join(parts: Sequence[bytes]) -> bytes:
    """Parts of any length as one object."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def _split(together: bytes) -> list[bytes]:
    """The counterpart of `_join`."""
    parts, position = [], 0
    while position < len(together):
        begin = position + 8
        position = begin + int.from_bytes(together[position:begin], "little")
        parts.append(together[begin:position])
    return parts


def _get_all(store: Store, names: Sequence[str], limit: int) -> list[bytes | None]:
    """Many small objects, by several threads: of a thousand ranks in a bucket they take seconds each otherwise."""
    with Threads(min(16, len(names) or 1), "ckpt-meeting") as pool:
        return list(pool.map(lambda name: _get(store, name, limit), names))


def _get(store: Store, name: str, limit: int = _WORD_BYTES) -> bytes | None:
    """An object; None where there is none. A word that is too long says nothing; what a rank brings must not be too long."""
    try:
        return store.get_up_to(name, limit)
    except NotFound:
        return None
    except IntegrityError as error:
        if limit > _WORD_BYTES:
            raise GroupError(f"what the ranks have brought can't be read: {error}") from error
        log.warning("%s", error)
        return b""


def _tokens(data: bytes | None, size: int) -> list[Any] | None:
    """Those of the members of a meeting, by rank; None where there are none yet."""
    if data is None:
        return None
    try:
        found = read_json(data)
    except Malformed:
        found = None
    return found if isinstance(found, list) and len(found) == size else [None] * size


def _put(store: Store, name: str, data: bytes) -> None:
    """Put an object. What is not found is our temporary file, which the rank that prepares the repository took for a
    killed writer's, or the folder, which became empty just now: then once more."""
    for _ in range(20):
        try:
            store.put(name, data)
            return
        except NotFound:
            continue
    store.put(name, data)


def _waits(seconds: float) -> Iterator[bool]:
    """Look now, then ever more rarely, and a last time when the time is over. True is given once, when that has lasted long."""
    until = time.monotonic() + seconds
    pause, long = 0.002, time.monotonic() + _LONG_SECONDS
    while True:
        is_long = time.monotonic() >= long
        long = math.inf if is_long else long
        yield is_long
        left = until - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(pause, left))
        pause = min(1.5 * pause, 0.25)
