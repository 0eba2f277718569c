"""The class Tier, the location of each tier, and the note in a tier of the repository to which it belongs."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ckpt.block_io.staging_arena import available_memory
from ckpt.errors import FormatError, StepNotFound
from ckpt.format import json_records
from ckpt.repository.repository import MARKER, Repository, Url, new_marker, open_repository
from ckpt.repository.retention import Keep, as_keep
from ckpt.storage.base.errors import CkptError, IntegrityError, InvalidArgument, NotFound, StoreError
from ckpt.storage.local.directory import LocalStore
from ckpt.storage.local.shared_memory import MemoryStore
from ckpt.support.validation import checked_bytes, checked_every
from ckpt.tiers.memory_folder import MEMORY_VARIABLE, own_memory_folder
from ckpt.training.save_interval import Every

log = logging.getLogger("ckpt")

MEMORY = "memory"
"""The URL of the memory tier."""

TIER_NOTE_NAME = "tier.json"
"""The name of the file in a tier that names its repository of record."""

_SHARE_OF_MEMORY = 0.5


@dataclass(frozen=True, slots=True)
class Tier:
    """A store in front of the repository of record, nearer and faster than that.

        tiers = [ckpt.Tier("memory", every=1, keep=2), ckpt.Tier("/nvme/run", every=50, keep=3)]
        with ckpt.Checkpointer("s3://bucket/run", every=1000, keep=10, tiers=tiers) as ck:
            ...

    url: a directory or any URL. "memory" is shared memory, which outlives the process but not the machine.
    every: which steps the tier gets: every so many steps, one after a timedelta, "auto", or None for those of `save` alone.
    keep: how many of the newest steps to keep, or a `ckpt.Keep`; None keeps all.
    limit: the most bytes of steps in this tier. A step that does not fit goes to the next tier. None means no limit; for
        memory, half of the memory that is free at the start.

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


def checked_tiers(tiers: Any) -> tuple[Tier, ...]:
    """Return the argument tiers= as a tuple; raise InvalidArgument if it contains anything else than tiers."""
    found = tuple(tiers) if isinstance(tiers, Iterable) else (tiers,)
    if isinstance(tiers, Tier) or not all(isinstance(tier, Tier) for tier in found):
        raise InvalidArgument(f'tiers={tiers!r}: use a list of ckpt.Tier, as in tiers=[ckpt.Tier("memory")]')
    return found


def stored_step_bytes(repo: Repository) -> int:
    """Return the bytes of all files of all steps."""
    return sum(entry.nbytes for entry in repo.store.list("steps"))


# --- where a tier is --------------------------------------------------------------------------------------------


def is_host_memory(tier: Tier) -> bool:
    """Return whether the tier is the memory of this host, and not memory that `ckpt-run` keeps for all hosts."""
    return tier.url == MEMORY and not os.environ.get(MEMORY_VARIABLE)


def tier_location(tier: Tier, record: str) -> Url:
    """Return the URL or store of a tier of the repository at the URL `record`."""
    if tier.url != MEMORY:
        return tier.url
    name = memory_folder_name(record)
    if kept := os.environ.get(MEMORY_VARIABLE):
        return _memory_store(url_of_subfolder(kept, name))
    return MemoryStore(own_memory_folder() / name)


def _memory_store(url: str) -> Url:
    store = open_repository(url).store
    return MemoryStore(store.root) if type(store) is LocalStore else store


def memory_folder_name(record: str) -> str:
    """Return the folder name in memory for the repository at a URL; it is readable, and differs for each URL."""
    words = re.sub(r"[^A-Za-z0-9_-]+", "-", record.rstrip("/").rpartition("/")[2]).strip("-")[:40]
    return f"{words or 'run'}-{hashlib.sha256(record.encode()).hexdigest()[:12]}"


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
    """Return the free bytes of host memory: the smaller of what the file system of `folder` and the kernel report."""
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


# --- which repository a tier belongs to -------------------------------------------------------------------------


def bind_to_repository(repos: Sequence[Repository], write_notes: bool) -> None:
    """Raise InvalidArgument if a tier has steps of another repository; write into each tier a note of its repository.

    repos: the tiers, the nearest first; the last is the repository of record.
    """
    *near, record = repos
    identity = record.identity()
    note = json_records.encode("tier", {"id": identity, "places": [repo.url for repo in repos]})
    for repo in near:
        try:
            known = read_tier_note(repo)
        except IntegrityError as error:
            _require_shared_step(repo, record, error)
            log.warning("%s; writing it again", error)
            continue
        if known is not None and known["id"] != identity and repo.step_numbers():
            raise InvalidArgument(
                f"{repo.url} has steps of the repository that was at {known['places'][-1]}, not of the one at {record.url}; "
                "delete the folder if nobody needs these steps, or use another URL for this tier"
            )
    if write_notes:
        for repo in near:
            repo.store.put(TIER_NOTE_NAME, note)


def _require_shared_step(repo: Repository, record: Repository, damage: IntegrityError) -> None:
    """Raise InvalidArgument if a tier with a damaged note has steps, and nothing else proves that they belong to `record`.

    The `keep` of this job would delete the steps. In memory, the name of the folder is the proof, because it is derived from
    the URL of the repository. Elsewhere, one step must be the same in both.
    """
    if repo.url.rstrip("/").endswith(f"/{memory_folder_name(record.url)}"):
        return
    steps = repo.step_numbers()
    for step in steps:
        with suppress(NotFound, IntegrityError):
            if repo.record(step) == record.record(step):
                return
    if steps:
        raise InvalidArgument(
            f"{damage}. {repo.url} has steps, and nothing else proves that they belong to {record.url}: if they do, delete "
            f"{TIER_NOTE_NAME} there; if not, use another URL for this tier, or delete the whole folder"
        )


def has_steps_of(repo: Repository, record: Repository) -> bool:
    """Return whether steps of the repository of record can be read from a tier.

    Writing may still be impossible, for example if one of two nodes with a copy each is lost.
    """
    try:
        note = read_tier_note(repo)
        return note is not None and note["id"] == record.identity() and bool(repo.step_numbers())
    except IntegrityError:  # the name of a folder in memory is proof, too: it is derived from the URL of the repository
        return repo.url.rstrip("/").endswith(f"/{memory_folder_name(record.url)}") and bool(repo.step_numbers())
    except CkptError:
        return False


def read_tier_note(repo: Repository) -> dict[str, Any] | None:
    """Return the note of a tier, or None if it has none. Raises IntegrityError if the note is damaged."""
    where = f"{repo.url}/{TIER_NOTE_NAME}"
    try:
        note = json_records.load(repo.store, "tier", TIER_NOTE_NAME)
    except NotFound:
        return None
    json_records.parse_body(_TierNote, note, where)
    return note


@dataclass(frozen=True, slots=True)
class _TierNote:
    """The fields that a note must have."""

    id: str
    places: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.places:
            raise ValueError("it names no place")


def repair_marker(repo: Repository, tier: Tier) -> None:
    """Write the marker of a tier again if it is damaged or was removed. The steps do not depend on it to be verified."""
    try:
        try:
            repo.check()
        except StepNotFound:  # the first save there writes it
            return
        except FormatError as error:
            if not _was_cleared(repo, tier):
                return
            log.warning("%s; writing it again", error)
            repo.store.put(MARKER, new_marker())
    except IntegrityError as error:
        log.warning("%s; writing it again", error)
        with suppress(StoreError):
            repo.store.put(MARKER, new_marker())
    except StoreError:  # the next access to the tier raises it
        pass


def _was_cleared(repo: Repository, tier: Tier) -> bool:
    """Return whether the files of a tier were removed during a save, so that the tier can be used again without a loss.

    The files that the save wrote afterwards make no step. A committed step may belong to another repository, except in memory,
    where the name of the folder identifies the repository.
    """
    names = [entry.name for entry in repo.store.list()]
    ours = all(name == TIER_NOTE_NAME or name.startswith(("steps/", "generations/", "lines/", "meet/")) for name in names)
    return bool(names) and ours and (tier.url == MEMORY or not any(name.endswith("/commit.json") for name in names))
