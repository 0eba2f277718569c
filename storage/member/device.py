"""`Device`: objects and registers in one folder, which a node serves or which is a member by itself."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt.storage.base.errors import AlreadyExists, InvalidName, StoreError, Unavailable
from ckpt.storage.base.fd_io import convert_os_errors, describe_os_error
from ckpt.storage.base.fsync import make_durable_root, sync_folder, sync_nearest_folder
from ckpt.storage.local.directory import LocalStore
from ckpt.storage.local.durable_writer import LocalWriter, walk_temporaries
from ckpt.storage.member.damaged_ranges import ChecksummedRange, find_damaged_ranges
from ckpt.storage.member.inventory import PART_SECONDS, Inventory, InventoryPart, read_all_parts, read_inventory_part
from ckpt.storage.registers.sqlite import SqliteRegisters

OBJECTS = "objects"
REGISTERS = "registers.sqlite"
IDENTITY = "device.json"
QUARANTINE = "quarantine"
LOCK = "lock"

_RECOUNT_SECONDS = 10.0

_NO_LINK_ERRNOS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Errors of a file system without hard links, or whose limit of links of one file is reached."""


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """The identity, usage and state that a member reports."""

    identity: str
    used_bytes: int | None
    """None where unknown, as for a bucket."""
    free_bytes: int | None
    """None where unknown, as for a bucket."""
    state: str = "serving"
    """"serving", "read-only" or "draining"."""
    labels: tuple[tuple[str, str], ...] = ()
    """Names and values that the operator gave to the node."""
    uploads: int = 0
    """Uploads in progress."""


class DeviceStore(LocalStore):
    """The objects of a device. A name that leads out of its folder through a symbolic link is refused.

    make_folder: creates the folder of the objects durably; None for `make_durable_root`.
    """

    _follows_links = False

    def __init__(self, path: str | os.PathLike[str], make_folder: Callable[[str], None] | None = None) -> None:
        super().__init__(path)
        self._make_device_folder = make_folder
        self._real_root = os.path.realpath(self.root)
        self._used_bytes = 0
        self._counted_at: float | None = None  # time.monotonic() of the last count
        self._is_exclusive = False
        self._count_lock = threading.Lock()
        """Guards additions to `_used_bytes`. A count sets the value without it: a change meanwhile may be missed."""

    def count_exclusively(self) -> None:
        """Count the used bytes once, since no other process writes to the folder from now on."""
        self._is_exclusive = True
        self.used_bytes()

    def _make_root(self) -> None:
        (self._make_device_folder or make_durable_root)(self.root)

    def create(self, name: str, size_hint: int = 0) -> LocalWriter:
        writer = super().create(name, size_hint)
        # On a file system without such locks, `Device.sweep` deletes the file of a writer that pauses for the grace time.
        with suppress(OSError):
            fcntl.flock(writer.descriptors()[0], fcntl.LOCK_SH)
        return writer

    def used_bytes(self) -> int:
        """Return the bytes of all objects. If other processes may write too, they are counted again every 10 s."""
        now = time.monotonic()
        if self._counted_at is None or not (self._is_exclusive or now - self._counted_at < _RECOUNT_SECONDS):
            self._used_bytes, self._counted_at = sum(entry.nbytes for entry in self.list()), now
        return self._used_bytes

    def _add_used_bytes(self, nbytes: int) -> None:
        with self._count_lock:
            self._used_bytes += nbytes

    # Two threads that write and delete one name at the same time may make the count wrong until the next start. That does not
    # justify a lock, since names of objects of a namespace are never reused.

    def _publish_temporary(self, temporary: str, path: str) -> None:
        more = _file_bytes(temporary) - _file_bytes(path)
        super()._publish_temporary(temporary, path)
        self._add_used_bytes(more)

    def _publish_new_temporary(self, temporary: str, path: str) -> None:
        super()._publish_new_temporary(temporary, path)
        self._add_used_bytes(_file_bytes(path))

    def _remove_file(self, path: str) -> None:
        less = _file_bytes(path)
        super()._remove_file(path)
        self._add_used_bytes(-less)

    def link(self, name: str, to: str) -> None:
        """Give an object a second name, durably; raise NotFound."""
        path, target = self._path(name), self._path(to)

        def create() -> None:
            with convert_os_errors("linking", path):
                os.link(path, target)

        try:
            self._create_file(target, create, lambda _: os.unlink(target))
        except StoreError as error:
            if getattr(error.__cause__, "errno", None) not in _NO_LINK_ERRNOS:
                raise
            self._copy(name, to)
            return
        self._add_used_bytes(_file_bytes(target))
        sync_nearest_folder(os.path.dirname(target))

    def _copy(self, name: str, to: str) -> None:
        step = 8 << 20
        with self.open(name) as reader, self.create(to) as writer:
            buffer, position = memoryview(bytearray(step)), 0
            while got := reader.read_into(position, buffer):
                writer.append(buffer[:got])
                position += got
            writer.commit()

    def move_out(self, name: str, target: str) -> None:
        """Move an object out of the store to the path `target`, durably; raise OSError."""
        path = self._path(name)
        less = _file_bytes(path)
        os.replace(path, target)
        self._add_used_bytes(-less)
        sync_folder(os.path.dirname(target))
        sync_nearest_folder(os.path.dirname(path))

    def _path(self, name: str) -> str:
        path = super()._path(name)
        folder, last = os.path.split(path)
        real = os.path.join(os.path.realpath(folder), last)
        if os.path.islink(real) or not real.startswith(self._real_root + os.sep):
            raise InvalidName(f"{name} leads through a symbolic link out of {self.root}; remove the link")
        return path


def _is_locked(path: str) -> bool:
    """Return whether a running process has a lock on a file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _file_bytes(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


class Device:
    """One folder on one disk: objects, registers, and an identity that is chosen at first use.

    capacity: the most bytes of objects. None: only the disk limits it. needs_parent: whether the parent of the folder must
    exist, so that a typing error or an unmounted disk is not taken for an empty device.
    """

    def __init__(self, path: str | os.PathLike[str], capacity: int | None = None, needs_parent: bool = False) -> None:
        self.path = os.path.abspath(os.path.expanduser(path))
        self.store = DeviceStore(os.path.join(self.path, OBJECTS), self._make_folder)
        self.registers = SqliteRegisters(os.path.join(self.path, REGISTERS), self._make_folder)
        self._needs_parent = needs_parent
        self._capacity_bytes = capacity
        self._lock_fd: int | None = None

    @property
    def is_limited(self) -> bool:
        """Whether the device has a capacity, which may be less than the disk."""
        return self._capacity_bytes is not None

    def _make_folder(self, folder: str) -> None:
        """Create the folder of this device, or one in it, durably."""
        self._require_parent()
        make_durable_root(folder)

    def _require_parent(self) -> None:
        """Raise Unavailable if neither the folder of this device nor its parent exists, where the parent must exist."""
        parent = os.path.dirname(self.path)
        if self._needs_parent and not os.path.isdir(self.path) and not os.path.isdir(parent):
            raise Unavailable(
                f"neither {self.path} nor the folder {parent} exists; mount the disk, create the folder, or correct the path"
            )

    def identity(self) -> str:
        """Return the permanent identity of this device; a new disk mounted at the same path has another one.

        Raises StoreError if its file is damaged or can't be read, and Unavailable if the parent of this folder is needed and
        missing.
        """
        folder = LocalStore(self.path)
        try:
            with open(os.path.join(self.path, IDENTITY), "rb") as file:
                return str(json.load(file)["id"])
        except FileNotFoundError:
            self._require_parent()
            try:
                folder.put_new(IDENTITY, json.dumps({"id": secrets.token_hex(16), "format": 1}).encode())
            except AlreadyExists:
                pass  # another process created it at the same time
            return self.identity()
        except OSError as error:
            raise StoreError(f"{self.path}/{IDENTITY} can't be read: {error.strerror}; check the disk") from error
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f'{self.path}/{IDENTITY} is damaged ({error}); restore its content {{"id": "…"}}') from error

    def usage(self) -> tuple[int, int]:
        """Return the bytes of all objects, and the bytes that are free for more."""
        where = Path(self.path)
        while not where.exists():
            where = where.parent
        free = shutil.disk_usage(where).free
        used = self.store.used_bytes()
        return used, free if self._capacity_bytes is None else max(0, min(free, self._capacity_bytes - used))

    def info(self) -> MemberInfo:
        """Return the identity and the usage of this device."""
        return MemberInfo(self.identity(), *self.usage())

    def verify(self, name: str, ranges: Sequence[ChecksummedRange]) -> list[int]:
        """Return the indices of the damaged ranges of an object. Raises NotFound, and StoreError if the store fails."""
        return find_damaged_ranges(self.store, name, ranges)

    def link(self, name: str, to: str) -> None:
        """Give an object a second name, durably; raise NotFound."""
        self.store.link(name, to)

    def inventory(self) -> Inventory:
        """Return length and age of every object: the seconds since it was written or named, by the clock of this host."""
        return read_all_parts(self.inventory_part)

    def inventory_part(self, after: str = "", seconds: float = PART_SECONDS) -> InventoryPart:
        """Return the objects of the folders after `after` that can be listed in about `seconds`.

        Raises StoreError if a folder can't be listed, and Unavailable if the parent of this folder is needed and missing.
        """
        self._require_parent()
        return read_inventory_part(self.store.list_folders(), after, seconds, self._inventory_of)

    def _inventory_of(self, folder: str) -> Inventory:
        now = time.time()
        found = {}
        for entry in self.store.list(folder):
            path = os.path.join(self.store.root, entry.name)
            with convert_os_errors("looking up", path), suppress(FileNotFoundError):  # deleted since the listing
                stat = os.stat(path)
                # ctime too: a long upload may write its last byte long before it gives the object its name.
                found[entry.name] = entry.nbytes, now - max(stat.st_mtime, stat.st_ctime)
        return found

    def quarantine(self, name: str) -> None:
        """Move a damaged object to the quarantine folder, where readers do not find it and an operator can examine it.

        Raises StoreError if it can't be moved.
        """
        target = os.path.join(self.path, QUARANTINE, f"{name.replace('/', '_')}-{secrets.token_hex(4)}")
        self._make_folder(os.path.dirname(target))
        try:
            self.store.move_out(name, target)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StoreError(f"moving {name} to {target} failed: {describe_os_error(error)}") from error

    def sweep(self, older_seconds: float) -> None:
        """Delete the temporary files of killed writers from this age on. For a folder that no node serves.

        A writer has a lock on its file, which the system releases when the process ends. A node deletes such files when it
        starts.

        Raises StoreError if a folder can't be listed now, see `walk_temporaries`.
        """
        limit = time.time() - older_seconds
        for base, names in walk_temporaries(self.store.root, folders=True):
            for name in names:
                path = os.path.join(base, name)
                with suppress(OSError):
                    if os.stat(path).st_mtime < limit and not _is_locked(path):
                        os.unlink(path)

    def lock(self) -> None:
        """Lock this folder against other nodes until `close` or the end of the process; raise StoreError if it is locked."""
        os.makedirs(self.path, exist_ok=True)
        lock = os.open(os.path.join(self.path, LOCK), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if error.errno != errno.EWOULDBLOCK:
                raise StoreError(f"locking {self.path} failed: {describe_os_error(error)}") from error
            raise StoreError(f"another ckpt-node serves {self.path} already; give each node its own folder") from error
        self._lock_fd = lock
        self.store.sweep_temporaries("")  # left by a killed node; no other process writes to this folder
        self.store.count_exclusively()

    def close(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None
        self.registers.close()
        self.store.close()
