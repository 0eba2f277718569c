"""Scripts that know nothing of ckpt, under the real `ckpt-run --adapt`, which are killed in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from helpers.folders import PROGRAMS

_SECONDS = 280


@dataclass(frozen=True)
class Ended:
    """A run that has ended."""

    status: int
    messages: str
    """What ckpt-run has printed itself."""
    outputs: list[str]
    """What rank 0 has printed, by attempt."""
    losses: list[tuple[int, str]]
    """Number and loss of each line of the log."""

    @property
    def by_number(self) -> dict[int, str]:
        return dict(self.losses)


def run_adapted(
    folder: Path, program: str, *arguments: str, kill_after: tuple[int, ...] = (), options: tuple[str, ...] = ("--adapt",),
    command: tuple[str, ...] = (sys.executable,), **environment: str,
) -> Ended:  # fmt: skip
    """Run `python PROGRAM LOG ARGUMENTS` by ckpt-run; kill it by SIGKILL once for each number that the log has reached."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    script = [*command, str(PROGRAMS / program), str(log), *arguments]
    ckpt_run = [sys.executable, "-m", "ckpt.tools.run", "--run-dir", str(folder / "run"), *options, "--"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("CKPT_")} | environment
    with (folder / "messages").open("w") as messages:
        process = subprocess.Popen(ckpt_run + script, cwd=folder, stdout=messages, stderr=messages, env=variables)
        try:
            killed: set[int] = set()
            deadline = time.monotonic() + _SECONDS
            for number in kill_after:
                killed.add(_kill(process, log, number, killed, deadline))
            status = process.wait(max(1, deadline - time.monotonic()))
        finally:
            process.kill()
            process.wait()
    outputs = [path.read_text() for path in sorted((folder / "run/logs").rglob("rank-0.log"))]
    return Ended(status, (folder / "messages").read_text(), outputs, [(number, loss) for number, loss, _ in _lines(log)])


def _kill(process: subprocess.Popen[bytes], log: Path, number: int, killed: set[int], deadline: float) -> int:
    """Kill the rank once it has logged a number; return its process id."""
    while True:
        found = [pid for reached, _, pid in _lines(log) if reached >= number and pid not in killed]
        if found:
            os.kill(found[0], signal.SIGKILL)
            return found[0]
        assert process.poll() is None, f"it has ended before {number}"
        assert time.monotonic() < deadline, f"it has not reached {number}"
        time.sleep(0.01)


def _lines(log: Path) -> list[tuple[int, str, int]]:
    if not log.exists():
        return []
    rows = [line.split() for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [(int(number), loss, int(pid)) for number, loss, pid in rows]


def assert_resumed(whole: Ended, killed: Ended, kills: int) -> None:
    """Require that a killed run has the losses of a whole one, and continued from saved steps."""
    assert whole.status == killed.status == 0, whole.messages + killed.messages + "".join(killed.outputs)
    expected = whole.by_number
    assert {number for number, _ in killed.losses} == set(expected)
    assert [(number, loss) for number, loss in killed.losses if expected[number] != loss] == []
    assert len(killed.outputs) == kills + 1
    assert "starts anew" in killed.outputs[0]
    assert "continues from step" in killed.outputs[-1], killed.outputs
