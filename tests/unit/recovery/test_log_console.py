"""The copy of the logs of ranks on the console."""

from __future__ import annotations

from pathlib import Path

from helpers.processes import finish, python

COPIES = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace

from helpers.peak_memory import peak_bytes

from ckpt.recovery.agent.log_console import LogConsole

answer = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
log = Path(sys.argv[1])
console = LogConsole("all")
before = peak_bytes()
console.follow([SimpleNamespace(log=log, log_begin=0, number=0)])
while console._copied_bytes[log] < log.stat().st_size:
    time.sleep(0.05)
console.close()
os.write(answer, f"{peak_bytes() - before < 100 << 20}".encode())
"""


def test_output_that_nobody_has_read_for_long_is_copied_in_parts(tmp_path: Path) -> None:
    """The ranks may write many GB while a terminal is stopped, more than their agent could keep in memory."""
    with open(tmp_path / "log", "wb") as log:
        log.truncate(300 << 20)
    assert finish(python(COPIES, tmp_path / "log")) == "True"
