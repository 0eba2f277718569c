"""Remembers which committed steps are complete: each array in the tree of a step is in its manifests.

The commit record proves that tree and manifests are the files that were written. It does not prove that they match.
"""

from __future__ import annotations

import logging

from ckpt.format.json_records import CommitRecord, StepFile
from ckpt.repository.checkpoint import Checkpoint
from ckpt.storage.base.errors import CkptError, IntegrityError
from ckpt.storage.base.forks import fork_safe_lock
from ckpt.storage.base.store import Store

log = logging.getLogger("ckpt")

_StepFiles = tuple[tuple[StepFile, ...], tuple[StepFile, ...]]

_lock = fork_safe_lock()
"""Guards changes of `_complete_steps`."""
_complete_steps: dict[_StepFiles, None] = {}
"""The manifests and the trees, with their digests, of complete steps. An entry stays valid: the digests fix the bytes."""
_MAX_REMEMBERED = 4096
"""The most entries of `_complete_steps`; the oldest one is removed first."""


def is_complete(store: Store, commit: CommitRecord) -> bool:
    """Return whether a step is complete; False also if its files can't be read.

    The files are read once in a process, and never if this process has committed the step.
    """
    if (commit.manifests, commit.trees) in _complete_steps:
        return True
    try:
        Checkpoint(store, commit).require_complete()
    except IntegrityError as error:
        log.warning("step %d counts as damaged: %s", commit.step, error)
        return False
    except CkptError as error:
        log.warning("step %d does not count as complete, because it can't be read now: %s", commit.step, error)
        return False
    note_complete(commit)
    return True


def note_complete(commit: CommitRecord) -> None:
    """Record that a step is complete: its tree was compared with its manifests, or this process made both of the same rows."""
    with _lock:
        _complete_steps[commit.manifests, commit.trees] = None
        while len(_complete_steps) > _MAX_REMEMBERED:
            del _complete_steps[next(iter(_complete_steps))]
