"""The control groups of Linux that count the memory of this process, of version 1 or 2 (cgroups(7)).

A container has such a group. At its limit, the kernel kills a process in it, however much memory the host has.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class _Mount:
    """A place where groups are folders."""

    controller: str
    """`memory` for version 1, "" for version 2, as the lines of /proc/PID/cgroup have it."""
    root: str
    """The group that is mounted."""
    folder: Path

    def own_group(self, path: str) -> Path:
        """Return the folder of the group with a path; that of the mount if it has none below, as in some containers."""
        try:
            relative = PurePosixPath(path).relative_to(self.root)
        except ValueError:
            return self.folder
        folder = self.folder / relative
        return folder if ".." not in relative.parts and folder.is_dir() else self.folder


def memory_groups(root: Path = Path("/")) -> list[Path]:
    """Return the folders of the groups that count the memory of this process, from its own up to the one that is mounted.

    root: the folder with `proc`, and with the mounts.

    The list is empty where the system has no control groups, or they can't be read.
    """
    mounts = _memory_mounts(root)
    groups: list[Path] = []
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        mount = next((mount for mount in mounts if mount.controller in controllers.split(",")), None)
        if mount is not None:
            own = mount.own_group(path)
            groups += [group for group in (own, *own.parents) if group.is_relative_to(mount.folder)]
    return groups


def _memory_mounts(root: Path) -> list[_Mount]:
    """Return the mounts in /proc/self/mountinfo (proc_pid_mountinfo(5)) that may have groups with a memory controller."""
    mounts = []
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kind, options = before.split(), after.split()[:1], after.split()[-1:]
        if len(fields) < 5 or not (kind == ["cgroup2"] or (kind == ["cgroup"] and "memory" in options[0].split(","))):
            continue
        mounted, folder = (re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), field) for field in fields[3:5])
        mounts.append(_Mount("memory" if kind == ["cgroup"] else "", mounted, root / folder.lstrip("/")))
    return mounts


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
