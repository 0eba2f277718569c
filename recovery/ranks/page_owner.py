"""Sends a signal to the process that has a heartbeat page mapped, and to no other process that has its number by now."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def signal_page_owner(page: Path, pid: int, number: int) -> bool:
    """Send a signal to a rank that is known by its heartbeat page. Return False if the rank has ended.

    The number of a rank stays in the page after its end, and the kernel may give the number to another process.

    page: the heartbeat page.
    pid: the number of the process in it.
    number: the signal.

    Raises OSError if this user may not send signals to the rank.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if not _has_mapped(pid, page):
            return False
        signal.pidfd_send_signal(descriptor, number)
    except (FileNotFoundError, ProcessLookupError):  # it has ended in between
        return False
    finally:
        os.close(descriptor)
    return True


def _has_mapped(pid: int, page: Path) -> bool:
    """Return whether a process has a file mapped."""
    path = os.path.realpath(page).encode()
    with open(f"/proc/{pid}/maps", "rb") as file:
        return any(line.rstrip(b"\n").split(maxsplit=5)[5:] == [path] for line in file)
