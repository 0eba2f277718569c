"""Starting the ranks of this host: each in a session of its own, with a log of its own, told who it is as torchrun tells it."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt import pulse as pulses
from ckpt.pulse import Pulse
from ckpt.recovery import host
from ckpt.storage.errors import CkptError


@dataclass(slots=True)
class Rank:
    """A rank that runs."""

    number: int
    process: subprocess.Popen[bytes]
    pidfd: int
    pulse: Pulse
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid


def environment(number: int, count: int, attempt: int, run: str, port: int, page: Path) -> Mapping[str, str]:
    """What a rank is told. OMP_NUM_THREADS is 1 where nothing is said and there are several, as torchrun has it."""
    told = {
        "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": "0", "ROLE_RANK": str(number), "ROLE_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": run, "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "CKPT_RUN": run, "CKPT_ATTEMPT": str(attempt), pulses.VARIABLE: str(page), "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    if count > 1 and "OMP_NUM_THREADS" not in os.environ:
        told["OMP_NUM_THREADS"] = "1"
    return told


def start(command: Sequence[str], count: int, attempt: int, run: str, pages: Path, logs: Path) -> list[Rank]:
    """Start all ranks. Raises CkptError where the command can't be started; then none runs."""
    logs.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    ranks: list[Rank] = []
    try:
        for number in range(count):
            page, log = pages / f"{attempt}-{number}", logs / f"rank-{number}.log"
            pulse = Pulse(page, new=True)
            told = environment(number, count, attempt, run, port, page)
            with log.open("ab") as out:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=os.environ | told,
                    start_new_session=True, preexec_fn=host.die_with_parent,
                )  # fmt: skip
            host.own(process.pid)
            ranks.append(Rank(number, process, os.pidfd_open(process.pid), pulse, log))
    except OSError as error:
        stop(ranks)
        raise CkptError(
            f"{command[0]} can't be started: {error.strerror}; give a command that runs by itself"
        ) from error
    return ranks


def stop(ranks: Sequence[Rank], grace_seconds: float = 0.0) -> None:
    """End the ranks and all they have started."""
    host.end([rank.pid for rank in ranks], grace_seconds)
    for rank in ranks:
        rank.process.wait()
        os.close(rank.pidfd)
        rank.pulse.close()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
