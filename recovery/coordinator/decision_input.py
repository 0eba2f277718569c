"""The class DecisionInput: all that the next entries of the run log may depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt.recovery.run_log.agent_reports import AgentReport
from ckpt.recovery.run_log.run_state import RunState


@dataclass(frozen=True, slots=True)
class DecisionInput:
    """All that a decision may depend on."""

    run_state: RunState
    living: Mapping[str, AgentReport]
    """The reports of living agents, by name."""
    maybe_living: Mapping[str, AgentReport]
    """These, and the reports of agents that were observed too briefly to know whether they are alive."""
    waited_seconds: float
    """The time since the last entry that changed the phase of the run was first read."""
    ran_seconds: float = 0.0
    """The time since the attempt began."""
    silent: Mapping[str, AgentReport] = field(default_factory=dict)
    """The last reports of hosts that are silent now."""
    silent_since_failure: frozenset[str] = frozenset()
    """The hosts without a new report since a failure was first seen."""
