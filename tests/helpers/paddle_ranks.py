"""Runs a program as several processes of Paddle, which communicate through gloo."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from helpers.processes import python_path


def run_ranks(program: Path, size: int, folder: Path, repository: str, name: str, *arguments: object) -> tuple[
    set[int], list[dict[int, str]]
]:  # fmt: skip
    """Run a training program; return the exit statuses, and the losses of each rank by step.

    The program gets ARGUMENTS[0] REPOSITORY LOSSES ARGUMENTS[1:]. It writes the step and the loss of each step to LOSSES.
    """
    master, *ports = _free_ports(size + 1)
    endpoints = [f"127.0.0.1:{port}" for port in ports]
    ranks = []
    for rank in range(size):
        first, *others = map(str, arguments)
        command = [sys.executable, str(program), first, str(folder / repository), str(folder / f"{name}-{rank}"), *others]
        environ = {
            "PADDLE_TRAINER_ID": str(rank), "PADDLE_TRAINERS_NUM": str(size), "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
            "PADDLE_CURRENT_ENDPOINT": endpoints[rank], "PADDLE_MASTER": f"127.0.0.1:{master}",
            "PADDLE_DISTRI_BACKEND": "gloo", "OMP_NUM_THREADS": "1", "CKPT_RUN_ID": f"{folder.name}-{name}",
            "PYTHONPATH": python_path(),
        }  # fmt: skip
        ranks.append(subprocess.Popen(command, env=os.environ | environ))
    try:
        statuses = {process.wait(timeout=600) for process in ranks}
    finally:
        for process in ranks:
            process.kill()
    lines = [(folder / f"{name}-{rank}").read_text().splitlines() for rank in range(size)]
    return statuses, [{int(line.split()[0]): line.split()[1] for line in rank} for rank in lines]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
