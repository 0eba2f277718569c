"""Registry of the steps that this process found damaged, by the URL of their repository.

A save never refers to blocks of such a step, and retention does not count it as complete. A run that falls back repeats the
step and computes the same blocks, bit for bit. Those must be written again.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckpt.repository.repository import Repository
from ckpt.storage.base.forks import fork_safe_lock

_lock = fork_safe_lock()
"""Guards `_damaged`."""
_damaged: dict[str, set[int]] = {}


def damaged_steps(repo: Repository) -> frozenset[int]:
    """Return the steps of the repository that are marked as damaged."""
    with _lock:
        return frozenset(_damaged.get(repo.url, ()))


def mark_damaged(repo: Repository, steps: Iterable[int]) -> None:
    """Mark steps as damaged in this repository; for one with several tiers see `mark_damaged_in_all_tiers`."""
    with _lock:
        _damaged.setdefault(repo.url, set()).update(steps)


def mark_damaged_in_all_tiers(repo: Repository, steps: Iterable[int]) -> None:
    """Mark steps as damaged in every tier of the repository."""
    steps = list(steps)
    for tier in repo.tiers:
        mark_damaged(tier, steps)


def clear_damaged(repo: Repository, step: int | None = None) -> None:
    """Remove the mark of a step that was written again; without a step, all marks of the repository."""
    with _lock:
        if step is None:
            _damaged.pop(repo.url, None)
        else:
            _damaged.get(repo.url, set()).discard(step)
