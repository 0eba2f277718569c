"""What a rank publishes to its agent in a heartbeat, as frozen records. `heartbeat_page.py` publishes and reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Trouble = Literal["", "unusable", "damaged"]
"""An error that a restart does not fix. unusable: an argument of the rank, such as the URL. damaged: all saved steps."""

BadLossKind = Literal["not finite", "spike"]


@dataclass(frozen=True, slots=True)
class BadLoss:
    """A loss that shows that training has diverged."""

    step: int
    kind: BadLossKind
    loss: float
    limit: float
    """The limit that the loss exceeded; infinite if the loss is not finite."""
    batch: int
    """The global batch that the loop took last (`ckpt.training.data_loader`); -1 if unknown."""


@dataclass(frozen=True, slots=True)
class RankHeartbeat:
    """The state that a rank published last."""

    beats: int
    step: int
    """The step done last; -1 before the first."""
    phase: str
    since: float
    """The time of the last heartbeat, in seconds of CLOCK_MONOTONIC."""
    committed: int
    """The newest step that the rank knows to be committed; -1 if none."""
    loss: float
    """The loss of the newest step that has one; NaN before the first."""
    pid: int
    acknowledged_stop: int | None = None
    """The stop step that the rank has acknowledged."""
    bad: BadLoss | None = None
    """The first bad loss of this process."""
    compute_seconds: float = 0.0
    """The sum of all times marked by `compute`."""
    trouble: Trouble = ""
    """Set if the rank fails for a reason that a restart does not fix."""
    restored: int = -1
    """The step from which the rank continued; -1 if none."""
    ended: bool = False
    """Whether the process has ended. The agent writes this field."""
    sigterm_at: float = 0.0
    """When the process last got SIGTERM, in seconds of CLOCK_MONOTONIC; 0 if never."""
    durable: int = -1
    """The newest step that the rank knows to be committed outside of the memory of hosts; -1 if none."""
    line: int = 0
    """The training line of the step that the rank committed last; 0 before the first."""
