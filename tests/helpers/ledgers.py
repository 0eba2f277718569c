"""Checks of the goodput ledger of a run."""

from __future__ import annotations

from itertools import pairwise

from ckpt.recovery.goodput.ledger import (
    LedgerSpan,
)

ROUNDING = 1e-4
"""Each span is rounded to a microsecond."""


def assert_no_gap(found: list[LedgerSpan]) -> None:
    """Check that each span begins where the one before ends."""
    for one, other in pairwise(found):
        assert abs(other.began - one.at) < ROUNDING, (one, other)
