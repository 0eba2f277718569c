"""The class Tier, and the location and the capacity of each tier."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ckpt.repository.file_names import STEPS_FOLDER
from ckpt.repository.repository import Repository, Url, open_repository
from ckpt.repository.retention import Keep, as_keep
from ckpt.storage.base.errors import InvalidArgument
from ckpt.storage.base.store import Store
from ckpt.storage.local.directory import LocalStore
from ckpt.storage.local.shared_memory import MemoryStore
from ckpt.support.available_memory import available_memory
from ckpt.support.validation import checked_bytes, checked_every
from ckpt.tiers.memory_folder import MEMORY_VARIABLE, own_memory_folder
from ckpt.training.save_interval import Every

log = logging.getLogger("ckpt")

MEMORY = "memory"
"""The URL of the memory tier."""

_SHARE_OF_MEMORY = 0.5
"""The share of the free memory that a memory tier without `limit` may use."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A store in front of the repository of record, nearer and faster than that.

        tiers = [ckpt.Tier("memory", every=1, keep=2), ckpt.Tier("/nvme/run", every=50, keep=3)]
        with ckpt.Checkpointer("s3://bucket/run", every=1000, keep=10, tiers=tiers) as ck:
            ...

    url: a directory or any URL. "memory" is shared memory, which outlives the process but not the machine.
    every: which steps the tier gets: every so many steps, one after a timedelta, "auto", or None for those of `save` alone.
    keep: how many of the newest steps to keep, or a `ckpt.Keep`; None keeps all.
    limit: the most bytes of steps in this tier. A step that does not fit goes to the next tier, and a copy that does
        not fit is left out. None means no limit; for memory, half of the memory that is free at the start.

    Raises:
        InvalidArgument: An argument has a value that makes no sense.
    """

    url: Url
    every: Every = 1
    keep: int | Keep | None = 2
    limit: int | None = None

    def __post_init__(self) -> None:
        as_keep(self.keep)
        object.__setattr__(self, "every", checked_every(self.every))
        checked_bytes("limit", self.limit)

    def counts(self, step: int) -> bool:
        """Return whether the tier gets this step because of its number."""
        return isinstance(self.every, int) and (step + 1) % self.every == 0


def checked_tiers(tiers: object) -> tuple[Tier, ...]:
    """Return the argument tiers= as a tuple; raise InvalidArgument if it contains anything but tiers."""
    found = tuple(tiers) if isinstance(tiers, Iterable) else (tiers,)
    if isinstance(tiers, Tier) or not all(isinstance(tier, Tier) for tier in found):
        raise InvalidArgument(f'tiers={tiers!r}: use a list of ckpt.Tier, as in tiers=[ckpt.Tier("memory")]')
    return found


def stored_step_bytes(repo: Repository) -> int:
    """Return the bytes of all files of all steps."""
    return sum(entry.nbytes for entry in repo.store.list(STEPS_FOLDER))


# --- where a tier is --------------------------------------------------------------------------------------------


def is_host_memory(tier: Tier) -> bool:
    """Return whether the tier is the memory of this host, and not memory that `ckpt-run` keeps for all hosts."""
    return tier.url == MEMORY and not os.environ.get(MEMORY_VARIABLE)


def tier_location(tier: Tier, repository_url: str) -> Url:
    """Return the URL or store of a tier of the repository at `repository_url`."""
    if tier.url != MEMORY:
        return tier.url
    name = memory_folder_name(repository_url)
    if kept := os.environ.get(MEMORY_VARIABLE):
        return _memory_store(url_of_subfolder(kept, name))
    return MemoryStore(own_memory_folder() / name)


def _memory_store(url: str) -> Store:
    """Return the store of memory that `ckpt-run` keeps; a MemoryStore if it is a folder of this host."""
    store = open_repository(url).store
    return MemoryStore(store.root) if type(store) is LocalStore else store


def memory_folder_name(repository_url: str) -> str:
    """Return the folder name in memory for the repository at a URL; it is readable, and differs for each URL."""
    words = re.sub(r"[^A-Za-z0-9_-]+", "-", repository_url.rstrip("/").rpartition("/")[2]).strip("-")[:40]
    return f"{words or 'run'}-{hashlib.sha256(repository_url.encode()).hexdigest()[:12]}"


def url_of_subfolder(url: str, name: str) -> str:
    """Return the URL of a folder below a URL, whose query stays at the end."""
    path, mark, query = url.partition("?")
    return f"{path.rstrip('/')}/{name}{mark}{query}"


def capacity_bytes(tier: Tier, repo: Repository) -> int | None:
    """Return the most bytes of steps in a tier; None if there is no limit."""
    limit = tier.limit
    if limit is None and tier.url == MEMORY and isinstance(repo.store, LocalStore):
        limit = int(_SHARE_OF_MEMORY * (_free_bytes(repo.store.root) + stored_step_bytes(repo)))
    elif limit is None and tier.url == MEMORY and repo.url.startswith("ckpt://"):
        limit = int(_SHARE_OF_MEMORY * (_free_bytes("/dev/shm") * _hosts_per_copy(repo.url) + stored_step_bytes(repo)))
    if limit is not None:
        log.info("the tier %s may hold %.3f GB", repo.url, limit / 1e9)
    return limit


def _free_bytes(folder: str) -> int:
    """Return the free bytes of host memory: what the file system of `folder` and `available_memory` have."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return available_memory()
    return min(found.f_bavail * found.f_frsize, available_memory())


def _hosts_per_copy(url: str) -> float:
    """Return the number of hosts divided by the number of copies, for a namespace in the memory of equal hosts."""
    from ckpt.aggregator.cluster.config import parse_namespace_url

    config, _ = parse_namespace_url(url)
    return len(config.members) / config.redundancy.overhead
