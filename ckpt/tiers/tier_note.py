"""The note in a tier, `tier.json`, which names the repository of record, so that no tier mixes steps of two repositories."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ckpt.errors import FormatError, StepNotFound
from ckpt.format import json_records
from ckpt.repository.file_names import FOLDERS, is_commit_name
from ckpt.repository.repository import MARKER, Repository, new_marker
from ckpt.storage.base.errors import IntegrityError, InvalidArgument, NotFound, StoreError
from ckpt.tiers.tier_spec import MEMORY, Tier, memory_folder_name

log = logging.getLogger("ckpt")

TIER_NOTE_NAME = "tier.json"
"""The name of the file in a tier that names its repository of record."""


def bind_to_repository(repos: Sequence[Repository], write_notes: bool) -> None:
    """Raise InvalidArgument if a tier has steps of another repository; write into each tier a note of its repository.

    repos: the tiers, the nearest first; the last is the repository of record.
    """
    *near, main_repo = repos
    identity = main_repo.identity()
    note = json_records.encode("tier", {"id": identity, "places": [repo.url for repo in repos]})
    for repo in near:
        try:
            known = read_tier_note(repo)
        except IntegrityError as error:
            _require_shared_step(repo, main_repo)
            log.warning("%s; writing it again", error)
            continue
        if known is None:
            _require_shared_step(repo, main_repo)
        elif known.id != identity and repo.step_numbers():
            raise InvalidArgument(
                f"{repo.url} has steps of the repository that was at {known.places[-1]}, not of the one at {main_repo.url}; "
                "delete the folder if nobody needs these steps, or use another URL for this tier"
            )
    if write_notes:
        for repo in near:
            repo.store.put(TIER_NOTE_NAME, note)


def _require_shared_step(repo: Repository, main_repo: Repository) -> None:
    """Raise InvalidArgument if a tier without a usable note has steps, and nothing else proves that they belong to `main_repo`.

    The `keep` of this job would delete the steps. In memory, the name of the folder is the proof, because it is derived from
    the URL of the repository. Elsewhere, one step must be the same in both.
    """
    if repo.url.rstrip("/").endswith(f"/{memory_folder_name(main_repo.url)}"):
        return
    steps = repo.step_numbers()
    for step in steps:
        with suppress(NotFound, IntegrityError):
            if repo.record(step) == main_repo.record(step):
                return
    if steps:
        raise InvalidArgument(
            f"{repo.url} has steps that may be of another repository than {main_repo.url} (no usable {TIER_NOTE_NAME}): use "
            "another URL for this tier, or delete the folder"
        )


def has_steps_of(repo: Repository, main_repo: Repository) -> bool:
    """Return whether steps of the repository of record can be read from a tier.

    Writing may still be impossible, for example if one of two nodes with a copy each is lost.

    Raises StoreError if the note can't be read now, and FormatError if a newer version has written it: the newest step may be
    in this tier.
    """
    try:
        note = read_tier_note(repo)
        return note is not None and note.id == main_repo.identity() and bool(repo.step_numbers())
    except IntegrityError:  # the name of a folder in memory is proof, too: it is derived from the URL of the repository
        return repo.url.rstrip("/").endswith(f"/{memory_folder_name(main_repo.url)}") and bool(repo.step_numbers())


def read_tier_note(repo: Repository) -> TierNote | None:
    """Return the note of a tier, or None if it has none. Raises IntegrityError if the note is damaged."""
    where = f"{repo.url}/{TIER_NOTE_NAME}"
    try:
        body = json_records.load(repo.store, "tier", TIER_NOTE_NAME)
    except NotFound:
        return None
    return json_records.parse_body(TierNote, body, where)


def can_read_steps_of(repo: Repository, main_repo: Repository) -> bool:
    """Return `has_steps_of`; False, with a line in the log, if a tier that can't be written can't be read, either."""
    try:
        return has_steps_of(repo, main_repo)
    except (StoreError, FormatError) as error:
        log.warning("the tier %s is not read: %s", repo.url, error)
        return False


@dataclass(frozen=True, slots=True)
class TierNote:
    """The content of the note of a tier."""

    id: str
    """The identity of the repository of record."""
    places: tuple[str, ...]
    """The URLs of the tiers, the nearest first; the last is the repository of record."""

    def __post_init__(self) -> None:
        if not self.places:
            raise ValueError("it names no tier")


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
    folders = tuple(f"{folder}/" for folder in FOLDERS)
    are_ours = all(name == TIER_NOTE_NAME or name.startswith(folders) for name in names)
    return bool(names) and are_ours and (tier.url == MEMORY or not any(map(is_commit_name, names)))
