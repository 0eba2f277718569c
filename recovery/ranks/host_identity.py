"""Finds the name and the address of this host, and locks the folder of the run against other agents."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt.storage.base.errors import CkptError, InvalidArgument

LAUNCHERS = ("local", "mpiexec", "slurm", "torchrun", "k8s")
"""local: the agent starts the ranks of one host. mpiexec starts them in its place. The others have started this agent on each
host."""

NO_HOST_NAME = "it is not the name of a host"
"""The reason where a name can't be looked up because a part of it is empty or has more than 63 characters."""


def host_name(launcher: str, environ: Mapping[str, str]) -> str:
    """Return the name by which a launcher knows this host. Raises InvalidArgument if its variable is not a number."""
    if launcher == "slurm" and environ.get("SLURMD_NODENAME"):
        return environ["SLURMD_NODENAME"]
    if launcher == "torchrun" and (number := environ.get("GROUP_RANK")):
        if not (number.isascii() and number.isdigit()):
            raise InvalidArgument(f"GROUP_RANK={number!r} is not a number of a host; unset it, or start ckpt-run by torchrun")
        return f"host-{int(number):04d}"
    if launcher == "k8s" and environ.get("HOSTNAME"):  # the name of the pod, which a stateful set keeps
        return environ["HOSTNAME"]
    return socket.gethostname()


def check_host_name(name: str) -> str:
    """Return the name of a host if it can also be part of file names. Raises InvalidArgument."""
    if not re.fullmatch(r"[^\W_][\w.-]{0,199}", name, re.ASCII):
        raise InvalidArgument(f"{name!r} can't be the name of a host: give letters, digits, '-', '_' and '.' as --name")
    return name


_HOST_COUNT_SOURCES = {"slurm": ("srun", "SLURM_STEP_NUM_NODES"), "torchrun": ("torchrun --no-python", "GROUP_WORLD_SIZE")}
"""For launchers that pass the number of hosts to each agent: the command, and the variable with the number."""


def require_host_count(launcher: str, environ: Mapping[str, str]) -> None:
    """Raise InvalidArgument if the launcher does not pass the number of hosts to this agent."""
    if launcher in _HOST_COUNT_SOURCES and host_count(launcher, environ) is None:
        command, variable = _HOST_COUNT_SOURCES[launcher]
        raise InvalidArgument(
            f"--launcher {launcher}: {variable} is not set here, so {launcher} has not started this; start it as "
            f"`{command} … ckpt-run --launcher {launcher} …`, or leave out --launcher"
        )


def launcher_hint(launcher: str, command: Sequence[str]) -> str:
    """Return a hint if the command is a launcher that starts ranks of its own, which ckpt-run can't see; else ""."""
    name = os.path.basename(command[0])
    if launcher != "local" or name not in ("mpiexec", "mpirun", "srun"):
        return ""
    better = "srun … ckpt-run --launcher slurm" if name == "srun" else "ckpt-run -n RANKS --launcher mpiexec"
    return f"{name} and all that it starts are one rank here (WORLD_SIZE=1); start `{better} -- PROGRAM` to watch each rank"


def host_count(launcher: str, environ: Mapping[str, str]) -> int | None:
    """Return on how many hosts a launcher has started agents; None if its variable is not set."""
    value = environ.get(_HOST_COUNT_SOURCES[launcher][1], "") if launcher in _HOST_COUNT_SOURCES else ""
    return int(value) if value.isascii() and value.isdigit() else None


def host_address(state: str | None) -> str:
    """Return the address at which other hosts reach this one.

    It is the source address of packets to the run log's server. It is the loopback address if the run log is a file.

    state: the URL of the run log in etcd; None: a file.

    Raises InvalidArgument if it is not such a URL, and CkptError if the server can't be reached.
    """
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
        raise _unreachable_error(host, error.strerror) from error
    except UnicodeError as error:
        raise _unreachable_error(host, NO_HOST_NAME) from error


def _unreachable_error(host: str, reason: str | None) -> CkptError:
    return CkptError(f"{host} can't be reached: {reason}; check --state, or give --address")


def require_creatable(folder: Path) -> None:
    """Raise CkptError if the folder of a run can't exist, because its path leads through a file. It creates nothing."""
    for path in (folder, *folder.parents):
        if os.path.isdir(path):
            return
        if os.path.lexists(path) and (path == folder or os.path.exists(path)):
            raise _unusable_error(folder, os.strerror(errno.EEXIST if path == folder else errno.ENOTDIR))


def lock_run(folder: Path) -> int:
    """Lock a folder against other runs until this process ends. Raises CkptError if another process has locked it."""
    return _lock(folder, "lock", _in_use_message(folder))


def lock_host_name(folder: Path, name: str) -> tuple[int, str]:
    """Lock a host name for this agent until it ends, and return the descriptor and the name.

    If another agent has locked the name, as a second agent on the same host, a number is appended.

    Raises CkptError if a run on one host has locked the folder, or if agents have locked the name with all numbers below 1000.
    """
    # A shared lock: other agents may use the folder, but a run on one host may not.
    _lock(folder, "lock", _in_use_message(folder), fcntl.LOCK_SH)
    for number in range(1, 1000):
        candidate = name if number == 1 else f"{name}-{number}"
        try:
            return _lock(folder, f"{candidate}.lock", ""), candidate
        except _InUseError:
            continue
    raise CkptError(f"too many agents in {folder}; give another --run-dir")


class _InUseError(CkptError):
    """Another process has the lock."""


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
        raise _unusable_error(folder, error.strerror) from error
    return lock


def _unusable_error(folder: Path, reason: str | None) -> CkptError:
    return CkptError(f"{folder} can't be used: {reason}; give another --run-dir")
