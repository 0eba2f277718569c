"""What callbacks of several frameworks need of the fit that calls them: its local variables, and its state."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any


class FitState:
    """The state of a fit, which is collected only if a step is saved.

    collect: returns the state.
    loadable: a dict with some of its entries, for the message to a caller that tries to load this object.
    """

    def __init__(self, collect: Callable[[], dict[str, Any]], loadable: str) -> None:
        self._collect = collect
        self._loadable = loadable

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the fit as it is now."""
        return self._collect()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise TypeError: a fit is restored at its start, from the entries of its state."""
        raise TypeError(f"the state of a fit is loaded by entries: give a dict of some of them, such as {self._loadable}")


def caller_locals(function: str, is_searched: Callable[[Mapping[str, object]], bool]) -> dict[str, Any] | None:
    """Return the local variables of the innermost running function of this name for which `is_searched` is true; else None."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function and is_searched(frame.f_locals):
            return dict(frame.f_locals)
        frame = frame.f_back  # type: ignore[assignment]
    return None
