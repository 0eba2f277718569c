"""Ranks from the variables of a launcher (RANK and WORLD_SIZE …), which exchange bytes through the store."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from ckpt.errors import GroupError
from ckpt.groups.base import TIMEOUT_SECONDS, Group
from ckpt.groups.rendezvous_failures import RendezvousNotes
from ckpt.groups.store_rendezvous import JobId, StoreRendezvous
from ckpt.storage.base.errors import CkptError, StoreError
from ckpt.storage.base.store import Store

log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The environment variables of one launcher: rank, size, and those that together identify the job on all ranks."""

    rank: str
    size: str
    job: tuple[str, ...]


_LAUNCHERS = (
    # Not TORCHELASTIC_RESTART_COUNT: each agent counts its own restarts, so it differs between the nodes of one job.
    # The address distinguishes two jobs without a name.
    _Launcher("RANK", "WORLD_SIZE", ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")),
    _Launcher("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("PMIX_NAMESPACE",)),
    _Launcher("PMI_RANK", "PMI_SIZE", ()),  # MPICH, Intel MPI, Cray. PMIx alone has a rank and no size.
    # Not SLURM_NTASKS: the batch script has it too, and it is one process that starts the ranks.
    _Launcher("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")),
)


@dataclass(frozen=True, slots=True)
class EnvRank:
    """Rank, size and job of this process, from the environment. `name` is that of the group in messages."""

    name: str
    rank: int
    size: int
    job_id: JobId


def rank_from_env(environ: Mapping[str, str] = os.environ) -> EnvRank | None:
    """Return rank, size and job as set by the first launcher found, None where no launcher has set them.

    Raises GroupError where rank and size do not match.
    """
    for launcher in _LAUNCHERS:
        rank, size = environ.get(launcher.rank), environ.get(launcher.size)
        if rank is None or size is None:
            continue
        if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
            raise GroupError(
                f"the environment has {launcher.rank}={rank} and {launcher.size}={size}, which is not a rank of a group; "
                "correct or unset them, or give group=None"
            )
        return EnvRank(f"environment ({launcher.rank}, {launcher.size})", int(rank), int(size), _job_id(launcher, environ))
    return None


def _job_id(launcher: _Launcher, environ: Mapping[str, str]) -> JobId:
    """Return the id of the job from CKPT_RUN_ID, or else from the launcher, with its restart count where it has one."""
    words = [environ.get(name, "") for name in (("CKPT_RUN_ID",) if "CKPT_RUN_ID" in environ else launcher.job)]
    named = bool(words) and words[0] not in ("", "none")  # torchrun sets "none" for a job without a name
    return JobId(hashlib.sha256("\n".join(words).encode()).hexdigest()[:12], named)


class EnvGroup(Group):
    """The ranks that the environment describes. They need no network: they exchange bytes through the store of `meet_at`.

    timeout: seconds of each wait for the other ranks.
    """

    def __init__(self, timeout: float = TIMEOUT_SECONDS) -> None:
        found = rank_from_env()
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
            with self._leave_note_on_failure(store.url), self._as_group_error(f"meeting at {store.url}"):
                self._rendezvous[store.url] = StoreRendezvous(self, store, self._job_id, self._timeout)

    def all_gather(self, data: bytes) -> list[bytes]:
        meeting = self._rendezvous.get(self._url or "")
        if meeting is None:
            raise GroupError(f"{self!r} has no network: all ranks must call meet_at(store) first")
        try:
            with self._leave_note_on_failure(meeting.url), self._as_group_error(f"a gather at {self._url}"):
                return meeting.gather(data)
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
        except GroupError as error:
            if isinstance(error.__cause__, StoreError) and not error.noted:
                notes.leave(error.__cause__)
            raise

    def close(self) -> None:
        meetings, self._rendezvous = self._rendezvous, {}
        if os.getpid() != self._creator_pid:  # a forked child is not a rank
            return
        for url, meeting in meetings.items():
            try:
                meeting.leave()
            except CkptError as error:
                log.debug("the rendezvous at %s was not closed: %s", url, error)
