"""Ranks of torch that start in milliseconds: processes that a server forks which has imported torch.

torchrun imports torch in itself and in each rank, which takes 2 to 4 s of processor time each. It stays where a test is about
the launch, or about an example as users start it. Ranks of the server share one seed of hashes.
"""

from __future__ import annotations

import atexit
import json
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from helpers.folders import PROGRAMS
from helpers.torchrun import environment

_servers: list[subprocess.Popen[str]] = []


def run_ranks(size: int, program: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a program as ranks that meet as under torchrun, with `more` in their environment; return how they ended.

    The exit status is 1 if a rank failed; then stderr ends with the status or the signal of each such rank. None of them
    outlives the call.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory(prefix="ckpt-ranks-") as folder:
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        job = {"program": str(program), "arguments": arguments, "environment": environment(**more), "size": size}
        server.stdin.write(json.dumps(job | {"output": str(output), "errors": str(errors)}) + "\n")
        server.stdin.flush()
        statuses: list[int] = json.loads(server.stdout.readline())
        failures = "".join(_failure(rank, status) for rank, status in enumerate(statuses) if status)
        return subprocess.CompletedProcess(
            [str(program), *arguments], int(bool(failures)), output.read_text(), errors.read_text() + failures
        )


def run_checks_on_ranks(program: str, size: int, root: Path, *checks: str) -> None:
    """Run checks of a program of tests (`torchrun.run_checks`) in one launch; each rank must complete each check."""
    done = run_ranks(size, PROGRAMS / program, str(root), *checks)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    assert len(re.findall(r'\{"rank".*?\}', done.stdout)) == size * len(checks), done.stdout


def _failure(rank: int, status: int) -> str:
    if status < 0:
        return f"rank {rank}: Signal {-status} ({signal.Signals(-status).name})\n"
    return f"rank {rank}: exit status {status}\n"


def _server() -> subprocess.Popen[str]:
    """Return the server of this process of tests; start it at the first use."""
    if not _servers:
        command = [sys.executable, str(PROGRAMS / "rank_server.py")]
        pipe = subprocess.PIPE
        server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment(), start_new_session=True)
        _servers.append(server)
        atexit.register(server.communicate, timeout=60)
    return _servers[0]
