"""The search for a seed that finds a fault which a test has put back into the product."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

SEEDS = 3_000
NOT_FOUND = f"{SEEDS:,} seeds found nothing"


def first_found(run: Callable[[int], object], promises: Sequence[str], known_seed: int) -> int:
    """Return the first seed that finds a broken promise; -1 if none does. `known_seed` is tried first, then 0 to 2,999.

    run: makes the run of a seed, and raises AssertionError if a promise is broken.
    promises: parts of the messages of which this error must have one.
    """
    for seed in itertools.chain([known_seed], range(SEEDS)):
        try:
            run(seed)
        except AssertionError as error:
            assert any(promise in str(error) for promise in promises), error
            if seed != known_seed:
                print(f"seed {known_seed} finds nothing any more, seed {seed} does: note it, so that the search is short")
            return seed
    return -1
