"""A client of a namespace in a process of its own, which stands still at fail points."""

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


class Stopped:
    """A client in a process of its own, which stands still at a fail point."""

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

    def goes_on_to_the_next_point(self) -> None:
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)  # the first stop is reported once
        self.process.send_signal(signal.SIGCONT)
        self._wait()

    def goes_on(self) -> str:
        """What it says at its end."""
        self.process.send_signal(signal.SIGCONT)
        said, _ = self.process.communicate(timeout=120)
        return said

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
