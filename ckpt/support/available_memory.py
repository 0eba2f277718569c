"""How much more memory this process can use: what the host has, and what the limits of its container leave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckpt.support.control_groups import memory_groups

_UNKNOWN_HOST_BYTES = 8 << 30
"""What counts as available on a host that does not report it."""

_LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.high", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""The files of a control group with a limit and with the bytes in use, and the field of `memory.stat` with those of them that
the kernel frees first. The first two are of version 2. Shared memory, such as a memory tier, is in use and not freed."""


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process can allocate without swapping, and without reaching the limit of a control group.

    root: the folder with `proc`, and with the mounts of the control groups.

    A limit that can't be read counts as none.
    """
    available = _host_bytes(root)
    for group in memory_groups(root):
        available = min([available, *_bytes_below_limits(group)])
    return max(0, available)


def _host_bytes(root: Path) -> int:
    try:
        return _field(root / "proc/meminfo", "MemAvailable:") << 10
    except (OSError, ValueError):
        return _UNKNOWN_HOST_BYTES


def _bytes_below_limits(group: Path) -> Iterator[int]:
    """Yield for each limit of a control group how many more bytes it allows."""
    for limit_file, used_file, freed_first in _LIMITS:
        try:
            limit = int((group / limit_file).read_text())
            yield limit - int((group / used_file).read_text()) + _field(group / "memory.stat", freed_first)
        except (OSError, ValueError):  # this version of control groups has no such file, or there is no limit ("max")
            continue


def _field(file: Path, name: str) -> int:
    """Return the number after a name; raise ValueError if there is none."""
    for line in file.read_text().splitlines():
        if (fields := line.split())[:1] == [name]:
            return int("".join(fields[1:2]))
    raise ValueError(f"{file} has no {name}")
