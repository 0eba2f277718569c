"""Delete the steps in memory tiers at the end of a job, and the commit records that this leaves."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

from ckpt.errors import Fenced
from ckpt.groups.base import Group
from ckpt.repository.file_names import STEPS_FOLDER, commit_name, is_commit_name, step_folder
from ckpt.repository.repository import Repository
from ckpt.storage.base.errors import CkptError, IntegrityError, NotFound, StoreError
from ckpt.tiers.open_tier import OpenTier
from ckpt.tiers.tier_spec import MEMORY

log = logging.getLogger("ckpt")

_DRAIN_ADVICE = "the job copies its steps when it is started again; to copy them without it, call ckpt.tiers.drain"


def free_memory(
    open_tiers: Sequence[OpenTier], group: Group, step: int, newest: tuple[int, int] | None, skipped: int | None = None
) -> None:
    """Delete the steps in memory tiers, after a check that the repository of record has the newest step.

    A memory that a newer job has taken over stays: it may have later steps of that job. A memory with a newer step than this
    job has restored or saved stays, too: this job could not read that step, and the next job may be able to.

    step: the number of the newest step, which the repository of record must have; -1 if there is none.
    newest: training line and number of the step that this job restored or saved last.
    skipped: a later step that this rank has left out. The other ranks may still write files of it, which they delete when they
        learn that it is left out.
    """
    main_repo = open_tiers[-1].session.repo
    try:
        if group.rank == 0 and step >= 0:
            main_repo.record(step)
    except CkptError as error:
        log.warning(
            "the memory is not freed, because step %d can't be read from %s (%s); %s", step, main_repo.url, error, _DRAIN_ADVICE
        )
        return
    for tier in open_tiers[:-1]:
        store = tier.session.repo.store
        if group.rank == 0 and tier.spec.url == MEMORY and tier.session.user_count == 1:
            try:
                if newer := _newer_steps(tier.session.repo, step, newest):
                    log.warning(
                        "the memory at %s is kept: it has step %d, which this job did not restore; %s", tier.url, newer[-1],
                        _DRAIN_ADVICE,
                    )  # fmt: skip
                    continue
                names = [entry.name for entry in store.list(STEPS_FOLDER)]
                if group.size > 1 and newest is not None:  # another rank may still wait for this commit record
                    names = [name for name in names if name != commit_name(newest[1])]
                if skipped is not None:
                    names = [name for name in names if not name.startswith(f"{step_folder(skipped)}/")]
                tier.session.writer_lease.require_newest()  # after the listing, so that no later step is in it
                store.delete([name for name in names if is_commit_name(name)])
                store.delete(names)
                if skipped is None:
                    store.sweep_temporaries("")
            except (Fenced, StoreError) as error:
                log.warning("the memory at %s could not be freed: %s; delete the folder when no job uses it", tier.url, error)


def _newer_steps(repo: Repository, step: int, newest: tuple[int, int] | None) -> list[int]:
    """Return the steps that are or may be newer than the newest one of the job.

    Where a commit record can't be read, the number of the step decides, unless it may be on a newer line.
    """
    found = repo.lines()
    newer = [other for other, line in found.known.items() if newest is not None and (line.number, other) > newest]
    may_be_on_newer_line = newest is None or found.order.newest_line.number > newest[0]
    return sorted([*newer, *(other for other in found.errors if other > step or may_be_on_newer_line)])


def remove_freed_commits(repo: Repository, main_repo: Repository) -> None:
    """Remove commit records without files, which `free_memory` has left for ranks that were waiting for them.

    A commit record is removed only if the repository of record has a readable one of the same save or a later one. Otherwise it
    may be the only one.
    """
    for step in repo.step_numbers():
        name = commit_name(step)
        if [entry.name for entry in repo.store.list(step_folder(step))] != [name]:
            continue
        with suppress(NotFound, IntegrityError):
            if main_repo.record(step).save_order >= repo.record(step).save_order:
                repo.store.delete([name])
