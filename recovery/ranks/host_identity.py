"""Who this host is in a run: its name, its address, and that nobody else on it has that name."""

from __future__ import annotations

import fcntl
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt.storage.base.errors import CkptError, InvalidArgument

LAUNCHERS = ("local", "mpiexec", "slurm", "torchrun", "k8s")
"""mpiexec starts the ranks of one host; the others have started this agent on each of its hosts."""


def host_name(launcher: str, environ: Mapping[str, str]) -> str:
    """What a launcher calls this host."""
    if launcher == "slurm" and environ.get("SLURMD_NODENAME"):
        return environ["SLURMD_NODENAME"]
    if launcher == "torchrun" and (number := environ.get("GROUP_RANK")):
        if not (number.isascii() and number.isdigit()):
            raise InvalidArgument(f"GROUP_RANK={number!r} is no number of a host; unset it, or start ckpt-run by torchrun")
        return f"host-{int(number):04d}"
    if launcher == "k8s" and environ.get("HOSTNAME"):  # the name of the pod: a stateful set keeps it
        return environ["HOSTNAME"]
    return socket.gethostname()


def check_host_name(name: str) -> str:
    """The name of a host, which names files too. Raises InvalidArgument."""
    if not re.fullmatch(r"[^\W_][\w.-]{0,199}", name, re.ASCII):
        raise InvalidArgument(f"{name!r} can't be the name of a host: give letters, digits, '-', '_' and '.' as --name")
    return name


_HOST_COUNT_SOURCES = {"slurm": ("srun", "SLURM_STEP_NUM_NODES"), "torchrun": ("torchrun --no-python", "GROUP_WORLD_SIZE")}
"""Launchers that tell each agent how many hosts they have started one on: by which command, and in which variable."""


def require_host_count(launcher: str, environ: Mapping[str, str]) -> None:
    """Raise InvalidArgument where a launcher does not tell this agent on how many hosts it has started one."""
    if launcher == "k8s":
        raise InvalidArgument(
            "--launcher k8s: a pod is told its name, and not how many there are: each would run a job of its own; give "
            "--nnodes, without the spares"
        )
    if launcher in _HOST_COUNT_SOURCES and host_count(launcher, environ) is None:
        command, variable = _HOST_COUNT_SOURCES[launcher]
        raise InvalidArgument(
            f"--launcher {launcher}: {variable} is not set here, so {launcher} has not started this; start it as "
            f"`{command} … ckpt-run --launcher {launcher} …`, or leave out --launcher"
        )


def launcher_hint(launcher: str, command: Sequence[str]) -> str:
    """What to say where the command starts ranks of its own, and nothing else tells that; "" elsewhere."""
    name = os.path.basename(command[0])
    if launcher != "local" or name not in ("mpiexec", "mpirun", "srun"):
        return ""
    better = "srun … ckpt-run --launcher slurm" if name == "srun" else "ckpt-run -n RANKS --launcher mpiexec"
    return f"{name} and all that it starts are one rank here (WORLD_SIZE=1); `{better} -- PROGRAM` knows each"


def host_count(launcher: str, environ: Mapping[str, str]) -> int | None:
    """How many hosts a launcher has started agents on; None where it does not say."""
    value = environ.get(_HOST_COUNT_SOURCES[launcher][1], "") if launcher in _HOST_COUNT_SOURCES else ""
    return int(value) if value.isascii() and value.isdigit() else None


def host_address(state: str | None) -> str:
    """Where other hosts reach this one: the address from which it reaches the state; loopback where that is a file."""
    if state is None:
        return "127.0.0.1"
    found = re.match(r"etcd://(?:https?://)?(\[[^]]+\]|[^:/,]+):(\d+)", state)
    if found is None:
        raise InvalidArgument(f"{state}: write etcd://HOST:PORT/NAME")
    host, port = found[1].strip("[]"), int(found[2])
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise CkptError(f"{host} can't be reached: {error.strerror}; check --state, or give --address") from error


def lock_run(folder: Path) -> int:
    """Keep other runs out of a folder until this process ends."""
    return _lock(folder, "lock", _in_use_message(folder))


def lock_host_name(folder: Path, name: str) -> tuple[int, str]:
    """Keep a name for this agent until it ends; another one where that is taken, as by a second agent on the same host."""
    _lock(folder, "lock", _in_use_message(folder), fcntl.LOCK_SH)  # beside other agents, and not beside a run on one host
    for number in range(1, 1000):
        tried = name if number == 1 else f"{name}-{number}"
        try:
            return _lock(folder, f"{tried}.lock", ""), tried
        except _InUseError:
            continue
    raise CkptError(f"too many agents in {folder}; give another --run-dir")


class _InUseError(CkptError):
    """By another process."""


def _in_use_message(folder: Path) -> str:
    return f"another ckpt-run works in {folder}; wait for its end, or give another --run-dir"


def _lock(folder: Path, name: str, in_use_message: str, kind: int = fcntl.LOCK_EX) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise _InUseError(in_use_message) from error
    except OSError as error:
        raise CkptError(f"{folder} can't be used: {error.strerror}; give another --run-dir") from error
    return lock
