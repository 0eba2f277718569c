"""The memory of earlier attempts: found in the environment of a rank, waited for, and read if it has steps of this run."""

from __future__ import annotations

import logging
import os
import time

from ckpt.repository.repository import Repository, open_repository
from ckpt.storage.base.call_timeout import WaitTimer
from ckpt.storage.base.errors import InvalidArgument, Unavailable
from ckpt.storage.base.store import Store
from ckpt.tiers.memory_folder import MEMORY_WAIT_VARIABLE, PREVIOUS_MEMORY_VARIABLE
from ckpt.tiers.tier_note import has_steps_of
from ckpt.tiers.tier_spec import memory_folder_name, url_of_subfolder

log = logging.getLogger("ckpt")

_RETRY_SECONDS = 0.5
_ANSWER_SECONDS = 3.0
"""A host whose memory does not answer within this time counts as lost."""


def previous_memories(main_repo: Repository) -> list[Repository]:
    """Return the memory of earlier attempts that has steps of the repository of record, the newest first.

    A memory that does not answer counts as lost, and is named in the log. Raises StoreError if a memory answers and its note
    can't be read now, and FormatError if a newer version has written the note: without this memory, the job would continue
    from an older step.
    """
    found = []
    seconds, awaited = _memory_wait_from_env()
    for url in os.environ.get(PREVIOUS_MEMORY_VARIABLE, "").split():
        repo = open_repository(url_of_subfolder(url, memory_folder_name(main_repo.url)), main_repo.keys)
        try:
            if _can_have_steps(repo.store, WaitTimer(seconds if url == awaited else 0.0)) and has_steps_of(repo, main_repo):
                found.append(repo)
                log.info("also reading %s, the memory of the previous attempt", repo.url)
        except Unavailable as error:
            log.warning("the memory of the previous attempt is lost: %s", error)
    return found


def _memory_wait_from_env() -> tuple[float, str]:
    """Return how many seconds to wait, and for the memory at which URL."""
    text = os.environ.get(MEMORY_WAIT_VARIABLE, "")
    seconds, _, url = text.partition(" ")
    try:
        return float(seconds or 0.0), url
    except ValueError as error:
        raise InvalidArgument(
            f"{MEMORY_WAIT_VARIABLE}={text!r} is not SECONDS URL; unset it: ckpt-run sets it for its ranks"
        ) from error


def _can_have_steps(store: Store, timer: WaitTimer) -> bool:
    """Return whether a store may have steps; raise Unavailable if it does not answer within the time of the timer."""
    while True:
        try:
            return store.answers(_ANSWER_SECONDS)
        except Unavailable as error:
            if not (remaining_seconds := timer.remaining_seconds()):
                raise
            log.warning("%s; retrying for at most %.0f s", error, remaining_seconds)
            time.sleep(_RETRY_SECONDS)
