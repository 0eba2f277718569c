"""The class MemoryStore, a directory in shared memory as a store, which reuses the memory of deleted packs.

The first write to a page of tmpfs takes several times as long as a later one, because the kernel allocates and zeroes the page.
So the files of deleted packs are kept under spare names, and the next packs are written into them. That is two and a half times
as fast (benchmarks/tiers.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from ckpt.storage.base.errors import NoSpace
from ckpt.storage.base.store import Buffer
from ckpt.storage.local.directory import LocalStore
from ckpt.storage.local.durable_writer import LocalWriter, temporary_name

T = TypeVar("T")

REUSED_SUFFIX = ".pack"
"""The files whose memory is reused have this suffix."""


class MemoryStore(LocalStore):
    """A LocalStore in shared memory. A reader of a pack that is then deleted may see other bytes, so it must verify them."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, direct=False)
        self._spare_folder = os.path.join(self.root, ".spare")

    def create(self, name: str, size_hint: int = 0) -> LocalWriter:
        path = self._path(name)
        reuse = self.reuse_spare if name.endswith(REUSED_SUFFIX) else None

        def create() -> LocalWriter:
            return self._create_file(path, lambda: LocalWriter(path, size_hint, direct=False, reuse=reuse), LocalWriter.abort)

        return self._with_spares_as_room(create)

    def _write_temporary(self, name: str, data: Buffer) -> tuple[str, str]:
        return self._with_spares_as_room(partial(super()._write_temporary, name, data))

    def _with_spares_as_room(self, write: Callable[[], T]) -> T:
        """Return what `write` returns. If there is no space left, delete the spare files, and call it once more."""
        try:
            return write()
        except NoSpace:
            if not (spares := self._list_spares()):
                raise
            self._remove_spares(spares)
            return write()

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects. Packs become spare files and replace earlier ones, so only those of one call are kept.

        Their memory is free for others after the next such delete, after `sweep_temporaries("")`, or when space is short.
        """
        names = list(names)
        before = self._list_spares() if any(name.endswith(REUSED_SUFFIX) for name in names) else []
        super().delete(names)
        self._remove_spares(before)

    def _remove_file(self, path: str) -> None:
        if path.endswith(REUSED_SUFFIX):
            os.makedirs(self._spare_folder, exist_ok=True)
            os.rename(path, temporary_name(os.path.join(self._spare_folder, "pack")))
        else:
            super()._remove_file(path)

    def sweep_temporaries(self, prefix: str, *, folders: bool = True) -> None:
        super().sweep_temporaries(prefix, folders=folders)
        if not prefix:
            self._remove_spares(self._list_spares())

    def reuse_spare(self, path: str, nbytes: int) -> bool:
        """Move the spare file whose size is nearest to `nbytes` to `path`; return False if there is none.

        Several processes may call it: only one of them can rename a file.
        """
        for spare in sorted(self._list_spares(), key=lambda spare: abs(_file_bytes(spare) - nbytes)):
            with suppress(FileNotFoundError):
                os.rename(spare, path)
                return True
        return False

    def _list_spares(self) -> list[str]:
        try:
            return [entry.path for entry in os.scandir(self._spare_folder)]
        except FileNotFoundError:
            return []

    def _remove_spares(self, paths: list[str]) -> None:
        for path in paths:
            with suppress(FileNotFoundError):  # another process has reused it
                os.unlink(path)


def _file_bytes(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
