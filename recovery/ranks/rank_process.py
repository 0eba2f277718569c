"""The class RankProcess, a started rank."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ckpt.recovery.ranks.fork_client import ForkedRank
from ckpt.training.heartbeat_page import HeartbeatPage

NO_DESCRIPTOR = -1
"""`RankProcess.pidfd` until the descriptor is open."""


@dataclass(slots=True)
class RankProcess:
    """A started rank."""

    number: int
    process: subprocess.Popen[bytes] | ForkedRank
    pidfd: int
    """A descriptor of the process, which becomes readable when it ends."""
    heartbeat_page: HeartbeatPage
    log: Path

    is_shared: bool = False
    """Whether the process is mpiexec, which has started all ranks of this host."""

    status: int = 0
    """The exit status, or the negative number of the signal that ended the rank."""

    log_begin: int = 0
    """How many bytes its log had at its start. They are of an earlier run in the same folder, whose run log is another one."""

    def has_ended(self) -> bool:
        """Return whether the rank has ended.

        It is not reaped before `stop_ranks`, so that no other process gets its number before its session is ended.
        """
        try:
            found = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # other code has reaped it, so the status is lost: assume a failure
            self.status = self.process.poll() or 255
            return True
        if found is not None:
            self.status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        return found is not None

    @property
    def pid(self) -> int:
        """The process id of the rank; 0 if it is not known yet."""
        return self.heartbeat_page.read().pid if self.is_shared else self.process.pid
