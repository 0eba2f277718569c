"""The rendezvous of ranks without a network at a store, by small objects that are put atomically and polled.

    meet/<job>-<size>-<token>/open             rank 0 has opened the rendezvous; the token is random
                             /hello-<r>-<token>  rank r has joined; each process chooses a random token
                             /members.json     rank 0 has seen all ranks; one token for each rank
                             /<k>-<r>          the data of rank r in gather k
                             /<k>-all          the data of all ranks, packed by rank 0: n reads instead of n², one name to poll
                             /bye-<r>          rank r does not need the rendezvous any more
                             /gone-<r>         rank r had joined, and its timeout has passed
    meet/try-<token>/try                       a rank has checked that it can write to the store; deleted at once

Rank r puts a hello into every open rendezvous of its job, and uses the first one whose members contain its token. A rendezvous
that a killed job left is never used, because its rank 0 writes no members. A rank that arrives early waits.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ckpt.errors import GroupError
from ckpt.groups.base import Group, ranks_text, timeout_error
from ckpt.groups.dead_ranks import dead_rank_error, is_stale, live_processes
from ckpt.groups.hello import Hello, decode_hello, own_hello
from ckpt.groups.rendezvous_notes import RendezvousNotes
from ckpt.groups.rendezvous_objects import (
    MAX_MARKER_BYTES,
    get_object,
    get_objects,
    list_markers,
    member_tokens,
    pack_parts,
    put_object,
    unpack_parts,
)
from ckpt.storage.base.call_timeout import WaitTimer
from ckpt.storage.base.errors import CkptError, NotFound
from ckpt.storage.base.store import Store

log = logging.getLogger("ckpt")

RENDEZVOUS_FOLDER = "meet"
_MAX_GATHER_BYTES = 1 << 30
"""The most bytes of one rank in a gather: the locations of ten million arrays that it loads."""
_LEAVE_SECONDS = 2.0
"""Seconds that rank 0 waits for the others before it leaves. Short, since it may leave because another rank has died."""
_WRITE_PROBE_SECONDS = 1.0
"""A rank that has found no rendezvous after this time checks whether it can write to the store."""
_WARN_SECONDS = 15.0
"""A rank that has waited this long logs which ranks are missing."""


@dataclass(frozen=True, slots=True)
class JobId:
    """Distinguishes the rendezvous of one job from those of other jobs."""

    digest: str
    is_named: bool
    """Whether the launcher gave the job a name; then another job with the same digest is an earlier start of this job."""


class StoreRendezvous:
    """A rendezvous of ranks at a store. The constructor waits until all ranks have joined."""

    def __init__(self, group: Group, store: Store, job: JobId, timeout: float) -> None:
        self._group = group
        self._store = store
        self._job_id = job
        self._timeout = timeout
        self._own_hello = own_hello()
        self._peers: dict[int, Hello] = {}
        """The hellos of the ranks for which this rank waits: rank 0 waits for all, the others wait for rank 0."""
        self._gather_count = 0
        self._notes = RendezvousNotes(group, job.digest, store.url)
        self._folder = self._open() if group.rank == 0 else self._join_rendezvous()

    @property
    def url(self) -> str:
        """The URL of the store."""
        return self._store.url

    def _poll_peers(self) -> Iterator[bool]:
        """`_poll_times`; raise GroupError if another rank left a note that it cannot reach the store."""
        for is_long in _poll_times(self._timeout):
            self._notes.raise_failure()
            yield is_long

    # --- joining -----------------------------------------------------------------------------------------------

    def _open(self) -> str:
        """Rank 0: open a rendezvous, wait for all ranks, and return its folder."""
        token = secrets.token_hex(8)
        folder = f"{RENDEZVOUS_FOLDER}/{self._job_id.digest}-{self._group.size}-{token}"
        put_object(self._store, f"{folder}/open", self._own_hello.encode())
        tokens: dict[int, str] = {}
        complete_since: float | None = None
        for is_long in self._poll_peers():
            hellos = list_markers(self._store, folder, "hello")
            if is_long:
                self._warn_missing([rank for rank in range(1, self._group.size) if rank not in hellos])
            if len(hellos) == self._group.size - 1:
                tokens, wait_seconds = self._live_tokens(folder, hellos)
                if len(tokens) == len(hellos):
                    if complete_since is None and wait_seconds:
                        log.info("%r: waiting %g s for other processes with the same rank: no CKPT_RUN_ID names this job",
                                 self._group, wait_seconds)  # fmt: skip
                    complete_since = complete_since or time.monotonic()
                    if time.monotonic() >= complete_since + wait_seconds:
                        break
        else:
            tokens, _ = self._live_tokens(folder, list_markers(self._store, folder, "hello"))
            if len(tokens) < self._group.size - 1:
                departed = list_markers(self._store, folder, "gone")
                self._remove(folder)
                raise self._timeout_error(
                    {0, *tokens, *departed} if len({*tokens, *departed}) < self._group.size - 1 else {0, *tokens}
                )
        names = [token, *(tokens[rank] for rank in range(1, self._group.size))]
        put_object(self._store, f"{folder}/members.json", json.dumps(names).encode())
        self._remove_stale(folder)
        return folder

    def _join_rendezvous(self) -> str:
        """Another rank: put a hello into every rendezvous of the job until rank 0 of one accepts it; return its folder."""
        rank, token = self._group.rank, secrets.token_hex(8)
        mine = f"{self._job_id.digest}-{self._group.size}-"
        greeted: set[str] = set()
        closed: set[str] = set()  # complete without this process
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
                members = member_tokens(get_object(self._store, f"{folder}/members.json"), self._group.size)
                if folder not in greeted:
                    if members is not None:
                        closed.add(folder)
                        continue
                    # NotFound: deleted as in put_object, or the rendezvous has ended; a hello must not recreate it.
                    with suppress(NotFound):
                        self._store.put(f"{folder}/hello-{rank}-{token}", self._own_hello.encode())
                        greeted.add(folder)
                elif members is not None and members[rank] == token:
                    self._withdraw_hellos(greeted - {folder}, token)
                    if (opener := decode_hello(get_object(self._store, f"{folder}/open"))) is not None:
                        self._peers[0] = opener
                    return folder
        # In a rendezvous that is still open, other ranks are missing; if all have joined, rank 0 is the missing one.
        present_by_folder = [
            {0, rank, *list_markers(self._store, folder, "hello"), *list_markers(self._store, folder, "gone")}
            for folder in greeted
        ]
        others = set(range(1, self._group.size))
        present = max(present_by_folder, key=len, default=others)
        for folder in greeted:  # so that ranks that wait longer do not report this rank as missing
            with suppress(CkptError):
                if self._store.exists(f"{folder}/open"):
                    self._store.put(f"{folder}/gone-{rank}", b"")
        self._withdraw_hellos(greeted, token)
        raise self._timeout_error(others if present > others else present)

    def _warn_missing(self, missing: Sequence[int]) -> None:
        """Log which ranks are missing, and a possible reason."""
        folders = self._store.list_folders(RENDEZVOUS_FOLDER)
        others = [name for name in folders if not name.startswith((f"{self._job_id.digest}-", "try-"))]
        hint = "; ranks with another CKPT_RUN_ID, MASTER_ADDR or MASTER_PORT use or used this store: give all ranks the same"
        log.warning(
            "%r: waiting for %s at %s, for %g s at most%s", self._group, ranks_text(missing) if missing else "the others",
            self._store.url, self._timeout, hint if others else "",
        )  # fmt: skip

    def _probe_write(self, token: str) -> None:
        """Raise the error of the store if this rank cannot write to it; rank 0 then probably cannot either."""
        name = f"{RENDEZVOUS_FOLDER}/try-{token}/try"
        put_object(self._store, name, b"")
        self._store.delete([name])

    def _withdraw_hellos(self, folders: Collection[str], token: str) -> None:
        """Delete the hellos of this process, so that no rank 0 counts on it."""
        self._store.delete([f"{folder}/hello-{self._group.rank}-{token}" for folder in folders])

    def _live_tokens(self, folder: str, hellos: dict[int, list[str]]) -> tuple[dict[int, str], float]:
        """Return the token of each rank whose process may be alive, and the seconds to wait for processes with the same rank.

        A rank that died and was started again has two hellos. Rank 0 waits where a hello may belong to another job.

        Raises GroupError if two live processes have the same rank.
        """
        me, wait_seconds = self._own_hello, 0.0
        names = [f"{folder}/hello-{rank}-{token}" for rank, tokens in hellos.items() for token in tokens]
        answers = iter(get_objects(self._store, names, MAX_MARKER_BYTES))
        living: dict[int, str] = {}
        for rank, tokens in hellos.items():
            found = {token: hello for token in tokens if (hello := decode_hello(next(answers))) is not None}
            live, seconds = live_processes(found, me, self._job_id.is_named)
            wait_seconds = max(wait_seconds, seconds)
            if len(live) > 1:
                self._remove(folder)
                who = " and ".join(f"process {one.owner.pid} on {one.owner.host}" for one in live.values())
                raise GroupError(
                    f"{self._group!r}: {who} both claim to be rank {rank}: end the processes of an earlier start, and give "
                    f"each job that uses {self._store.url} at the same time its own CKPT_RUN_ID"
                )
            living.update((rank, token) for token in live)
            self._peers.update((rank, one) for one in live.values())
        return living, wait_seconds

    def _timeout_error(self, present: Collection[int], doing: str = "the rendezvous") -> GroupError:
        missing = [rank for rank in range(self._group.size) if rank not in present]
        return timeout_error(self._group, missing, f"{doing} at {self._store.url}", self._timeout)

    # --- gathers -----------------------------------------------------------------------------------------------

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, in the order of ranks; raise GroupError if a rank is missing or dead."""
        number = self._gather_count
        self._gather_count += 1
        mine = f"{self._folder}/{number}-{self._group.rank}"
        put_object(self._store, mine, data)
        if self._group.rank:
            packed = self._await_parts(number)
            self._store.delete([mine])  # rank 0 has read it
        else:
            packed = self._collect_parts(number)
            put_object(self._store, f"{self._folder}/{number}-all", packed)
            # All ranks have joined this gather, and each joins only after it has read the previous one.
            self._store.delete([mine, f"{self._folder}/{number - 1}-all"])
        return unpack_parts(packed)

    def _collect_parts(self, number: int) -> bytes:
        """Rank 0: wait for the data of all ranks, and return them packed."""
        names = [f"{self._folder}/{number}-{rank}" for rank in range(self._group.size)]
        dead: GroupError | None = None
        for _ in self._poll_peers():
            present = {entry.name for entry in self._store.list(self._folder)}
            if present.issuperset(names):
                parts = [data for data in get_objects(self._store, names, _MAX_GATHER_BYTES) if data is not None]
                if len(parts) == self._group.size:  # otherwise the store lists an object that cannot be read yet
                    return pack_parts(parts)
            elif dead is not None:
                raise dead
            missing = (rank for rank in range(self._group.size) if names[rank] not in present)
            dead = dead_rank_error(self._group, missing, self._peers, self._own_hello)
        raise self._gather_timeout_error(number)

    def _await_parts(self, number: int) -> bytes:
        """Another rank: wait for the packed data from rank 0."""
        dead: GroupError | None = None
        for _ in self._poll_peers():
            packed = get_object(self._store, f"{self._folder}/{number}-all", self._group.size * _MAX_GATHER_BYTES)
            if packed is not None:
                return packed
            if dead is not None:
                raise dead
            dead = dead_rank_error(self._group, [0], self._peers, self._own_hello)
        raise self._gather_timeout_error(number)

    def _gather_timeout_error(self, number: int) -> GroupError:
        present = {entry.name for entry in self._store.list(self._folder)}
        arrived = {rank for rank in range(self._group.size) if f"{self._folder}/{number}-{rank}" in present}
        return self._timeout_error(arrived if len(arrived) < self._group.size else arrived - {0}, "a gather")

    # --- leaving -----------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Leave the rendezvous. Rank 0 deletes it after all ranks have left; otherwise the next rendezvous deletes it."""
        if self._group.rank:
            if self._store.exists(f"{self._folder}/open"):  # otherwise it was deleted, and the marker would stay forever
                # Not repeated as in put_object: rank 0 may have read it already and deleted the folder.
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
        """Delete rendezvous of this store whose rank 0 has died, which no rank needs any more."""
        for name in list(self._store.list_folders(RENDEZVOUS_FOLDER)):
            folder = f"{RENDEZVOUS_FOLDER}/{name}"
            if folder == own_folder:
                continue
            opening = get_object(self._store, f"{folder}/open")
            opener = decode_hello(opening)
            if opening is not None and opener is None:  # damaged, or of a newer version: its ranks may be in a gather
                log.info("%s/%s/open cannot be read, so this rendezvous is kept", self._store.url, folder)
                continue
            same_job = self._job_id.is_named and name.startswith(f"{self._job_id.digest}-")
            if opener is None or is_stale(opener, self._own_hello, same_job):
                log.debug("deleting the stale rendezvous %s/%s", self._store.url, folder)
                self._remove(folder)


def _poll_times(seconds: float) -> Iterator[bool]:
    """Yield at once, then at growing intervals, and a last time after `seconds` of waiting.

    The value is True once, after _WARN_SECONDS, and else False.
    """
    timer, pause, warn_seconds = WaitTimer(seconds), 0.002, _WARN_SECONDS
    while True:
        is_long = timer.seconds >= warn_seconds
        warn_seconds = math.inf if is_long else warn_seconds
        yield is_long
        if not (remaining_seconds := timer.remaining_seconds()):
            return
        time.sleep(min(pause, remaining_seconds))
        pause = min(1.5 * pause, 0.25)
