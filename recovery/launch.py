"""Starting the ranks of this host: each in a session of its own, with a log of its own, told who it is as torchrun tells it."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt import imports
from ckpt import pulse as pulses
from ckpt.pulse import Pulse
from ckpt.recovery import host, mpi
from ckpt.recovery.warm import Cold, Forged, NoScript, WarmStarts, split
from ckpt.storage.errors import CkptError, Unavailable

_PORTS, _TRIES = 10_000, 32


@dataclass(slots=True)
class Rank:
    """A rank that runs."""

    number: int
    process: subprocess.Popen[bytes] | Forged
    pidfd: int
    pulse: Pulse
    log: Path

    shared: bool = False
    """The process is mpiexec, which has started all of them."""

    status: int = 0
    """How it has ended: the exit status, or less than 0 for a signal."""

    def ended(self) -> bool:
        """Whether it has. It is not reaped before `stop`: no other process can have its number until its session is ended."""
        try:
            found = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # somebody else has heard how it ended: not well, for all we know
            self.status = self.process.poll() or 255
            return True
        if found is not None:
            self.status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        return found is not None

    @property
    def pid(self) -> int:
        """0 where it is not known yet."""
        return self.pulse.read().pid if self.shared else self.process.pid


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


_FOR_NOW = {errno.ENOSPC, errno.EDQUOT, errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EIO}
"""Errors that time may mend."""

_STUCK_SECONDS = 60.0

AGENT = "CKPT_AGENT"
"""The environment variable by which all that the ranks of an agent start is known."""


def environment(share: Share, number: int, page: Path) -> Mapping[str, str]:
    """What a rank is told. OMP_NUM_THREADS is 1 where nothing is said and there are several, as torchrun has it."""
    local = number - share.first
    told = {
        "RANK": str(number), "LOCAL_RANK": str(local), "WORLD_SIZE": str(share.world), "LOCAL_WORLD_SIZE": str(share.count),
        "GROUP_RANK": str(share.host), "GROUP_WORLD_SIZE": str(share.world // share.count), "ROLE_RANK": str(number),
        "ROLE_WORLD_SIZE": str(share.world), "ROLE_NAME": "default",
        "MASTER_ADDR": share.address, "MASTER_PORT": str(share.port), "TORCHELASTIC_RUN_ID": share.run,
        "TORCHELASTIC_RESTART_COUNT": str(share.attempt), "CKPT_RUN": share.run, "CKPT_ATTEMPT": str(share.attempt),
        pulses.VARIABLE: str(page), "PYTHONUNBUFFERED": "1",
        # Not those of the torchrun that this agent may run under: its store is at another port, its error file is its own.
        "TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_ERROR_FILE": "",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }  # fmt: skip
    if share.count > 1 and "OMP_NUM_THREADS" not in os.environ:
        told["OMP_NUM_THREADS"] = "1"
    return {**told, **share.more}


def start(
    command: Sequence[str], share: Share, pages: Path, logs: Path, warm: WarmStarts | None = None, through_mpi: bool = False
) -> list[Rank]:
    """Start the ranks of this host. Raises CkptError where the command can't be started; then none runs.

    warm: forks them from a process that has imported what they import, where that can be. through_mpi: mpiexec starts them.
    """
    numbers = range(share.first, share.first + share.count)
    files = [logs / f"rank-{number}.log" for number in numbers]
    _require_script(command)
    ranks: list[Rank] = []
    process: subprocess.Popen[bytes] | Forged
    try:
        logs.mkdir(parents=True, exist_ok=True)
        _free(pages, share.attempt)
        made = [Pulse(_page(pages, share, number), new=True) for number in numbers]
        for file in files:
            file.touch()
        if through_mpi:
            told = environment(share, share.first, _page(pages, share, share.first))
            beside = mpi.environment(share.first, str(pages / f"{share.attempt}-{{}}"), str(logs / "rank-{}.log"))
            process = _spawn(mpi.command(command, share.count), {**told, **beside}, files[0])
        for number, pulse, file in zip(numbers, made, files, strict=True):
            if not through_mpi:
                told = environment(share, number, _page(pages, share, number))
                forked = warm and warm.fork({**os.environ, **told}, file)
                process = forked or _spawn(command, told, file)
            ranks.append(Rank(number, process, os.pidfd_open(process.pid), pulse, file, through_mpi))
    except OSError as error:
        stop(ranks, "")
        if error.errno in _FOR_NOW:
            raise Unavailable(f"the ranks can't be started now: {error.strerror} ({error.filename or command[0]})") from error
        raise _not_started(command, error.strerror) from error
    return ranks


def require(command: Sequence[str]) -> None:
    """Raise CkptError where a command can't be started: before a run of it is begun, and takes the place of the one before."""
    _require_script(command)
    if shutil.which(command[0]) is None:
        is_there = "/" in command[0] and os.path.exists(command[0])
        raise _not_started(command, os.strerror(errno.EACCES if is_there else errno.ENOENT))


def _not_started(command: Sequence[str], reason: str | None) -> CkptError:
    return CkptError(f"{command[0]} can't be started: {reason}; give a command that runs by itself")


def _require_script(command: Sequence[str]) -> None:
    """What Python would say at each start, and only in the log."""
    try:
        split(command)
    except NoScript as error:
        raise CkptError(f"{' '.join(command)} can't be started: {error}; give the path of the script") from error
    except Cold:
        pass


def prepare(warm: WarmStarts, share: Share, pages: Path) -> None:
    """See to it that the next start is a warm one. To be called often; never waits."""
    page = _page(pages, share, share.first)
    warm.look({**os.environ, **environment(share, share.first, page)}, imports.beside(page))


def _free(pages: Path, attempt: int) -> None:
    """Remove the pages of attempts before: where memory has run short, this one has theirs."""
    for page in pages.iterdir():
        before = re.fullmatch(r"(\d+)-\d+", page.name)
        if before and int(before[1]) != attempt:
            page.unlink(missing_ok=True)


def _page(pages: Path, share: Share, number: int) -> Path:
    return pages / f"{share.attempt}-{number}"


def _spawn(command: Sequence[str], told: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **told},
            start_new_session=True, preexec_fn=host.die_with_parent,
        )  # fmt: skip
    host.own(process.pid)
    return process


def stop(ranks: Sequence[Rank], mark: str) -> None:
    """End the ranks and all that bears the mark of what they have started."""
    host.end([rank.process.pid for rank in ranks], mark)
    until = time.monotonic() + _STUCK_SECONDS
    for rank in ranks:
        while rank.process.poll() is None:
            if time.monotonic() > until:
                what = f"rank {rank.number}, process {rank.process.pid}, can't be ended"
                raise CkptError(f"{what}: it hangs in the kernel; restart this host")
            time.sleep(0.001)
        os.close(rank.pidfd)
        rank.pulse.close()


def free_port(address: str) -> int:
    """One that nobody listens on now, at an address of this host.

    It is below those that the kernel gives to who connects: one of these would be taken before rank 0 listens there.
    """
    least = _first_given()
    some = random.SystemRandom().sample(range(max(1024, least - _PORTS), max(1024 + _TRIES, least)), _TRIES)
    return next(filter(None, (_bound(address, port) for port in some)), 0) or _bound(address, 0)


def _bound(address: str, port: int) -> int:
    """The port, where it can be listened on, and 0 where it is taken. 0 as the port: any."""
    try:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as found:
            found.bind(place)
            return int(found.getsockname()[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE and port:
            return 0
        raise CkptError(f"{address} can't be listened on: {error.strerror}; give one of this host as --address") from error


def _first_given() -> int:
    """The least of the ports that the kernel gives to who connects."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 49152  # RFC 6335
