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


@dataclass(frozen=True, slots=True)
class Share:
    """The ranks of an attempt that are this host's, and what all ranks must know."""

    run: str
    attempt: int
    first: int
    count: int
    """Here; the first of them has local rank 0."""
    world: int
    host: int
    """Its number among the hosts."""
    address: str
    port: int
    """Where rank 0 may listen for the others."""
    more: Mapping[str, str]
    """Environment beside."""


def environment(share: Share, number: int, page: Path) -> Mapping[str, str]:
    """What a rank is told. OMP_NUM_THREADS is 1 where nothing is said and there are several, as torchrun has it."""
    local = number - share.first
    told = {
        "RANK": str(number), "LOCAL_RANK": str(local), "WORLD_SIZE": str(share.world), "LOCAL_WORLD_SIZE": str(share.count),
        "GROUP_RANK": str(share.host), "GROUP_WORLD_SIZE": str(share.world // share.count), "ROLE_RANK": str(number),
        "ROLE_WORLD_SIZE": str(share.world), "MASTER_ADDR": share.address, "MASTER_PORT": str(share.port),
        "TORCHELASTIC_RUN_ID": share.run, "TORCHELASTIC_RESTART_COUNT": str(share.attempt), "CKPT_RUN": share.run,
        "CKPT_ATTEMPT": str(share.attempt), pulses.VARIABLE: str(page), "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    if share.count > 1 and "OMP_NUM_THREADS" not in os.environ:
        told["OMP_NUM_THREADS"] = "1"
    return {**told, **share.more}


def start(command: Sequence[str], share: Share, pages: Path, logs: Path) -> list[Rank]:
    """Start the ranks of this host. Raises CkptError where the command can't be started; then none runs."""
    logs.mkdir(parents=True, exist_ok=True)
    ranks: list[Rank] = []
    try:
        for number in range(share.first, share.first + share.count):
            page, log = pages / f"{share.attempt}-{number}", logs / f"rank-{number}.log"
            pulse = Pulse(page, new=True)
            told = environment(share, number, page)
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


def free_port(address: str) -> int:
    """One that nobody listens on now."""
    with socket.socket() as found:
        found.bind((address, 0))
        port: int = found.getsockname()[1]
        return port
