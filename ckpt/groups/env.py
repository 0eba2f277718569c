"""Ranks that have no network of ckpt's own, such as those of a launcher; they exchange bytes through the store."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ckpt.errors import GroupError
from ckpt.groups.base import GROUP_TIMEOUT_SECONDS, Group
from ckpt.groups.launchers import EnvRank, rank_from_env
from ckpt.groups.rendezvous_notes import OtherRankFailed, RendezvousNotes
from ckpt.groups.store_rendezvous import StoreRendezvous
from ckpt.storage.base.errors import CkptError, StoreError
from ckpt.storage.base.store import Store

log = logging.getLogger("ckpt")


class EnvGroup(Group):
    """The ranks that the environment describes. They need no network: they exchange bytes through the store of `meet_at`.

    timeout: seconds of each wait for the other ranks.
    found: rank, size and job of this process, if not those of the environment.
    """

    def __init__(self, timeout: float = GROUP_TIMEOUT_SECONDS, found: EnvRank | None = None) -> None:
        found = found or rank_from_env()
        if found is None:
            raise GroupError("no launcher has set the rank of this process: set RANK and WORLD_SIZE, or give group=None")
        self.name, self.rank, self.size = found.name, found.rank, found.size
        self._job_id = found.job_id
        self._timeout = timeout
        self._creator_pid = os.getpid()
        self._rendezvous: dict[str, StoreRendezvous] = {}
        self._url: str | None = None

    def meet_at(self, store: Store) -> None:
        self._url = store.url
        if store.url not in self._rendezvous:
            with self._leave_note_on_failure(store.url), self._as_group_error(f"the rendezvous at {store.url}"):
                self._rendezvous[store.url] = StoreRendezvous(self, store, self._job_id, self._timeout)

    def all_gather(self, data: bytes) -> list[bytes]:
        rendezvous = self._rendezvous.get(self._url or "")
        if rendezvous is None:
            raise GroupError(f"{self!r} has no network: all ranks must call meet_at(store) first")
        try:
            with self._leave_note_on_failure(rendezvous.url), self._as_group_error(f"a gather at {self._url}"):
                return rendezvous.gather(data)
        except GroupError:
            # The ranks no longer agree on the number of the next gather, so they need a new rendezvous.
            self._rendezvous.pop(self._url or "", None)
            self._is_one_host = None  # some ranks may have received the answer, and others not
            raise

    @contextmanager
    def _leave_note_on_failure(self, url: str) -> Iterator[None]:
        """Leave a note if this rank cannot reach the store, so that the other ranks of this host do not wait for it."""
        notes = RendezvousNotes(self, self._job_id.digest, url)
        notes.withdraw()
        try:
            yield
        except OtherRankFailed:
            raise
        except GroupError as error:
            if isinstance(error.__cause__, StoreError):
                notes.leave(error.__cause__)
            raise

    def close(self) -> None:
        all_rendezvous, self._rendezvous = self._rendezvous, {}
        if os.getpid() != self._creator_pid:  # a forked child is not a rank
            return
        for url, rendezvous in all_rendezvous.items():
            try:
                rendezvous.leave()
            except CkptError as error:
                log.debug("the rendezvous at %s was not closed: %s", url, error)
