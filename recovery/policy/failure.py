"""The failure of an attempt: what the coordinator knows of it, and its text for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ckpt.training.heartbeat_records import BadLoss

Cause = Literal[
    "exit", "unusable", "damaged", "signal", "out of memory", "hang", "stopped", "lost", "diverged", "preempted", "straggler",
    "asked",
]  # fmt: skip

PLANNED_CAUSES: frozenset[Cause] = frozenset({"preempted", "straggler", "asked"})
"""Causes that are not failures: all ranks were requested to save and end."""


SOON_STEPS = 32
"""A failure within this many steps after a restored or a committed step may be caused by that step."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt ended."""

    cause: Cause
    ranks: tuple[int, ...]
    """The ranks that failed first. The other ranks were stopped because of them."""
    detail: str
    """Text: what happened to these ranks."""
    step: int
    """The last step that all ranks had done; -1 none."""
    committed: int
    """The newest committed step; -1 none."""
    ran_seconds: float
    host: str = ""
    """The host of the ranks that failed first."""
    bad: BadLoss | None = None
    """The loss that was not finite or jumped, if the cause is "diverged"."""
    log: str = ""
    """The log file of the first of these ranks; "" if there is none."""
    restored: int = -1
    """The step that this attempt resumed from; -1 none."""
    durable: int = -1
    """The newest step that is committed outside of the memory of hosts; -1 none."""
    step_seconds: float = 0.0
    """The duration of one step."""
    line: int = 0
    """The training line of the newest committed step; 0 if this attempt committed none."""
    uses_ckpt: bool = False
    """Whether a rank has opened a `Checkpointer`, and so reports its steps."""

    @property
    def newest_committed(self) -> tuple[int, int]:
        """Line and number of the newest committed step. A step of a later line is newer, whatever its number."""
        return self.line, self.committed

    @property
    def is_soon_after_restore(self) -> bool:
        """Whether it came so soon after the restore of a step that this step may be the cause."""
        return 0 <= self.step - self.restored <= SOON_STEPS

    @property
    def is_of_program(self) -> bool:
        """Whether the program itself failed. SIGKILL and SIGTERM come from outside: no program ends itself by them."""
        if self.cause == "signal":
            return not self.detail.endswith(("SIGKILL", "SIGTERM"))
        return self.cause in ("exit", "hang")


def describe_failure(ranks: Sequence[int], detail: str, host: str = "") -> str:
    """Return a text that names the ranks and what happened to them. If `ranks` is empty, the whole host failed."""
    if not ranks:
        return f"host {host} {detail}"
    verb, _, rest = detail.partition(" ")
    forms = {"was": "were", "has": "have"} if len(ranks) > 1 else {"were": "was", "have": "has"}
    who = "rank" if len(ranks) == 1 else "ranks"
    return f"{who} {', '.join(map(str, ranks[:8]))}{' …' if len(ranks) > 8 else ''} {forms.get(verb, verb)} {rest}".rstrip()
