"""The identity of a process, unique over hosts and time, and whether another process is still alive."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import time
from dataclasses import dataclass

from ckpt.storage.base.errors import StoreError
from ckpt.storage.base.fd_io import describe_os_error


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, distinguished from every other process of any time."""

    host: str
    """Host name."""
    boot: str
    """Boot id of the kernel."""
    namespace: str
    """PID namespace."""
    pid: int
    started: str
    """Start time in clock ticks since boot; "" where unknown."""
    since: str
    """When this identity was created: UTC, ISO 8601."""
    token: str
    """16 random hexadecimal digits."""


def _read_proc_file(path: str, raise_unreadable: bool = False) -> str:
    """Return the text of a file of /proc; "" where it does not exist or cannot be read.

    raise_unreadable: raise StoreError if this process lacks file descriptors or memory, since that does not mean that the
        file is missing.
    """
    try:
        with open(path, errors="replace") as file:  # the name of a process may not be UTF-8
            return file.read()
    except OSError as error:
        if raise_unreadable and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise StoreError(f"reading {path} failed: {describe_os_error(error)}") from error
        return ""


def process_start_ticks(pid: int, raise_unreadable: bool = False) -> str:
    """Return the start time of a process in clock ticks since boot, field 22 of /proc/<pid>/stat; "" if it has ended.

    raise_unreadable: raise StoreError if this process cannot read /proc now. Needed to decide whether another process is
        dead, not to describe this one.
    """
    fields = _read_proc_file(f"/proc/{pid}/stat", raise_unreadable).rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def this_process() -> ProcessIdentity:
    """Return the identity of this process."""
    boot = _read_proc_file("/proc/sys/kernel/random/boot_id").strip()
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    pid = os.getpid()
    return ProcessIdentity(
        socket.gethostname(), boot, _pid_namespace(), pid, process_start_ticks(pid), since, secrets.token_hex(8)
    )


def is_dead(process: ProcessIdentity, observer: ProcessIdentity) -> bool:
    """Return whether a process is known to be dead; False also where this process cannot read /proc now."""
    try:
        return is_alive(process, observer) is False
    except StoreError:
        return False


def is_alive(process: ProcessIdentity, observer: ProcessIdentity) -> bool | None:
    """Return whether a process is alive; None where `observer`, this process, cannot determine it.

    Only the boot id proves that both are on one host. Several hosts may have one name ("localhost", clones of an image), so a
    different boot id may mean another running host rather than an earlier boot of this one.

    Raises StoreError if this process cannot read /proc now.
    """
    if (process.host, process.boot, process.namespace) != (observer.host, observer.boot, observer.namespace):
        return None
    if process.started or observer.started:
        return process_start_ticks(process.pid, raise_unreadable=True) == process.started
    if process_exists(process.pid):  # without /proc, any process with this number counts as the same one
        return True
    return False if observer.boot else None


def process_exists(pid: int) -> bool:
    """Return whether a process of this host has this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
