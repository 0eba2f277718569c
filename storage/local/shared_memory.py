"""A directory in shared memory as a store.

A page of tmpfs that is used for the first time costs several times what the copy into it costs: the kernel finds and zeroes
it. So the packs of deleted steps are kept, nameless, and the next packs are written into them: two and a half times as fast,
says benchmarks/tiers.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

from ckpt.storage.local.directory import LocalStore
from ckpt.storage.local.writer import LocalWriter, temporary_name

REUSED_SUFFIX = ".pack"


class MemoryStore(LocalStore):
    """Like a LocalStore. A reader that still reads a deleted pack may see other bytes: it must verify them."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, direct=False)
        self._spare_folder = os.path.join(self.root, ".spare")

    def create(self, name: str, size_hint: int = 0) -> LocalWriter:
        path = self._path(name)
        self._make_folder(os.path.dirname(path))
        return LocalWriter(path, size_hint, direct=False, reuse=self.reuse_spare if name.endswith(REUSED_SUFFIX) else None)

    def delete(self, names: Iterable[str]) -> None:
        """Packs are kept for their pages, in the place of those kept before: never more than were deleted at once."""
        names = list(names)
        before = self._list_spares() if any(name.endswith(REUSED_SUFFIX) for name in names) else []
        super().delete(names)
        for path in before:
            with suppress(FileNotFoundError):
                os.unlink(path)

    def _remove_file(self, path: str) -> None:
        if path.endswith(REUSED_SUFFIX):
            os.makedirs(self._spare_folder, exist_ok=True)
            os.rename(path, temporary_name(os.path.join(self._spare_folder, "pack")))
        else:
            super()._remove_file(path)

    def reuse_spare(self, path: str, nbytes: int) -> bool:
        """Move the kept file that is nearest in size to `path`. Safe among processes: a rename has one winner."""
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


def _file_bytes(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
