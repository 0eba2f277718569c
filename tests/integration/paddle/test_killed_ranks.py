"""Two processes of a fleet with a sharded optimizer are killed, and go on with equal losses, bit for bit."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from helpers.folders import PROGRAMS

PROGRAM = str(PROGRAMS / "paddle_ranks.py")


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def run(folder: Path, degree: int, repo: str, name: str, *fault: object) -> tuple[set[int], list[dict[int, str]]]:
    """Run a training of two ranks; return the exit statuses, and the losses of each rank by step."""
    master, *ports = free_ports(3)
    endpoints = [f"127.0.0.1:{port}" for port in ports]
    ranks = []
    for rank in range(2):
        command = [sys.executable, PROGRAM, str(degree), str(folder / repo), str(folder / f"{name}-{rank}"), *map(str, fault)]
        environ = {
            "PADDLE_TRAINER_ID": str(rank), "PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
            "PADDLE_CURRENT_ENDPOINT": endpoints[rank], "PADDLE_MASTER": f"127.0.0.1:{master}",
            "PADDLE_DISTRI_BACKEND": "gloo", "OMP_NUM_THREADS": "1", "CKPT_RUN_ID": f"{folder.name}-{name}",
        }  # fmt: skip
        ranks.append(subprocess.Popen(command, env=os.environ | environ))
    try:
        statuses = {process.wait(timeout=120) for process in ranks}
    finally:
        for process in ranks:
            process.kill()
    lines = [(folder / f"{name}-{rank}").read_text().splitlines() for rank in range(2)]
    return statuses, [{int(line.split()[0]): line.split()[1] for line in rank} for rank in lines]


def test_every_loss_after_the_kill_is_equal(tmp_path: Path) -> None:
    status, quiet = run(tmp_path, 2, "quiet", "quiet")
    assert status == {0}
    assert len(set(quiet[0].values()) | set(quiet[1].values())) == 18
    status, before = run(tmp_path, 2, "repo", "before", 5)
    assert status == {-signal.SIGKILL}
    status, after = run(tmp_path, 2, "repo", "after")
    assert status == {0}
    for rank in range(2):
        assert 0 < min(after[rank]) <= 6
        assert before[rank] | after[rank] == quiet[rank]
