"""A client of a namespace in a process of its own, which is stopped at fail points."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

CLIENT = """
import sys
from ckpt.aggregator.maintenance import rebalance, repair, scrub
from ckpt.aggregator.file_io.namespace import open_namespace
from ckpt.storage.base.errors import CkptError
from ckpt.storage.testing import random_bytes
namespace, _ = open_namespace(sys.argv[1])
try:
    exec(sys.argv[2])
except CkptError as error:
    print("refused:", error)
else:
    print("acknowledged")
"""


class StoppedClient:
    """A client in a process of its own that stops itself (SIGSTOP) at fail points."""

    def __init__(self, url: str, work: str, *points: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, url, work], stdout=subprocess.PIPE, text=True,
            env=os.environ | {"CKPT_FAILPOINTS": ",".join(f"{each}=stop" for each in points)},
        )  # fmt: skip
        self._wait()

    def _wait(self) -> None:
        found = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert found is not None
        assert found.si_code == os.CLD_STOPPED, f"it ended before it stopped: {self.process.communicate()[0]}"

    def continue_to_next_point(self) -> None:
        """Continue the client until it stops at the next fail point."""
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)  # consumes the report of the first stop
        self.process.send_signal(signal.SIGCONT)
        self._wait()

    def finish(self) -> str:
        """Continue the client to its end, and return what it prints."""
        self.process.send_signal(signal.SIGCONT)
        printed, _ = self.process.communicate(timeout=600)
        return printed

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
