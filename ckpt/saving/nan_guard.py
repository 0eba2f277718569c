"""What a save does about a NaN in its leaves: nothing, one warning a repository and process, or a refusal."""

from __future__ import annotations

import logging
import threading

from ckpt.errors import NotFinite
from ckpt.saving.nan_check import NanOption, checked_ranges, checked_ranges_of_plan, first_nan
from ckpt.saving.save_plan import SavePlan
from ckpt.state.leaves.base import Bytes

log = logging.getLogger("ckpt")

_warned_urls: set[str] = set()
"""Repositories of which this process has warned of a NaN."""
_warned_lock = threading.Lock()
"""Guards `_warned_urls`."""


class NanGuard:
    """Of one attempt, shared by the threads that write. url: of the repository."""

    def __init__(self, plan: SavePlan, option: NanOption, url: str) -> None:
        self._plan = plan
        self._option = option
        self._url = url
        self._ranges = checked_ranges_of_plan(plan.blocks)
        """Filled block by block, and kept for later saves: two threads that look at one block write the same."""
        self.is_active = option != "allow"
        """Until a NaN was reported; a thread that sees that late looks at one block more."""

    def check(self, number: int, data: Bytes) -> None:
        """Look at the bytes of a block of the plan; raise NotFinite where it has a NaN and that is refused."""
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
                f"leaf {name} has a NaN, and step {step} is not saved to {url} (nan='refuse'): go on from an earlier "
                "step with restore(), or save with nan='allow' where it belongs there"
            )
        self.is_active = False
        with _warned_lock:
            if url in _warned_urls:
                return
            _warned_urls.add(url)
        log.warning(
            "leaf %s has a NaN in step %d, which is saved to %s all the same; there is no further warning. nan='refuse' "
            "keeps such steps from being saved, nan='allow' is for a NaN that belongs there", name, step, url,
        )  # fmt: skip
