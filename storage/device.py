"""What a node serves, and what a directory that joins a namespace by itself is: objects and registers in one folder."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt.storage.base import Store
from ckpt.storage.errors import AlreadyExists, InvalidName, StoreError
from ckpt.storage.local import LocalStore, is_temporary
from ckpt.storage.sqlite import SqliteRegisters
from ckpt.storage.sums import CELL_BYTES, bad_cells

OBJECTS = "objects"
REGISTERS = "registers.sqlite"
IDENTITY = "device.json"


QUARANTINE = "quarantine"
LOCK = "lock"


@dataclass(frozen=True, slots=True)
class Info:
    """What a member says of itself."""

    identity: str
    used_bytes: int | None
    free_bytes: int | None
    """None where that can't be known."""
    state: str = "serving"
    """Or "read-only", or "draining"."""
    labels: tuple[tuple[str, str], ...] = ()
    uploads: int = 0


def damaged(store: Store, name: str, ranges: Sequence[tuple[int, int, bytes]]) -> list[int]:
    """The numbers of those ranges (position, length, checksums of cells) of an object that can't be read as they were."""
    bad = []
    step = 16 * CELL_BYTES
    buffer = memoryview(bytearray(step))
    with store.open(name) as reader:
        for number, (position, nbytes, cells) in enumerate(ranges):
            for start in range(0, nbytes, step):
                data = buffer[: min(step, nbytes - start)]
                try:
                    got = reader.read_into(position + start, data)
                except StoreError:  # the disk can't read it
                    got = -1
                first = start // CELL_BYTES * 8
                if got < len(data) or bad_cells(data, cells[first : first + -(-len(data) // CELL_BYTES) * 8]):
                    bad.append(number)
                    break
    return bad


class DeviceStore(LocalStore):
    """The objects of a device. A symbolic link that leads out of the folder is refused, whoever made it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._real = os.path.realpath(self.root)

    def _path(self, name: str) -> str:
        path = super()._path(name)
        folder, last = os.path.split(path)
        real = os.path.join(os.path.realpath(folder), last)
        if os.path.islink(real) or not real.startswith(self._real + os.sep):
            raise InvalidName(f"{name} leads through a symbolic link out of {self.root}; remove the link")
        return path


class Device:
    """One folder on one disk: objects, registers, and an identity that is drawn when it is first used."""

    def __init__(self, path: str | os.PathLike[str], capacity: int | None = None) -> None:
        self.path = os.path.abspath(os.path.expanduser(path))
        self.store = DeviceStore(os.path.join(self.path, OBJECTS))
        self.registers = SqliteRegisters(os.path.join(self.path, REGISTERS))
        self._capacity = capacity
        self._lock: int | None = None

    @property
    def limited(self) -> bool:
        """Whether it may take less than the disk has."""
        return self._capacity is not None

    def identity(self) -> str:
        """Of this device, for ever: a new disk in the same place has another."""
        folder = LocalStore(self.path)
        try:
            with open(os.path.join(self.path, IDENTITY), "rb") as file:
                return str(json.load(file)["id"])
        except FileNotFoundError:
            try:
                folder.put_new(IDENTITY, json.dumps({"id": secrets.token_hex(16), "format": 1}).encode())
            except AlreadyExists:
                pass  # by another process, at the same time
            return self.identity()
        except OSError as error:
            raise StoreError(f"{self.path}/{IDENTITY} can't be read: {error.strerror}; check the disk") from error
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{self.path}/{IDENTITY} is damaged ({error}); write {{\"id\": \"…\"}} anew") from error

    def usage(self) -> tuple[int, int]:
        """Bytes that the objects take, and bytes that are free for more."""
        where = Path(self.path)
        while not where.exists():
            where = where.parent
        disk = shutil.disk_usage(where)
        if self._capacity is None:
            return disk.used, disk.free
        used = sum(entry.nbytes for entry in self.store.list())
        return used, max(0, min(disk.free, self._capacity - used))

    def info(self) -> Info:
        """Who this is and how it is."""
        return Info(self.identity(), *self.usage())

    def verify(self, name: str, ranges: Sequence[tuple[int, int, bytes]]) -> list[int]:
        """The numbers of those ranges (position, length, checksums of cells) of an object that are damaged."""
        return damaged(self.store, name, ranges)

    def inventory(self) -> dict[str, tuple[int, float]]:
        """Length of every object, and the seconds since it was made durable, by this host's own clock."""
        now = time.time()
        found = {}
        for entry in self.store.list():
            with suppress(OSError):
                found[entry.name] = entry.nbytes, now - os.stat(os.path.join(self.store.root, entry.name)).st_mtime
        return found

    def quarantine(self, name: str) -> None:
        """Keep a damaged object for whoever wants to know why, where no reader finds it."""
        target = os.path.join(self.path, QUARANTINE, f"{name.replace('/', '_')}-{secrets.token_hex(4)}")
        os.makedirs(os.path.dirname(target), exist_ok=True)
        try:
            os.replace(self.store._path(name), target)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StoreError(f"moving {name} to {target} failed: {error.strerror}") from error

    def sweep(self, older_seconds: float) -> None:
        """Remove what writers that were killed this long ago have left half-written, where no node does it at its start."""
        limit = time.time() - older_seconds
        for base, _, names in os.walk(self.store.root):
            for name in filter(is_temporary, names):
                path = os.path.join(base, name)
                with suppress(OSError):
                    if os.stat(path).st_mtime < limit:
                        os.unlink(path)

    def lock(self) -> None:
        """Keep other nodes away from this folder, until `close` or the end of the process. Raises StoreError."""
        os.makedirs(self.path, exist_ok=True)
        lock = os.open(os.path.join(self.path, LOCK), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise StoreError(f"another ckpt-node serves {self.path} already; one folder, one node") from error
        self._lock = lock

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        self.registers.close()
        self.store.close()
