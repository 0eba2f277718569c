"""One place before the repository of record: what a user says of it, where it is, and to which repository it belongs."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt.block_io.staging_arena import available_memory
from ckpt.errors import FormatError, StepNotFound
from ckpt.format import json_records
from ckpt.repository.repository import MARKER, Repository, Url, new_marker, open_repository
from ckpt.repository.retention import Keep, as_keep
from ckpt.storage.base.errors import CkptError, IntegrityError, InvalidArgument, NotFound, StoreError, Unavailable
from ckpt.storage.base.store import Store
from ckpt.storage.local.directory import LocalStore
from ckpt.storage.local.shared_memory import MemoryStore
from ckpt.support.validation import checked_bytes, checked_every
from ckpt.training.save_interval import Every

log = logging.getLogger("ckpt")

MEMORY = "memory"
"""The URL of the memory tier."""

MEMORY_VARIABLE = "CKPT_MEMORY"
"""Names the memory that `ckpt-run` keeps for the job: it outlives the ranks."""

PREVIOUS_MEMORY_VARIABLE = "CKPT_MEMORY_BEFORE"
"""Names, with spaces between, memory that the job had before on other hosts. It is only read."""

MEMORY_WAIT_VARIABLE = "CKPT_MEMORY_WAIT"
"""SECONDS URL: how long to wait for one of these memories where its hosts do not answer. It may have the newest steps."""

TIER_NOTE_NAME = "tier.json"
"""In a near place: which repository it belongs to."""

_SHARE_OF_MEMORY = 0.5
_RETRY_SECONDS = 0.5
_ANSWER_SECONDS = 3.0
"""Who holds memory and takes longer to answer is taken for lost."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A place before the repository of record.

    url: a directory or any URL; "memory" is shared memory, which outlives the process but not the machine.
    every: which steps come here: a number of steps, a timedelta, "auto", or None for those of `save` alone.
    keep: the newest so many steps, or a `ckpt.Keep`; None keeps all.
    limit: bytes that may be held here; a step that does not fit goes to the next place. None: what is there, of memory half
        of what is free at the start.
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
        """Whether this step comes here by its number."""
        return isinstance(self.every, int) and (step + 1) % self.every == 0


def checked_tiers(tiers: Any) -> tuple[Tier, ...]:
    """What a user gives as tiers."""
    found = tuple(tiers) if isinstance(tiers, Iterable) else (tiers,)
    if isinstance(tiers, Tier) or not all(isinstance(tier, Tier) for tier in found):
        raise InvalidArgument(f'tiers={tiers!r}: use a list of ckpt.Tier, as in tiers=[ckpt.Tier("memory")]')
    return found


def stored_step_bytes(repo: Repository) -> int:
    """Of all steps."""
    return sum(entry.nbytes for entry in repo.store.list("steps"))


# --- where a tier is --------------------------------------------------------------------------------------------


def is_host_memory(tier: Tier) -> bool:
    """Whether it is memory that no agent keeps: that of this host."""
    return tier.url == MEMORY and not os.environ.get(MEMORY_VARIABLE)


def tier_location(tier: Tier, record: str) -> Url:
    if tier.url != MEMORY:
        return tier.url
    name = memory_folder_name(record)
    if kept := os.environ.get(MEMORY_VARIABLE):
        return _memory_store(url_of_subfolder(kept, name))
    return MemoryStore(own_memory_folder() / name)


def previous_memories(record: Repository) -> list[Repository]:
    """Memory on other hosts that holds steps of the repository of record, the newest first."""
    found = []
    seconds, awaited = _memory_wait_from_env()
    for url in os.environ.get(PREVIOUS_MEMORY_VARIABLE, "").split():
        repo = open_repository(url_of_subfolder(url, memory_folder_name(record.url)), record.keys)
        try:
            until = time.monotonic() + (seconds if url == awaited else 0.0)
            if _can_have_steps(repo.store, until) and has_steps_of(repo, record):
                found.append(repo)
                log.info("%s is read, too: the memory of the attempt before", repo.url)
        except StoreError as error:
            log.warning("what was in the memory of the attempt before is not there: %s", error)
    return found


def _memory_wait_from_env() -> tuple[float, str]:
    """How long to wait, and for which memory."""
    text = os.environ.get(MEMORY_WAIT_VARIABLE, "")
    seconds, _, url = text.partition(" ")
    try:
        return float(seconds or 0.0), url
    except ValueError as error:
        raise InvalidArgument(
            f"{MEMORY_WAIT_VARIABLE}={text!r} is not SECONDS URL; unset it: ckpt-run sets it for its ranks"
        ) from error


def _can_have_steps(store: Store, deadline: float) -> bool:
    """Whether steps may be there. A host that is slow is asked again until the moment `until`. Raises Unavailable."""
    while True:
        try:
            return store.answers(_ANSWER_SECONDS)
        except Unavailable as error:
            if time.monotonic() >= deadline:
                raise
            log.warning("%s; it is asked again for at most %.0f s", error, deadline - time.monotonic())
            time.sleep(_RETRY_SECONDS)


def _memory_store(url: str) -> Url:
    store = open_repository(url).store
    return MemoryStore(store.root) if type(store) is LocalStore else store


def memory_folder_name(record: str) -> str:
    """The folder in memory of the repository at a URL: readable, and no other's."""
    words = re.sub(r"[^A-Za-z0-9_-]+", "-", record.rstrip("/").rpartition("/")[2]).strip("-")[:40]
    return f"{words or 'run'}-{hashlib.sha256(record.encode()).hexdigest()[:12]}"


def url_of_subfolder(url: str, name: str) -> str:
    path, mark, query = url.partition("?")
    return f"{path.rstrip('/')}/{name}{mark}{query}"


def own_memory_folder(base: Path = Path("/dev/shm")) -> Path:
    """A folder in shared memory that is this user's alone."""
    folder = base / f"ckpt-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise StoreError(
            f'Tier("memory"): {folder} cannot be used: {error.strerror}; mount a tmpfs on {base}, set {MEMORY_VARIABLE} to '
            "a folder "
            "that is in memory, or leave the tier out"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise StoreError(
            f'Tier("memory"): {folder} belongs to another user; remove it, or set {MEMORY_VARIABLE} to a folder of yours'
        )
    return folder


def capacity_bytes(tier: Tier, repo: Repository) -> int | None:
    """The bytes that a tier may hold."""
    limit = tier.limit
    if limit is None and tier.url == MEMORY and isinstance(repo.store, LocalStore):
        limit = int(_SHARE_OF_MEMORY * (_free_bytes(repo.store.root) + stored_step_bytes(repo)))
    elif limit is None and tier.url == MEMORY and repo.url.startswith("ckpt://"):
        limit = int(_SHARE_OF_MEMORY * (_free_bytes("/dev/shm") * _hosts_per_copy(repo.url) + stored_step_bytes(repo)))
    if limit is not None:
        log.info("the tier %s may hold %.3f GB", repo.url, limit / 1e9)
    return limit


def _free_bytes(folder: str) -> int:
    """Of the memory of this host, as a folder that is in it and the kernel have it."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return available_memory()
    return min(found.f_bavail * found.f_frsize, available_memory())


def _hosts_per_copy(url: str) -> float:
    """Of a namespace in the memory of hosts that are alike: how many of them there are for each copy of a step."""
    from ckpt.aggregator.cluster.config import parse_namespace_url

    config, _ = parse_namespace_url(url)
    return len(config.members) / config.redundancy.overhead


# --- what belongs together --------------------------------------------------------------------------------------


def bind_to_repository(repos: Sequence[Repository], write_notes: bool) -> None:
    """Refuse near places that hold steps of another repository; note in each which one it belongs to."""
    *near, record = repos
    identity = record.identity()
    note = json_records.encode("tier", {"id": identity, "places": [repo.url for repo in repos]})
    for repo in near:
        try:
            known = read_tier_note(repo)
        except IntegrityError as error:
            _require_shared_step(repo, record, error)
            log.warning("%s; it is written again", error)
            continue
        if known is not None and known["id"] != identity and repo.step_numbers():
            raise InvalidArgument(
                f"{repo.url} holds steps of a repository that was at {known['places'][-1]} before, not of the one that is at "
                f"{record.url}; delete it if they are not wanted any more, or name another place"
            )
    if write_notes:
        for repo in near:
            repo.store.put(TIER_NOTE_NAME, note)


def _require_shared_step(repo: Repository, record: Repository, damage: IntegrityError) -> None:
    """Refuse a near place with steps whose note is damaged, unless something else proves that they belong to this repository:
    the `keep` of this job deletes steps there.

    In memory the name of the folder is derived from the URL of the repository. Elsewhere one step must be the same in both.
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
            f"{damage}. {repo.url} holds steps, and nothing else proves that they belong to {record.url}: delete "
            f"{TIER_NOTE_NAME} there "
            "if they do; else name another place, or delete the whole folder"
        )


def has_steps_of(repo: Repository, record: Repository) -> bool:
    """Whether steps of the repository of record can be read there, though it may be that none can be written: of two nodes
    with a copy each one is lost."""
    try:
        note = read_tier_note(repo)
        return note is not None and note["id"] == record.identity() and bool(repo.step_numbers())
    except IntegrityError:  # the name of a folder in memory is derived from the URL of the repository
        return repo.url.rstrip("/").endswith(f"/{memory_folder_name(record.url)}") and bool(repo.step_numbers())
    except CkptError:
        return False


def read_tier_note(repo: Repository) -> dict[str, Any] | None:
    """The note of a near place, None where it has none. Raises IntegrityError where the note is damaged."""
    where = f"{repo.url}/{TIER_NOTE_NAME}"
    try:
        note = json_records.load(repo.store, "tier", TIER_NOTE_NAME)
    except NotFound:
        return None
    json_records.parse_body(_TierNote, note, where)
    return note


@dataclass(frozen=True, slots=True)
class _TierNote:
    """What a note must hold."""

    id: str
    places: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.places:
            raise ValueError("it names no place")


def repair_marker(repo: Repository, tier: Tier) -> None:
    """Write the marker of a near place anew where it is damaged, or was removed: its steps are verified by themselves."""
    try:
        try:
            repo.check()
        except StepNotFound:  # it is made when the first step is saved there
            return
        except FormatError as error:
            if not _was_cleared(repo, tier):
                return
            log.warning("%s; it is written anew", error)
            repo.store.put(MARKER, new_marker())
    except IntegrityError as error:
        log.warning("%s; it is written anew", error)
        with suppress(StoreError):
            repo.store.put(MARKER, new_marker())
    except StoreError:  # told by what comes next
        pass


def _was_cleared(repo: Repository, tier: Tier) -> bool:
    """Whether somebody has removed the files of a near place while it was written to, and nothing is lost if it is used again.

    What still came after that is no step. One there may be that of another repository, but in memory: its name says whose.
    """
    names = [entry.name for entry in repo.store.list()]
    ours = all(name == TIER_NOTE_NAME or name.startswith(("steps/", "generations/", "lines/", "meet/")) for name in names)
    return bool(names) and ours and (tier.url == MEMORY or not any(name.endswith("/commit.json") for name in names))
