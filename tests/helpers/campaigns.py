"""The number of cases that a test of `make soak` tries, for the page that it writes (`.ci/campaigns.py`)."""

from __future__ import annotations

from collections.abc import Callable

CountCases = Callable[[int], None]
"""The fixture `count_cases`. Its calls add up."""
