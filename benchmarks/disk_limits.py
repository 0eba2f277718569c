"""Limits the speed of a disk for some processes, by a control group of Linux (version 1 or 2). Root is needed."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
ROOT_1 = ROOT / "blkio"
"""The root of the groups of version 1, if the machine has them."""

REMOVE_SECONDS = 5.0
"""How long to wait for the last process of a group to end."""


class CannotLimit(Exception):
    """This machine or this user can't limit the disk."""


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """The most bytes and requests a second; None for no limit."""

    read_bytes: int | None = None
    write_bytes: int | None = None
    requests: int | None = None


class LimitedDisk:
    """A control group whose processes share a limited disk."""

    def __init__(self, device: str) -> None:
        """device: the number of the disk, as MAJOR:MINOR."""
        self._device = device
        self._is_version_1 = ROOT_1.is_dir()
        self._group = (ROOT_1 if self._is_version_1 else ROOT) / f"ckpt-bench-{os.getpid()}-{secrets.token_hex(3)}"

    @property
    def processes(self) -> Path:
        """The file to which a process writes its number to be limited."""
        return self._group / "cgroup.procs"

    def create(self) -> None:
        if not self._is_version_1:
            (ROOT / "cgroup.subtree_control").write_text("+io")
        self._group.mkdir()

    def set_speed(self, speed: DiskSpeed) -> None:
        """Change the limits; processes may use the disk meanwhile."""
        limits = {"r": speed.read_bytes, "w": speed.write_bytes}
        if self._is_version_1:
            for direction, name in (("r", "read"), ("w", "write")):
                self._write(f"blkio.throttle.{name}_bps_device", str(limits[direction] or 0))
                self._write(f"blkio.throttle.{name}_iops_device", str(speed.requests or 0))
            return
        words = [f"{direction}bps={limit or 'max'}" for direction, limit in limits.items()]
        self._write("io.max", " ".join([*words, *(f"{d}iops={speed.requests or 'max'}" for d in limits)]))

    def _write(self, file: str, words: str) -> None:
        (self._group / file).write_text(f"{self._device} {words}")

    def remove(self) -> None:
        """Remove the group, once its processes have ended."""
        deadline = time.monotonic() + REMOVE_SECONDS
        while self._group.exists():
            try:
                self._group.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


@contextmanager
def limited_disk(folder: Path, speed: DiskSpeed) -> Iterator[LimitedDisk]:
    """Yield a control group that limits the disk of a folder for its processes. Raises CannotLimit if that is not possible."""
    disk = LimitedDisk(device_of(folder))
    try:
        try:
            disk.create()
            disk.set_speed(speed)
        except OSError as error:
            raise CannotLimit(f"no control group can limit the disk: {error}") from error
        yield disk
    finally:
        with suppress(FileNotFoundError):
            disk.remove()


def device_of(folder: Path) -> str:
    """Return the number of the disk of a folder, as MAJOR:MINOR: that of the whole disk if the folder is on a partition."""
    device = os.stat(folder).st_dev
    if not os.major(device):
        raise CannotLimit(f"{folder} is not on a block device")
    entry = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    if (entry / "partition").exists():
        entry = entry.parent
    return (entry / "dev").read_text().strip()
