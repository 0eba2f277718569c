"""`HostOptions`, the options of one host: its name, its folder, and how its ranks are started and watched."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ckpt.recovery.policy.hang_limits import HangLimits
from ckpt.storage.node.security_options import NodeSecurity


@dataclass(frozen=True, slots=True)
class HostOptions:
    """The options of one host. Those that are the same on all hosts are in `RunSpec`."""

    name: str
    folder: Path
    """The folder for the lock of this host, its ledger and the logs."""
    address: str = "127.0.0.1"
    """The address at which ranks of other hosts reach the ranks of this host."""
    limits: HangLimits = field(default_factory=HangLimits)
    """When a rank counts as hung. It learns from the ranks of all attempts on this host."""
    shown_output: str = "0"
    """The ranks whose output is copied to the console: "0", "all" or "none"."""
    use_fork_server: bool = True
    """Whether ranks are forked from a process that has already imported their modules, if that is possible."""
    metrics: tuple[str, int] | None = None
    """Host and port at which /metrics is served; None: nowhere."""
    through_mpi: bool = False
    """Whether mpiexec starts the ranks, for programs that use MPI's own world."""
    begin_anew: bool = False
    """Whether to begin another run if the run of several hosts has ended."""
    security: NodeSecurity | None = None
    """Token and TLS of the memory nodes of this host, in a run of several hosts; None: no nodes are served."""
