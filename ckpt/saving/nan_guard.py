"""The class NanGuard, which checks the blocks of a save for NaN, and logs one warning or refuses the save."""

from __future__ import annotations

import logging

from ckpt.errors import NotFinite
from ckpt.saving.nan_check import NanOption, checked_ranges, checked_ranges_of_plan, first_nan
from ckpt.saving.save_plan import SavePlan
from ckpt.state.leaves.base import Bytes
from ckpt.storage.base.forks import fork_safe_lock

log = logging.getLogger("ckpt")

_warned_urls: set[str] = set()
"""The repositories for which this process has logged a warning about a NaN."""
_warned_lock = fork_safe_lock()
"""Guards `_warned_urls`."""


class NanGuard:
    """The NaN check of one attempt, shared by its writer threads. url: the URL of the repository, for messages."""

    def __init__(self, plan: SavePlan, option: NanOption, url: str) -> None:
        self._plan = plan
        self._option = option
        self._url = url
        self._ranges = checked_ranges_of_plan(plan.blocks)
        """Filled block by block, and kept for later saves. Two threads that check one block store the same value."""
        self.is_active = option != "allow"
        """False after the first reported NaN. A thread that reads this too early checks one more block."""

    def check(self, number: int, data: Bytes) -> None:
        """Check the bytes of a block for NaN. Log one warning, or raise NotFinite if the option is "refuse".

        number: the index of the block in the plan.
        """
        block = self._plan.blocks[number]
        pieces_and_ranges = self._ranges.get(number)
        if pieces_and_ranges is None:
            pieces = [(self._plan.leaves[p.leaf].dtype, p.start, p.start + p.nbytes) for p in block.pieces]
            pieces_and_ranges = self._ranges[number] = pieces, checked_ranges(pieces)
        found = first_nan(data, *pieces_and_ranges)
        if found is not None:
            self._report(self._plan.name(block.pieces[found].leaf))

    def _report(self, name: str) -> None:
        step, url = self._plan.step, self._url
        if self._option == "refuse":
            raise NotFinite(
                f"leaf {name} has a NaN, so step {step} is not saved to {url} (nan='refuse'): restore() an earlier step, or "
                "save with nan='allow' if the NaN is intended"
            )
        self.is_active = False
        with _warned_lock:
            if url in _warned_urls:
                return
            _warned_urls.add(url)
        log.warning(
            "leaf %s has a NaN in step %d, which is saved to %s anyway; there is no further warning. Use nan='refuse' to "
            "refuse such steps, or nan='allow' if the NaN is intended", name, step, url,
        )  # fmt: skip
