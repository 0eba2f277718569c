"""What to do when a job has stopped. Pure: the live coordinator and the simulator call the same, and tests need no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Cause = Literal["exit", "signal", "out of memory", "hang", "stopped", "preempted", "asked"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt ended."""

    cause: Cause
    ranks: tuple[int, ...]
    """Those that failed first; the others were stopped for it."""
    detail: str
    """In words: what happened to them."""
    step: int
    """The last step that all had done; -1 none."""
    committed: int
    """The newest committed step; -1 none."""
    ran_seconds: float


@dataclass(frozen=True, slots=True)
class Budget:
    """How many restarts are left. Progress fills it again."""

    most: int = 10
    left: int = 10
    useless: int = 0
    """Failures in a row after which no newer step was committed."""
    best: int = -1
    """The newest step that was ever committed."""

    def after(self, failure: Failure) -> Budget:
        """With one attempt more."""
        if failure.committed > self.best:
            return replace(self, left=self.most - 1, useless=0, best=failure.committed)
        return replace(self, left=self.left - 1, useless=self.useless + 1)


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done next, and why."""

    action: Literal["restart", "halt"]
    reason: str
    wait_seconds: float = 0.0
    budget: Budget = Budget()


USELESS = 3
"""So many failures in a row at the same place, and it is the program that must be mended."""


def decide(failures: Sequence[Failure], budget: Budget) -> Decision:
    """What to do after the last of these failures. budget: before it."""
    last = failures[-1]
    now = budget.after(last)
    what = f"{_ranks(last.ranks)} {last.detail} {_at(last)}"
    if last.cause in ("preempted", "asked"):
        return Decision("halt", what, budget=now)
    alike = [f for f in failures[-USELESS:] if (f.cause, f.step) == (last.cause, last.step)]
    if now.useless >= USELESS and len(alike) >= USELESS:
        reason = f"{what}; {USELESS} times in a row, at the same place, with no newer step saved: look at the log"
        return Decision("halt", reason, budget=now)
    if now.left < 0:
        return Decision("halt", f"{what}; {now.most} restarts without a newer step: look at the log", budget=now)
    source = f"from step {last.committed}, or a newer one" if last.committed >= 0 else "from what is saved, if anything"
    # At once after progress; where it fails again and again, something outside may need time.
    wait = 0.0 if now.useless <= 1 else min(30.0, 0.5 * 2.0 ** (now.useless - 2))
    return Decision("restart", f"{what}; all ranks start again {source}", wait, now)


def _at(failure: Failure) -> str:
    return f"after step {failure.step}" if failure.step >= 0 else "before the first step"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:8]))}{' …' if len(ranks) > 8 else ''}"
