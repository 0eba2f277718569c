"""The function drain, which copies the newest steps in memory to their repositories without the program that saved them."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import dataclass

from ckpt.groups.base import SingleProcessGroup
from ckpt.repository.attempt import SerialCounter
from ckpt.repository.file_names import commit_name
from ckpt.repository.repository import Repository, Url, open_repository
from ckpt.repository.tiered_repository import TieredRepository
from ckpt.saving import session_registry
from ckpt.saving.writer_session import WriterSession
from ckpt.storage.base.errors import CkptError, IntegrityError, InvalidArgument, NotFound, StoreError, Unavailable
from ckpt.storage.base.store import Store
from ckpt.tiers.copy_step import missing_packs, promote
from ckpt.tiers.drain_report import DrainReport, copied_step_line
from ckpt.tiers.tier_note import TIER_NOTE_NAME, TierNote, read_tier_note
from ckpt.tiers.tier_spec import url_of_subfolder

log = logging.getLogger("ckpt")

NOT_DRAINED = "could not be drained"
"""In each line of the report of `drain` about memory that must be kept. `drain_memories` also returns that as a flag."""
_EXPORT_ADVICE = "copy the steps that you need with ckpt-restore"
_ANSWER_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _DrainedRepository:
    """The result for one repository in memory."""

    line: str = ""
    """A line of the report; "" if no step was only in memory."""
    newest: tuple[int, int] | None = None
    """The training line and the number of the newest step; None if this memory had no step when it was read. A job that still
    runs may save one a moment later."""
    was_copied: bool = False


def _has_steps(repo: Repository) -> bool:
    """Return whether a repository has a committed step."""
    return any(repo.store.exists(commit_name(step)) for step in reversed(repo.step_numbers()))


def drain(memory: Url, *before: Url) -> str:
    """Copy the newest step of each repository in a memory tier to its repository of record, without the program that saved it.

        print(ckpt.tiers.drain("/dev/shm/ckpt-1000"))

    memory: the folder or URL of the memory, as in CKPT_MEMORY.
    before: memory of earlier attempts, the newest first. A repository is copied from there, too, if the later ones have only
        older steps of it, or none.

    Returns:
        A report with one line for each repository that was copied, was already up to date, or failed. It raises no error of a
        store or a repository; a line of a failure contains "could not be drained".

    Raises:
        InvalidArgument: An argument is not a path or a URL.
        UnknownScheme: No store serves a URL.
    """
    return drain_memories(memory, *before).text


def drain_memories(memory: Url, *before: Url, rolled_back: bool = False) -> DrainReport:
    """Copy steps as `drain` does, which explains the parameters, and return the report with its flags.

    It raises no error of a store or a repository.

    rolled_back: whether `ckpt-run` has made the job restore an older step than the newest. Later steps in memory that could not
        be read then may be bad, so a repository is copied from earlier memory only if the later ones have no step of it.
    """
    lines, unread, drained = list[str](), list[str](), dict[str, tuple[int, int]]()
    has_copied = has_failed = False
    for each in (memory, *before):
        store = open_repository(each).store
        url = store.url if isinstance(each, Store) else os.fspath(each)
        try:
            names = sorted(store.list_folders("")) if store.answers(_ANSWER_SECONDS) else []
        except StoreError as error:
            if drained and isinstance(error, Unavailable):
                log.info("%s does not answer, and counts as lost: %s", store.url, error)
                unread.append(url)
            else:  # an older memory may have steps of other repositories than those that were drained
                lines.append(f"{store.url} {NOT_DRAINED}: {error}")
                has_failed = True
            continue
        for name in names:
            if name in drained and rolled_back:
                continue
            repo = open_repository(url_of_subfolder(url, name))
            try:
                # An earlier memory has a newer step if the job continued from an older one because this memory did not answer.
                if name in drained and repo.newest() <= drained[name]:
                    continue
            except (CkptError, OSError) as error:
                log.info("%s can't be read, and counts as lost: %s", repo.url, error)
                unread.append(url)
                continue
            try:
                result = _drain_repository(repo)
            except (CkptError, OSError) as error:
                lines.append(f"{repo.url} {NOT_DRAINED}: {error}")
                has_failed = True
                continue
            lines.append(result.line)
            has_copied |= result.was_copied
            if result.newest is not None:  # files of attempts that never committed do not replace an older memory
                drained[name] = result.newest
    newest_step = max((step for _, step in drained.values()), default=-1)
    return DrainReport("\n".join(filter(None, lines)), has_copied, has_failed, newest_step, tuple(unread))


def _require_tier_note(repo: Repository) -> TierNote | None:
    """Return the note of a tier, or None if the tier has no step that could be lost.

    Raises IntegrityError if the tier has steps, and its note is missing or damaged.
    """
    try:
        note = read_tier_note(repo)
    except IntegrityError as error:
        if not _has_steps(repo):
            return None
        raise IntegrityError(f"{error}; {repo.url} has steps and counts as not drained: {_EXPORT_ADVICE}") from error
    if note is None and _has_steps(repo):
        raise IntegrityError(
            f"{repo.url}/{TIER_NOTE_NAME} is missing, and {repo.url} has steps and counts as not drained: {_EXPORT_ADVICE}"
        )
    return note


def _drain_repository(repo: Repository) -> _DrainedRepository:
    """Copy the newest step of one repository in memory to its repository of record.

    If this memory had no step, the memories before it are still needed.
    """
    note = _require_tier_note(repo)
    if note is None:
        return _DrainedRepository()
    repos = [repo if url == repo.url else open_repository(url) for url in note.places]
    main_repo = repos[-1]
    if main_repo.identity() != note.id:
        raise InvalidArgument(f"{main_repo.url} is another repository now; {_EXPORT_ADVICE}")
    had_steps = repo.newest()[1] >= 0
    # The note of a folder that was moved or copied does not name it.
    source = TieredRepository([repo, *(r for r in repos if r is not repo and r is not main_repo)])
    newest, there = _newest(source), main_repo.newest()
    step = newest[1]
    found = newest if had_steps else None
    if step < 0:
        return _DrainedRepository()
    with suppress(NotFound, IntegrityError):
        newer = there > newest and main_repo.record(there[1]).save_order > source.commit(step).save_order
        if newer and not missing_packs(main_repo, main_repo.record(there[1])):
            line_of_newer = f"{main_repo.url} has step {there[1]} already, which is newer than step {step} in {repo.url}"
            return _DrainedRepository(line_of_newer, found)
    series = SerialCounter(repos)
    opened: list[WriterSession] = []
    try:
        opened.append(session_registry.enter(main_repo, SingleProcessGroup(), series))
        for near in repos[:-1]:
            try:
                opened.append(session_registry.enter(near, SingleProcessGroup(), series))
            except StoreError as error:  # e.g. a host is lost; the lease of the repository of record is enough
                log.info("%s can't be written, and is only read: %s", near.url, error)
        # Again, because a job that still runs may have saved one until it lost its lease just now.
        training_line, step = _newest(source)
        done = promote(source, step, opened[0], line=training_line)
    finally:
        for session in opened:
            session_registry.leave(session)
    report = copied_step_line(step, repo.url, main_repo.url) if done else f"{main_repo.url} has step {step} already"
    return _DrainedRepository(report, found, was_copied=done)


def _newest(source: TieredRepository) -> tuple[int, int]:
    """Return the training line and the number of the newest step of all tiers; (-1, -1) if they have none."""
    return max(tier.newest() for tier in source.tiers)
