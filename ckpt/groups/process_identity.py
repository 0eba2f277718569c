"""Which process this is among all that ever were, and whether another one still lives."""

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
    """A process, told apart from every other one that ever was."""

    host: str
    boot: str
    namespace: str
    pid: int
    started: str
    since: str
    token: str


def _read_proc_file(path: str, raise_unreadable: bool = False) -> str:
    """The text of a file of /proc; "" where there is none to see.

    must_look: raise StoreError where this process can't look now, which says nothing about the one that was asked for.
    """
    try:
        with open(path) as file:
            return file.read()
    except OSError as error:
        if raise_unreadable and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise StoreError(f"reading {path} failed: {describe_os_error(error)}") from error
        return ""


def process_start_ticks(pid: int, raise_unreadable: bool = False) -> str:
    """Start time of a process in clock ticks since boot, field 22 of /proc/<pid>/stat; "" where it is gone.

    must_look: raise StoreError where this process can't look now. For a verdict about another; a note about itself says less.
    """
    fields = _read_proc_file(f"/proc/{pid}/stat", raise_unreadable).rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def this_process() -> ProcessIdentity:
    """This process as an owner."""
    boot = _read_proc_file("/proc/sys/kernel/random/boot_id").strip()
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    pid = os.getpid()
    return ProcessIdentity(
        socket.gethostname(), boot, _pid_namespace(), pid, process_start_ticks(pid), since, secrets.token_hex(8)
    )


def is_dead(process: ProcessIdentity, observer: ProcessIdentity) -> bool:
    """Whether the owner's process is seen to be gone; False as well where this process can't look now."""
    try:
        return is_alive(process, observer) is False
    except StoreError:
        return False


def is_alive(process: ProcessIdentity, observer: ProcessIdentity) -> bool | None:
    """Whether the owner's process lives; None where this host cannot tell. Raises StoreError where it can't look now.

    Only the boot id proves that both are on one host: several may have one name ("localhost", clones of an image), so that
    another boot may be another host that runs now, and not an earlier time of this one.
    """
    if (process.host, process.boot, process.namespace) != (observer.host, observer.boot, observer.namespace):
        return None
    if process.started or observer.started:
        return process_start_ticks(process.pid, raise_unreadable=True) == process.started
    try:
        os.kill(process.pid, 0)  # no /proc here: a process of this number is taken to be the owner
    except ProcessLookupError:
        return False if observer.boot else None
    except PermissionError:
        pass
    return True
