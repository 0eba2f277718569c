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

from ckpt.errors import GroupError
from ckpt.groups.base import Group, ranks_text, timeout_error
from ckpt.groups.hello import Hello, decode_hello, own_hello
from ckpt.groups.process_identity import is_alive
from ckpt.groups.rendezvous_failures import RendezvousNotes
from ckpt.storage.base.checked_decode import Malformed, read_json
from ckpt.storage.base.errors import CkptError, IntegrityError, NotFound
from ckpt.storage.base.store import Store
from ckpt.storage.base.threads import DaemonThreadPool

log = logging.getLogger("ckpt")

RENDEZVOUS_FOLDER = "meet"
_MAX_MARKER_BYTES = 4 << 20
"""The longest object of a meeting that no gather brings: the tokens of two hundred thousand ranks."""
_MAX_GATHER_BYTES = 1 << 30
"""The longest that a rank brings to a gather: where each of ten million arrays lies that it needs."""
_LEAVE_SECONDS = 2.0
"""How long rank 0 waits at the end to clean up. Short, for it may be leaving because another rank has died."""
_STALE_SECONDS = 86400.0
_WRITE_PROBE_SECONDS = 1.0
"""After so long without a meeting a rank looks whether it could write to the store at all."""
_WARN_SECONDS = 15.0
"""After so long a rank says for whom it waits."""
_SETTLE_SECONDS = 2.0
"""How long rank 0 looks whether a rank comes once more, where the job has no name and another process has started that rank;
five times as long where that process is gone."""


@dataclass(frozen=True, slots=True)
class JobId:
    """What tells the meetings of one job from those of others."""

    digest: str
    is_named: bool
    """Whether the launcher gave the job a name, so that another of the same digest is this one, started again."""


class StoreRendezvous:
    """Ranks that have met at a store."""

    def __init__(self, group: Group, store: Store, job: JobId, timeout: float) -> None:
        self._group = group
        self._store = store
        self._job_id = job
        self._timeout = timeout
        self._own_hello = own_hello()
        self._peers: dict[int, Hello] = {}
        """Those that this rank waits for: rank 0 for all, the others for rank 0."""
        self._gather_count = 0
        self._notes = RendezvousNotes(group, job.digest, store.url)
        self._folder = self._open() if group.rank == 0 else self._join_rendezvous()

    @property
    def url(self) -> str:
        """Of the meeting place."""
        return self._store.url

    def _poll_peers(self) -> Iterator[bool]:
        """`_waits` for the other ranks; raises GroupError where one of them noted that it can't reach the store."""
        for is_long in _poll_times(self._timeout):
            self._notes.raise_failure()
            yield is_long

    # --- coming together ---------------------------------------------------------------------------------------

    def _open(self) -> str:
        """Rank 0: open a meeting and wait for the others."""
        token = secrets.token_hex(8)
        folder = f"{RENDEZVOUS_FOLDER}/{self._job_id.digest}-{self._group.size}-{token}"
        _put(self._store, f"{folder}/open", self._own_hello.encode())
        tokens: dict[int, str] = {}
        complete_since: float | None = None
        for is_long in self._poll_peers():
            hellos = _list_markers(self._store, folder, "hello")
            if is_long:
                self._warn_missing([rank for rank in range(1, self._group.size) if rank not in hellos])
            if len(hellos) == self._group.size - 1:
                tokens, settle_seconds = self._live_tokens(folder, hellos)
                if len(tokens) == len(hellos):
                    if complete_since is None and settle_seconds:
                        log.info("%r: waiting %g s for others that say to be one of its ranks: no CKPT_RUN_ID names this job",
                                 self._group, settle_seconds)  # fmt: skip
                    complete_since = complete_since or time.monotonic()
                    if time.monotonic() >= complete_since + settle_seconds:
                        break
        else:
            tokens, _ = self._live_tokens(folder, _list_markers(self._store, folder, "hello"))
            if len(tokens) < self._group.size - 1:
                departed = _list_markers(self._store, folder, "gone")
                self._remove(folder)
                raise self._timeout_error(
                    {0, *tokens, *departed} if len({*tokens, *departed}) < self._group.size - 1 else {0, *tokens}
                )
        names = [token, *(tokens[rank] for rank in range(1, self._group.size))]
        _put(self._store, f"{folder}/members.json", json.dumps(names).encode())
        self._remove_stale(folder)
        return folder

    def _join_rendezvous(self) -> str:
        """Another rank: say hello in every meeting of the job until one answers."""
        rank, token = self._group.rank, secrets.token_hex(8)
        mine = f"{self._job_id.digest}-{self._group.size}-"
        greeted: set[str] = set()
        closed: set[str] = set()  # without this process
        probe_at: float | None = time.monotonic() + _WRITE_PROBE_SECONDS
        for is_long in self._poll_peers():
            if is_long:
                self._warn_missing([] if greeted else [0])
            if probe_at is not None and not greeted and time.monotonic() > probe_at:
                probe_at = None
                self._probe_write(token)
            folders = {
                f"{RENDEZVOUS_FOLDER}/{name}" for name in self._store.list_folders(RENDEZVOUS_FOLDER) if name.startswith(mine)
            }
            for folder in folders - closed:
                members = _member_tokens(_get(self._store, f"{folder}/members.json"), self._group.size)
                if folder not in greeted:
                    if members is not None:
                        closed.add(folder)
                        continue
                    with suppress(NotFound):  # swept, as in _put, or the meeting is over: then not made anew by a hello
                        self._store.put(f"{folder}/hello-{rank}-{token}", self._own_hello.encode())
                        greeted.add(folder)
                elif members is not None and members[rank] == token:
                    self._withdraw_hellos(greeted - {folder}, token)
                    if (opener := decode_hello(_get(self._store, f"{folder}/open"))) is not None:
                        self._peers[0] = opener
                    return folder
        # Where one is still open it is the others that are missing; if all are there, rank 0 answers no more.
        present_by_folder = [
            {0, rank, *_list_markers(self._store, folder, "hello"), *_list_markers(self._store, folder, "gone")}
            for folder in greeted
        ]
        others = set(range(1, self._group.size))
        present = max(present_by_folder, key=len, default=others)
        for folder in greeted:  # who waits longer is not to blame this rank
            with suppress(CkptError):
                if self._store.exists(f"{folder}/open"):
                    self._store.put(f"{folder}/gone-{rank}", b"")
        self._withdraw_hellos(greeted, token)
        raise self._timeout_error(others if present > others else present)

    def _warn_missing(self, missing: Sequence[int]) -> None:
        """Say who has not come by now, and what may be the reason."""
        folders = self._store.list_folders(RENDEZVOUS_FOLDER)
        others = [name for name in folders if not name.startswith((f"{self._job_id.digest}-", "try-"))]
        hint = "; ranks with another CKPT_RUN_ID, MASTER_ADDR or MASTER_PORT are or were here too: all of a job need the same"
        log.warning(
            "%r: waiting for %s at %s, for %g s at most%s", self._group, ranks_text(missing) if missing else "the others",
            self._store.url, self._timeout, hint if others else "",
        )  # fmt: skip

    def _probe_write(self, token: str) -> None:
        """Raise where this rank could not say hello, and rank 0 perhaps not open a meeting."""
        name = f"{RENDEZVOUS_FOLDER}/try-{token}/try"
        _put(self._store, name, b"")
        self._store.delete([name])

    def _withdraw_hellos(self, folders: Collection[str], token: str) -> None:
        """Take the hellos back: nobody is to count on a process that does not come."""
        self._store.delete([f"{folder}/hello-{self._group.rank}-{token}" for folder in folders])

    def _live_tokens(self, folder: str, hellos: dict[int, list[str]]) -> tuple[dict[int, str], float]:
        """The token of each rank whose process may live: one that died since, and was started again, said hello too.

        Also how many seconds to look for others, where one of them may be of another job.
        """
        me, settle_seconds = self._own_hello, 0.0
        names = [f"{folder}/hello-{rank}-{token}" for rank, tokens in hellos.items() for token in tokens]
        answers = iter(_get_all(self._store, names, _MAX_MARKER_BYTES))
        living: dict[int, str] = {}
        for rank, tokens in hellos.items():
            came = [(token, decode_hello(next(answers))) for token in tokens]
            live = [(token, one) for token, one in came if one is not None and one.can_be_alive(me)]
            if not self._job_id.is_named:
                live = [it for it in live if not it[1].is_orphaned(me)] or live
                same_launcher = [it for it in live if it[1].has_same_launcher(me)]
                live = same_launcher if len(same_launcher) == 1 else live
                for _, one in live:
                    left_over = one.is_orphaned(me)
                    settle_seconds = max(
                        settle_seconds, _SETTLE_SECONDS * (5 if left_over else 1 if one.has_same_launcher(me) is False else 0)
                    )
            if len(live) > 1:
                self._remove(folder)
                who = " and ".join(f"process {one.owner.pid} on {one.owner.host}" for _, one in live)
                raise GroupError(
                    f"{self._group!r}: {who} both say that they are rank {rank}: end what is left of an earlier start, "
                    f"and give jobs that use {self._store.url} at the same time a CKPT_RUN_ID each"
                )
            living.update((rank, token) for token, _ in live)
            self._peers.update((rank, one) for _, one in live)
        return living, settle_seconds

    def _timeout_error(self, present: Collection[int], doing: str = "meet") -> GroupError:
        missing = [rank for rank in range(self._group.size) if rank not in present]
        return timeout_error(self._group, missing, f"{doing} at {self._store.url}", self._timeout)

    # --- together ----------------------------------------------------------------------------------------------

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, by rank."""
        number = self._gather_count
        self._gather_count += 1
        mine = f"{self._folder}/{number}-{self._group.rank}"
        _put(self._store, mine, data)
        if self._group.rank:
            packed = self._await_parts(number)
            self._store.delete([mine])  # rank 0 has read it
        else:
            packed = self._collect_parts(number)
            _put(self._store, f"{self._folder}/{number}-all", packed)
            # All have come to this gather, and each does so only when it has read the one before.
            self._store.delete([mine, f"{self._folder}/{number - 1}-all"])
        return _unpack_parts(packed)

    def _collect_parts(self, number: int) -> bytes:
        """Rank 0: what all have brought, once they have."""
        names = [f"{self._folder}/{number}-{rank}" for rank in range(self._group.size)]
        dead: GroupError | None = None
        for _ in self._poll_peers():
            present = {entry.name for entry in self._store.list(self._folder)}
            if present.issuperset(names):
                parts = [data for data in _get_all(self._store, names, _MAX_GATHER_BYTES) if data is not None]
                if len(parts) == self._group.size:  # else the store lists what it can't yet read
                    return _pack_parts(parts)
            elif dead is not None:
                raise dead
            dead = self._dead_rank_error(rank for rank in range(self._group.size) if names[rank] not in present)
        raise self._gather_timeout_error(number)

    def _await_parts(self, number: int) -> bytes:
        """Another rank: the same, from rank 0."""
        dead: GroupError | None = None
        for _ in self._poll_peers():
            packed = _get(self._store, f"{self._folder}/{number}-all", self._group.size * _MAX_GATHER_BYTES)
            if packed is not None:
                return packed
            if dead is not None:
                raise dead
            dead = self._dead_rank_error([0])
        raise self._gather_timeout_error(number)

    def _dead_rank_error(self, ranks: Iterable[int]) -> GroupError | None:
        """What to raise where one of these ranks, which was not heard, is dead: once it was looked for again."""
        for rank in ranks:
            other = self._peers.get(rank)
            if other is not None and not other.can_be_alive(self._own_hello):
                return GroupError(
                    f"{self._group!r}: rank {rank} (process {other.owner.pid} on {other.owner.host}) is dead; look at its log, "
                    "and restart the job"
                )
        return None

    def _gather_timeout_error(self, number: int) -> GroupError:
        present = {entry.name for entry in self._store.list(self._folder)}
        arrived = {rank for rank in range(self._group.size) if f"{self._folder}/{number}-{rank}" in present}
        return self._timeout_error(arrived if len(arrived) < self._group.size else arrived - {0}, "a gather")

    # --- and apart ---------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Rank 0 removes the meeting once nobody needs it; where a rank does not say so, the next meeting does."""
        if self._group.rank:
            if self._store.exists(f"{self._folder}/open"):  # else it is over, and a word would be left behind
                # Not twice, as other puts: it may have been seen already, and everything removed.
                self._store.put(f"{self._folder}/bye-{self._group.rank}", b"")
            return
        for _ in _poll_times(_LEAVE_SECONDS):
            remaining = {entry.name for entry in self._store.list(self._folder)}
            if all(f"{self._folder}/bye-{rank}" in remaining for rank in range(1, self._group.size)):
                self._remove(self._folder)
                return

    def _remove(self, folder: str) -> None:
        self._store.delete([entry.name for entry in self._store.list(folder)])

    def _remove_stale(self, own_folder: str) -> None:
        """Remove meetings whose rank 0 has died: nobody will ever need them."""
        for name in list(self._store.list_folders(RENDEZVOUS_FOLDER)):
            folder = f"{RENDEZVOUS_FOLDER}/{name}"
            if folder == own_folder:
                continue
            said = _get(self._store, f"{folder}/open")
            opener = decode_hello(said)
            if said is not None and opener is None:  # damaged, or of a newer version: its ranks may be in a gather
                log.info("%s/%s/open can't be read, so the meeting is left alone", self._store.url, folder)
                continue
            same_job = self._job_id.is_named and name.startswith(f"{self._job_id.digest}-")
            if opener is None or _is_stale(opener, self._own_hello, same_job):
                log.debug("removing %s of %s, which nobody needs", folder, self._store.url)
                self._remove(folder)


def _is_stale(opener: Hello, me: Hello, same_job: bool) -> bool:
    """Whether nobody needs the meeting of this rank 0 any more. One of another job that lives may be in a gather."""
    lives = is_alive(opener.owner, me.owner)
    if lives is None:  # on another host
        return same_job or _age_seconds(opener.owner.since) > _STALE_SECONDS
    return not lives


def _age_seconds(since: str) -> float:
    return time.time() - calendar.timegm(time.strptime(since, "%Y-%m-%dT%H:%M:%SZ"))


def _list_markers(store: Store, folder: str, marker: str) -> dict[int, list[str]]:
    """The ranks that have left such a word, each with the tokens that it gave."""
    found: dict[int, list[str]] = {}
    for entry in store.list(folder):
        kind, *rest = entry.name.rpartition("/")[2].split("-")
        if kind == marker:
            found.setdefault(int(rest[0]), []).extend(rest[1:])
    return found


def _pack_parts(parts: Sequence[bytes]) -> bytes:
    """Parts of any length as one object."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def _unpack_parts(packed: bytes) -> list[bytes]:
    """The counterpart of `_join`."""
    parts, position = [], 0
    while position < len(packed):
        begin = position + 8
        position = begin + int.from_bytes(packed[position:begin], "little")
        parts.append(packed[begin:position])
    return parts


def _get_all(store: Store, names: Sequence[str], limit: int) -> list[bytes | None]:
    """Many small objects, by several threads: of a thousand ranks in a bucket they take seconds each otherwise."""
    with DaemonThreadPool(min(16, len(names) or 1), "ckpt-meeting") as pool:
        return list(pool.map(lambda name: _get(store, name, limit), names))


def _get(store: Store, name: str, limit: int = _MAX_MARKER_BYTES) -> bytes | None:
    """An object; None where there is none. A word that is too long says nothing; what a rank brings must not be too long."""
    try:
        return store.get_up_to(name, limit)
    except NotFound:
        return None
    except IntegrityError as error:
        if limit > _MAX_MARKER_BYTES:
            raise GroupError(f"what the ranks have brought can't be read: {error}") from error
        log.warning("%s", error)
        return b""


def _member_tokens(data: bytes | None, size: int) -> list[Any] | None:
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


def _poll_times(seconds: float) -> Iterator[bool]:
    """Look now, then ever more rarely, and a last time when the time is over. True is given once, when that has lasted long."""
    until = time.monotonic() + seconds
    pause, long = 0.002, time.monotonic() + _WARN_SECONDS
    while True:
        is_long = time.monotonic() >= long
        long = math.inf if is_long else long
        yield is_long
        left = until - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(pause, left))
        pause = min(1.5 * pause, 0.25)
