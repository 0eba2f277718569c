"""What is one host's own in a run: its name, its folder, and how its ranks are started and watched."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ckpt.recovery.memory_tier.memory_nodes import NodeSecurity
from ckpt.recovery.policy.hang_limits import HangLimits


@dataclass(frozen=True, slots=True)
class HostOptions:
    """What is this host's own."""

    name: str
    folder: Path
    """Its lock, its ledger, the logs."""
    address: str = "127.0.0.1"
    """Where the ranks of other hosts reach its own."""
    limits: HangLimits = field(default_factory=HangLimits)
    shown_output: str = "0"
    """Whose output goes to the console: "0", "all" or "none"."""
    use_fork_server: bool = True
    """Ranks are forked from a process that has imported what they import, where that can be."""
    metrics: tuple[str, int] | None = None
    """Where /metrics is served."""
    through_mpi: bool = False
    """mpiexec starts the ranks, for programs that use MPI's own world."""
    begin_anew: bool = False
    """Begin anew where a run of several hosts has come to its end."""
    security: NodeSecurity | None = None
    """Of the nodes in the memory of this host, where there are several hosts; None: there are none."""
