"""`AgentIdentity`, the part of an agent's reports that does not change while the agent lives."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ckpt.recovery.ranks import launch
from ckpt.recovery.ranks.signals import Signals
from ckpt.recovery.run_log.agent_reports import AgentReport


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """The identity of an agent, from its start to its end."""

    name: str
    """The name of its host."""
    incarnation: str
    """A random name of this process of the agent. It differs after the agent has been started again."""
    joined_at: float
    """When the agent was started, in seconds since 1970."""
    pages: Path
    """The folder of the heartbeat pages of its ranks."""
    logs: Path
    """The folder of the logs of its ranks."""
    address: str
    """The address at which ranks of other hosts reach its ranks."""
    first_port: int
    """A port that was free at that address when the agent started."""

    @property
    def mark(self) -> str:
        """The environment variable that its ranks, and all processes that they start, have."""
        return f"{launch.AGENT_VARIABLE}={self.incarnation}"

    def report(self, signals: Signals) -> AgentReport:
        """Return the report of this agent while it has no ranks."""
        return AgentReport(
            name=self.name,
            incarnation=self.incarnation,
            joined=self.joined_at,
            pid=os.getpid(),
            pages=str(self.pages),
            logs=str(self.logs),
            address=self.address,
            port=self.first_port,
            leaving=signals.first,
            hurry=signals.count > 1,
        )
