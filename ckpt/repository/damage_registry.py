"""Steps that this process found damaged, by the URL of their repository.

Nothing refers to such a step, and it does not count as a good one. A run that falls back comes by the step again and makes the
same blocks, bit for bit: those must be written anew.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from ckpt.repository.repository import Repository

_lock = threading.Lock()
_damaged: dict[str, set[int]] = {}
"""Guarded by `_lock`."""


def damaged_steps(repo: Repository) -> frozenset[int]:
    """The steps of the repository that were marked and not cleared since."""
    with _lock:
        return frozenset(_damaged.get(repo.url, ()))


def mark_damaged(repo: Repository, steps: Iterable[int]) -> None:
    """These steps are damaged in this repository; where it has several tiers, see `mark_damaged_in_all_tiers`."""
    with _lock:
        _damaged.setdefault(repo.url, set()).update(steps)


def mark_damaged_in_all_tiers(repo: Repository, steps: Iterable[int]) -> None:
    """These steps are damaged in every tier that has them."""
    steps = list(steps)
    for place in repo.places:
        mark_damaged(place, steps)


def clear_damaged(repo: Repository, step: int | None = None) -> None:
    """The step was written anew; without a step: every mark of the repository is removed."""
    with _lock:
        if step is None:
            _damaged.pop(repo.url, None)
        else:
            _damaged.get(repo.url, set()).discard(step)
