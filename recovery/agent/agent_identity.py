"""Which agent this is: what stays the same of its reports as long as it lives."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ckpt.recovery.ranks import launch
from ckpt.recovery.ranks.signals import Signals
from ckpt.recovery.run_log.agent_reports import AgentReport


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """Of one start of an agent."""

    name: str
    """Of its host."""
    incarnation: str
    """Another after it was started again."""
    joined_at: float
    """Seconds since 1970."""
    pages: Path
    """Folder of the heartbeat pages of its ranks."""
    logs: Path
    address: str
    """Where the ranks of other hosts reach its own."""
    first_port: int
    """One that was free there when it began."""

    @property
    def mark(self) -> str:
        """What its ranks, and all they start, have in their environment."""
        return f"{launch.AGENT_VARIABLE}={self.incarnation}"

    def report(self, signals: Signals) -> AgentReport:
        """Of this agent, as long as it has no ranks."""
        return AgentReport(
            self.name,
            self.incarnation,
            self.joined_at,
            os.getpid(),
            str(self.pages),
            str(self.logs),
            self.address,
            self.first_port,
            leaving=signals.first,
            hurry=signals.count > 1,
        )
