"""Ranks of torch that start in milliseconds: processes that a server forks which has imported torch.

torchrun imports torch in itself and in each rank, which takes 2 to 4 s of processor time each. Tests of the launch itself,
and of examples as users start them, still use torchrun. Ranks of the server share one seed of hashes.
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

    The exit status is 1 if a rank failed; then stderr ends with the status or the signal of each such rank. The errors
    of the rank that failed by itself precede these lines, because tests show the end of stderr. No rank outlives the call.
    """
    ended = outcomes_of_ranks(size, program, *arguments, end_others=True, **more)
    failures = "".join(_failure(rank, one.returncode) for rank, one in enumerate(ended) if one.returncode)
    output = "".join(one.stdout for one in ended)
    errors = "".join(one.stderr for one in sorted(ended, key=_failed_by_itself))
    return subprocess.CompletedProcess([str(program), *arguments], int(bool(failures)), output, errors + failures)


def outcomes_of_ranks(
    size: int, program: Path, *arguments: str, end_others: bool = False, **more: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run a program as ranks, as `run_ranks` does; return how each ended.

    end_others: whether the other ranks are ended after one fails.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory(prefix="ckpt-ranks-") as folder:
        output, errors = f"{folder}/output", f"{folder}/errors"
        job = {"program": str(program), "arguments": arguments, "environment": environment(**more), "size": size}
        server.stdin.write(json.dumps(job | {"output": output, "errors": errors, "end_others": end_others}) + "\n")
        server.stdin.flush()
        statuses: list[int] = json.loads(server.stdout.readline())
        return [
            subprocess.CompletedProcess(
                [str(program), *arguments], status, Path(f"{output}.{rank}").read_text(), Path(f"{errors}.{rank}").read_text()
            )
            for rank, status in enumerate(statuses)
        ]


def run_checks_on_ranks(program: str, size: int, root: Path, *checks: str) -> None:
    """Run checks of a program of tests (`torchrun.run_checks`) in one launch; each rank must complete each check."""
    done = run_ranks(size, PROGRAMS / program, str(root), *checks)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    assert len(re.findall(r'\{"rank".*?\}', done.stdout)) == size * len(checks), done.stdout


def _failed_by_itself(ended: subprocess.CompletedProcess[str]) -> int:
    """Return 0 for a rank that completed, 1 for one that was ended after another, 2 for an exit status, 3 for a crash."""
    if ended.returncode in (0, -signal.SIGTERM):
        return int(ended.returncode != 0)
    return 2 if ended.returncode > 0 else 3


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
        atexit.register(server.communicate, timeout=600)
    return _servers[0]
