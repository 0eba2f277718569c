"""Starts the ranks of this host, each in a session and with a log of its own, with the variables of torchrun."""

from __future__ import annotations

import errno
import functools
import os
import random
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt.recovery.ranks import mpi, process_kill
from ckpt.recovery.ranks.fork_client import ForkedRank, ForkServers, NotForkable, ScriptNotFound, split_python_command
from ckpt.recovery.ranks.host_identity import NO_HOST_NAME
from ckpt.recovery.ranks.rank_environment import LaunchSpec, build_rank_environment
from ckpt.recovery.ranks.rank_process import NO_DESCRIPTOR, RankProcess
from ckpt.recovery.ranks.stop_ranks import stop_ranks
from ckpt.storage.base.errors import CkptError, Unavailable
from ckpt.storage.base.fd_io import describe_os_error
from ckpt.training import import_report
from ckpt.training.heartbeat_page import HeartbeatPage

_PORT_RANGE, _PORT_TRIES = 10_000, 32


_TRANSIENT_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EIO}
"""Errors that may disappear with time."""

AGENT_VARIABLE = "CKPT_AGENT"
"""The environment variable that marks the ranks of an agent and all processes that they start."""


def start_ranks(
    command: Sequence[str],
    spec: LaunchSpec,
    pages: Path,
    logs: Path,
    fork_servers: ForkServers | None = None,
    through_mpi: bool = False,
) -> list[RankProcess]:
    """Start the ranks of this host. Raises CkptError if the command can't be started, and Unavailable if it can be later.

    pages: the folder of the heartbeat pages.
    logs: the folder of the logs of this attempt.
    fork_servers: fork the ranks for a warm start, if that is possible.
    through_mpi: whether mpiexec starts the ranks.

    After an error, no rank runs.
    """
    numbers = range(spec.first_rank, spec.first_rank + spec.rank_count)
    files = [logs / f"rank-{number}.log" for number in numbers]
    _require_script(command)
    ranks: list[RankProcess] = []
    process: subprocess.Popen[bytes] | ForkedRank
    try:
        logs.mkdir(parents=True, exist_ok=True)
        _remove_old_pages(pages, spec.attempt)
        heartbeat_pages = [HeartbeatPage(_page_path(pages, spec, number), new=True) for number in numbers]
        for file in files:
            file.touch()
        log_begins = [file.stat().st_size for file in files]
        if through_mpi:
            variables = build_rank_environment(spec, spec.first_rank, _page_path(pages, spec, spec.first_rank))
            mpi_variables = mpi.wrapper_environment(spec.first_rank, str(pages / f"{spec.attempt}-"), str(logs / "rank-"))
            process = _spawn(mpi.mpiexec_command(command, spec.rank_count), {**variables, **mpi_variables}, files[0])
        for number, heartbeat_page, file, log_begin in zip(numbers, heartbeat_pages, files, log_begins, strict=True):
            if not through_mpi:
                variables = build_rank_environment(spec, number, _page_path(pages, spec, number))
                forked = fork_servers and fork_servers.fork({**os.environ, **variables}, file)
                process = forked or _spawn(command, variables, file)
            rank = RankProcess(number, process, NO_DESCRIPTOR, heartbeat_page, file, through_mpi, log_begin=log_begin)
            ranks.append(rank)
            rank.pidfd = os.pidfd_open(process.pid)  # if this fails, the process is ended like those before
    except OSError as error:
        stop_ranks(ranks, "")
        raise _launch_error(command, error) from error
    return ranks


def require_startable(command: Sequence[str]) -> None:
    """Raise CkptError if a command can't be started. Call it before a new run replaces the one before."""
    _require_script(command)
    if shutil.which(command[0]) is None:
        exists = "/" in command[0] and os.path.exists(command[0])
        raise _start_error(command, os.strerror(errno.EACCES if exists else errno.ENOENT))


def _launch_error(command: Sequence[str], error: OSError) -> CkptError:
    """Return the error of a start: Unavailable if a later one may succeed. It names the log or page that can't be written."""
    is_transient = error.errno in _TRANSIENT_ERRORS
    if error.filename is not None and os.fspath(error.filename) != command[0]:
        message = f"{os.fspath(error.filename)} can't be written: {describe_os_error(error)}"
        return Unavailable(message) if is_transient else CkptError(message)
    if is_transient:
        return Unavailable(f"{command[0]} can't be started now: {describe_os_error(error)}")
    return _start_error(command, error.strerror)


def _start_error(command: Sequence[str], reason: str | None) -> CkptError:
    return CkptError(f"{command[0]} can't be started: {reason}; give a command that can be started in a shell")


def _require_script(command: Sequence[str]) -> None:
    """Raise CkptError if the script does not exist. Python would report it at each start, and only in the log."""
    try:
        split_python_command(command)
    except ScriptNotFound as error:
        raise CkptError(f"{' '.join(command)} can't be started: {error}; give the path of the script") from error
    except NotForkable:
        pass


def prepare_fork_server(fork_servers: ForkServers, spec: LaunchSpec, pages: Path) -> None:
    """Prepare the fork server for the next start. The agent calls this several times a second. It never waits."""
    page = _page_path(pages, spec, spec.first_rank)
    fork_servers.update({**os.environ, **build_rank_environment(spec, spec.first_rank, page)}, import_report.report_path(page))


def _remove_old_pages(pages: Path, attempt: int) -> None:
    """Remove the pages of earlier attempts, so that this attempt can use their memory."""
    for page in pages.iterdir():
        before = re.fullmatch(r"(\d+)-\d+", page.name)
        if before and int(before[1]) != attempt:
            page.unlink(missing_ok=True)


def _page_path(pages: Path, spec: LaunchSpec, number: int) -> Path:
    return pages / f"{spec.attempt}-{number}"


def _spawn(command: Sequence[str], variables: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **variables},
            start_new_session=True, preexec_fn=process_kill.die_with_parent,
        )  # fmt: skip
    process_kill.register_child(process.pid)
    return process


def free_port(address: str) -> int:
    """Return a port at an address of this host on which nothing listens now.

    It is below the ephemeral ports if a port there is free: the kernel may give an ephemeral port to a connection before rank 0
    listens.
    """
    end = _first_ephemeral_port()
    ports = random.SystemRandom().sample(range(max(1024, end - _PORT_RANGE), max(1024 + _PORT_TRIES, end)), _PORT_TRIES)
    return next(filter(None, (_try_bind(address, port) for port in ports)), 0) or _try_bind(address, 0)


def _try_bind(address: str, port: int) -> int:
    """Return the port if it is free, else 0. Port 0 means any port."""
    try:
        family, (host, _, *others) = _own_address(address)
        with socket.socket(family) as probe:
            probe.bind((host, port, *others))
            return int(probe.getsockname()[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE and port:
            return 0
        _own_address.cache_clear()  # the address of this host may have changed
        raise _listen_error(address, error.strerror) from error
    except UnicodeError as error:
        raise _listen_error(address, NO_HOST_NAME) from error


def _listen_error(address: str, reason: str | None) -> CkptError:
    return CkptError(f"{address} can't be listened on: {reason}; give one of this host as --address")


@functools.lru_cache(maxsize=8)
def _own_address(name: str) -> tuple[int, tuple[str | int | bytes, ...]]:
    """Return family and address of this host. They are kept, because the name server may be gone when ranks are restarted."""
    family, _, _, _, sockaddr = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
    return family, sockaddr


def _first_ephemeral_port() -> int:
    """Return the first of the ports that the kernel gives to outgoing connections."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 49152  # RFC 6335
