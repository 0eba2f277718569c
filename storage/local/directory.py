"""The class LocalStore, a directory as a store: O_DIRECT where possible, nothing visible before it is durable.

`durable_writer.py` has the order of a durable write.
"""

from __future__ import annotations

import builtins
import errno
import os
import random
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from ckpt.storage.base.call_timeout import call_in_thread, can_block_on, interruptible
from ckpt.storage.base.errors import Changed, NotFound
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.fd_io import DescriptorReader, convert_os_errors, write_all
from ckpt.storage.base.file_system_kind import is_on_local_file_system
from ckpt.storage.base.fsync import make_directory, make_durable_root, sync_file, sync_folder, sync_nearest_folder
from ckpt.storage.base.page_cache import in_page_cache
from ckpt.storage.base.store import (
    Buffer,
    Entry,
    Reader,
    Store,
    Version,
    check_name,
    require_length,
)
from ckpt.storage.local.durable_writer import (
    O_DIRECT,
    LocalWriter,
    delete_temporaries_of,
    link_new,
    temporary_name,
    try_open_direct,
    walk_temporaries,
)
from ckpt.storage.local.listing import require_target, scan_folders, walk_files

T = TypeVar("T")

_MAX_ADVICE_BYTES = 1 << 20
"""The bytes of one call of posix_fadvise. Linux reads at most the largest request of the device or its read-ahead for one call,
and ignores the rest."""

_FOLDER_TRIES = 1000
"""How many times the creation of a file is tried where another process removes its folder each time."""

_MAX_FOLDER_PAUSE_SECONDS = 1e-5
"""The longest pause between two of these attempts. Without it, the two processes can keep pace, so that many attempts fail."""


class LocalStore(Store):
    """A directory as a store. The first write creates it.

    direct: whether to use O_DIRECT where the file system has it; False uses buffered writes only.
    """

    fences = True
    _follows_links = True
    """Whether a listing follows symbolic links. Opening does; a subclass that refuses to open through them sets False."""

    def __init__(self, path: str | os.PathLike[str], *, direct: bool = True) -> None:
        self.root = os.path.abspath(os.path.expanduser(path))
        self.url = Path(self.root).as_uri()
        self._direct = self.past_cache = direct and bool(O_DIRECT)
        self._durable_folders: set[str] = set()  # those made durable; without a lock, as each call of a set is atomic
        self._parallel_appends: int | None = None
        self._device: str | None = None

    @property
    def device(self) -> str:
        """This host and the number of the block device, if reads can bypass the page cache."""
        if not self._direct:
            return ""
        if self._device is None:
            self._device = self._find_device()
        return self._device

    @interruptible
    def _find_device(self) -> str:
        number = os.stat(self._nearest_folder()).st_dev
        return f"disk {os.major(number)}:{os.minor(number)} of {socket.gethostname()}"

    @property
    def parallel_appends(self) -> int:
        """The number of appends that are fastest in parallel: 4 for a block device, the default for other file systems."""
        if self._parallel_appends is None:  # determined once, because a save reads this in the training thread
            self._parallel_appends = self._find_parallel_appends()
        return self._parallel_appends

    @interruptible
    def _find_parallel_appends(self) -> int:
        return 4 if os.major(os.stat(self._nearest_folder()).st_dev) else super().parallel_appends

    @property
    def parallel_reads(self) -> int:
        """The default for a file system of this host. Others answer later, so more read-ahead must be under way.

        A FUSE mount with 2 ms for each request (benchmarks/devices.py) gives 0.4 GB/s with 4 threads, and 0.52 with 8 or 16.
        """
        return super().parallel_reads if self._is_on_this_host() else 8

    @interruptible
    def _is_on_this_host(self) -> bool:
        return is_on_local_file_system(self.root)

    def _nearest_folder(self) -> str:
        """Return the root, or the nearest of its parents that exists."""
        folder = self.root
        while folder and not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        return folder

    # --- writing -----------------------------------------------------------------------------------------------

    @interruptible
    def put(self, name: str, data: Buffer) -> None:
        path, temporary = self._write_temporary(name, data)
        try:
            with convert_os_errors("publishing", path):
                self._publish_temporary(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        failpoint("local.put")
        sync_nearest_folder(os.path.dirname(path))  # a reader that waited for the object may have deleted it and its folder

    @interruptible
    def put_new(self, name: str, data: Buffer) -> None:
        path, temporary = self._write_temporary(name, data)
        try:
            with convert_os_errors("publishing", path):
                self._publish_new_temporary(temporary, path)
        finally:
            with suppress(OSError):  # it must not replace the error of the publication
                os.unlink(temporary)
        sync_nearest_folder(os.path.dirname(path))

    @interruptible
    def publish(self, name: str, data: Buffer, confirm: Callable[[], None], replaces: Version | None = None) -> None:
        """See `Store.publish`. The temporary file exists before `confirm` is called.

        So this write can't overtake a successor. The sweep of the successor deletes the temporary file, and then link(2) and
        rename(2) fail.
        """
        path, temporary = self._write_temporary(name, data)
        try:
            confirm()
            failpoint("local.publish")
            if replaces is not None:
                self._require_unchanged(name, replaces)
            with convert_os_errors("publishing", path):
                try:
                    (self._publish_new_temporary if replaces is None else self._publish_temporary)(temporary, path)
                except FileNotFoundError as error:
                    raise Changed(f"publishing {path}: another writer has deleted the prepared file") from error
        finally:
            with suppress(OSError):
                os.unlink(temporary)
        sync_nearest_folder(os.path.dirname(path))

    @interruptible
    def revoke(self, name: str) -> bool:
        delete_temporaries_of(self._path(name))
        return True

    def create(self, name: str, size_hint: int = 0) -> LocalWriter:
        path = self._path(name)
        return self._create_file(
            path, lambda: LocalWriter(path, size_hint, self._direct, publish=self._publish_temporary), LocalWriter.abort
        )

    def _create_file(self, path: str, create: Callable[[], T], discard: Callable[[T], object]) -> T:
        """Make the folder of `path`, call `create`, make the folder and its parents durable, and return what `create` returned.

        Another process may remove the folder while it is empty. So the fsync, which is slow, follows once the file exists.
        Existing folders are made durable, too: another process may have just created them, and may end before its own fsync.

        create: creates the file; raises NotFound if the folder is missing.
        discard: deletes the file again if a folder can't be made durable.
        """
        for tries_left in reversed(range(_FOLDER_TRIES)):
            try:
                unsynced = self._make_folder(os.path.dirname(path))
                created = create()
                break
            except NotFound:
                if not tries_left:
                    raise
                time.sleep(random.SystemRandom().uniform(0, _MAX_FOLDER_PAUSE_SECONDS))
        try:
            for folder in unsynced:
                sync_folder(os.path.dirname(folder))
                self._durable_folders.add(folder)
        except BaseException:
            discard(created)
            raise
        return created

    def _publish_temporary(self, temporary: str, path: str) -> None:
        os.replace(temporary, path)

    def _publish_new_temporary(self, temporary: str, path: str) -> None:
        link_new(temporary, path)

    def _write_temporary(self, name: str, data: Buffer) -> tuple[str, str]:
        path = self._path(name)
        temporary = temporary_name(path)

        def create() -> int:
            with convert_os_errors("writing", path):
                return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

        def discard(fd: int) -> None:
            os.close(fd)
            with suppress(OSError):  # the error of the folder is the one to raise
                os.unlink(temporary)

        fd = self._create_file(path, create, discard)
        try:
            write_all(fd, memoryview(data).cast("B"), 0, path)
            sync_file(fd, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        finally:
            os.close(fd)
        return path, temporary

    def _make_root(self) -> None:
        make_durable_root(self.root)

    def _make_folder(self, path: str) -> list[str]:
        """Create a folder and its parents. Return those below the root that may not be durable yet, the parents first."""
        unsynced = []
        while not (path in self._durable_folders and os.path.isdir(path)):
            if path == self.root:
                self._make_root()
                self._durable_folders.add(path)
                break
            unsynced.append(path)
            path = os.path.dirname(path)
        for folder in reversed(unsynced):
            with convert_os_errors("making the directory", folder), suppress(FileExistsError):
                make_directory(folder)
        return unsynced[::-1]

    # --- reading -----------------------------------------------------------------------------------------------

    def get(self, name: str) -> bytes:
        return self._get(name, None)

    def get_up_to(self, name: str, limit: int) -> bytes:
        return self._get(name, limit)

    @interruptible
    def _get(self, name: str, limit: int | None) -> bytes:
        path = self._path(name)
        with os.fdopen(_open_to_read(path, self.root), "rb") as file, convert_os_errors("reading", path):
            require_length(f"{self.url}/{name}", os.fstat(file.fileno()).st_size, limit)
            return file.read()

    @interruptible
    def open(self, name: str) -> Reader:
        path = self._path(name)
        return DescriptorReader(_open_to_read(path, self.root), path)

    @interruptible
    def open_once(self, name: str) -> Reader:
        path = self._path(name)
        fd = _open_to_read(path, self.root)
        # Open the same file by its descriptor, because another file may have the name now.
        return DescriptorReader(fd, path, try_open_direct(f"/proc/self/fd/{fd}", os.O_RDONLY) if self._direct else None)

    @interruptible
    def descriptor(self, name: str) -> int:
        """Return a file descriptor of an object that is open for reading. The caller closes it."""
        return _open_to_read(self._path(name), self.root)

    @interruptible
    def prefetch(self, name: str, nbytes: int, start: int = 0) -> None:
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                fd = os.open(self._path(name), os.O_RDONLY)
                try:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead beyond the ranges below
                    end = start + nbytes
                    for position in range(start, end, _MAX_ADVICE_BYTES):
                        if not in_page_cache(fd, position):  # for cached bytes the kernel would look up every page
                            os.posix_fadvise(fd, position, min(_MAX_ADVICE_BYTES, end - position), os.POSIX_FADV_WILLNEED)
                finally:
                    os.close(fd)

    @interruptible
    def exists(self, name: str) -> bool:
        return super().exists(name)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        names_begin = f"{prefix}/" if prefix else ""
        return self._run_listing(walk_files(self._folder(prefix), names_begin, self.root, self._follows_links))

    def _run_listing(self, found: Iterator[T]) -> Iterator[T]:
        """Return the items of a listing, one by one. If the file system may hang, list in another thread, with a timeout."""
        if can_block_on(self.root):
            return found
        return iter(call_in_thread(partial(builtins.list, found), f"listing {self.root}"))

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        return self._run_listing(scan_folders(self._folder(prefix), self.root, self._follows_links))

    # --- deleting ----------------------------------------------------------------------------------------------

    @interruptible
    def delete(self, names: Iterable[str]) -> None:
        """Delete objects and the folders that become empty, and make the deletions durable."""
        folders = set()
        for name in names:
            path = self._path(name)
            # A folder is not an object, and there is none below an object: the name counts as missing.
            with convert_os_errors("deleting", path), suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                failpoint("local.delete")
                self._remove_file(path)
                folders.add(os.path.dirname(path))
        for folder in sorted(folders, key=len, reverse=True):
            if not self._remove_empty_folders(folder):
                sync_nearest_folder(folder)

    def _remove_file(self, path: str) -> None:
        os.unlink(path)

    @interruptible
    def sweep_temporaries(self, prefix: str, *, folders: bool = True) -> None:
        """Delete the temporary files of killed writers below `prefix`. Only the holder of the writer lease may call it."""
        for base, names in walk_temporaries(self._folder(prefix), folders):
            for name in names:
                with suppress(NotFound), convert_os_errors("deleting", os.path.join(base, name)):
                    os.unlink(os.path.join(base, name))
            self._remove_empty_folders(base)

    def _remove_empty_folders(self, folder: str) -> bool:
        """Remove `folder` and its parents below the root, as long as they are empty; return whether any was removed."""
        removed = False
        while folder != self.root and folder.startswith(self.root):
            try:
                os.rmdir(folder)
            except OSError:
                break
            self._durable_folders.discard(folder)
            removed = True
            folder = os.path.dirname(folder)
        if removed:
            with suppress(NotFound):
                sync_folder(folder)
        return removed

    # --- names -------------------------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return os.path.join(self.root, check_name(name))

    def _folder(self, prefix: str) -> str:
        return self._path(prefix) if prefix else self.root


def _open_to_read(path: str, root: str) -> int:
    """Open an object; raise NotFound for a folder and for a name below an object, as an object store does.

    Raises StoreError for a link that leads to nothing, which is not a missing object. root: as in `require_target`.
    """
    with convert_os_errors("opening", path):
        try:
            fd = os.open(path, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError) as error:
            require_target(path, root)
            raise FileNotFoundError(errno.ENOENT, "no such file", path) from error
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, "a folder", path)
        return fd
