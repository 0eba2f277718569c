"""Packs, the files of blocks: several threads append blocks to one pack.

A pack is a sequence of blocks. Each block starts at a multiple of 4096 bytes and is followed by zeros up to the next one.
A pack has no header: the manifest stores the position and the length of each block.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass

from ckpt.errors import DAMAGE_ADVICE
from ckpt.storage.base.errors import IntegrityError, NoSpace
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.store import Store, Writer, is_name

PACK_BYTES = 1 << 30
"""A block that would make a pack longer than this begins a new one. Retention deletes whole packs only, so one block that is
still needed keeps about this many bytes at most. The zeros between blocks do not count."""


@dataclass(frozen=True, slots=True)
class PackFile:
    """A durable pack: its name below the root of the repository, and its length."""

    name: str
    nbytes: int


_STEP_FILE = re.compile(r"steps/([0-9]{1,19})(?:/[^/]+){1,4}")


def step_of_file(name: str) -> int:
    """Return the number of the step in whose folder a file of a repository is, as a pack: `steps/<step>/…`.

    Raises IntegrityError for any other name.
    """
    if (found := _STEP_FILE.fullmatch(name)) is None or not is_name(name):
        raise IntegrityError(f"{name[:200]!r} is not a valid name of a file of a step; {DAMAGE_ADVICE}")
    return int(found[1])


def file_lengths(store: Store, names: Iterable[str]) -> dict[str, int]:
    """Return the length of each file in the folders of these files, by name."""
    folders = {name.rpartition("/")[0] for name in names}
    return {entry.name: entry.nbytes for folder in folders for entry in store.list(folder)}


class _OpenPack:
    __slots__ = ("appending", "full", "name", "room", "writer")

    def __init__(self, name: str, writer: Writer) -> None:
        self.name = name
        self.writer = writer
        self.room = PACK_BYTES
        self.appending = 0
        self.full = False


class PackWriter:
    """Appends blocks to packs; a context manager, and safe to use from several threads.

    Leaving the context without `close` discards packs that are not durable.

    name_of: returns the name of pack n, for n = 0, 1, …
    expected_bytes: of all blocks, from which the store reserves space.
    make_room: deletes what no step needs. It is called once, if the store has no space for a pack; the store is then asked
        again. None raises NoSpace at once.
    """

    def __init__(
        self, store: Store, name_of: Callable[[int], str], expected_bytes: int, make_room: Callable[[], None] | None = None
    ) -> None:
        self._store = store
        self._name_of = name_of
        self._expected_bytes = expected_bytes
        self._make_room = make_room
        self._lock = threading.Lock()
        """Guards `_count`, `_expected_bytes`, `_make_room` and `_open_pack`. It also guards the room and the running appends of
        each pack."""
        self._open_pack: _OpenPack | None = None
        self._count = 0
        self._durable_packs: list[PackFile] = []
        """Threads append to it with or without the lock; `close` returns it after the last `append`."""
        self._writers = ExitStack()

    def append(self, data: memoryview) -> tuple[str, int]:
        """Write one block; return the name of its pack and its position there in bytes."""
        with self._lock:
            pack = self._open_pack
            if pack is None or (pack.room < len(data) and pack.room < PACK_BYTES):
                if pack is not None:
                    pack.full = True
                    if not pack.appending:
                        self._finish(pack)
                name = self._name_of(self._count)
                self._count += 1
                pack = self._open_pack = _OpenPack(name, self._writers.enter_context(self._create(name)))
            pack.room -= len(data)
            self._expected_bytes = max(0, self._expected_bytes - len(data))
            pack.appending += 1
        failpoint("save.append")
        try:
            position = pack.writer.append(data)
        finally:
            with self._lock:
                pack.appending -= 1
                last = pack.full and not pack.appending
        if last:
            self._finish(pack)
        return pack.name, position

    def _create(self, name: str) -> Writer:
        """Return the writer of a new pack. Needs `_lock`, so other threads wait while `make_room` deletes files.

        Raises NoSpace if there is not enough space for it, also after `make_room`.
        """
        nbytes = min(self._expected_bytes, PACK_BYTES)
        try:
            return self._store.create(name, nbytes)
        except NoSpace:
            make_room, self._make_room = self._make_room, None
            if make_room is None:
                raise
        make_room()
        return self._store.create(name, nbytes)

    def close(self) -> list[PackFile]:
        """Make every pack durable and return them all. Call it after every `append` has returned."""
        with self._lock:
            pack, self._open_pack = self._open_pack, None
        if pack is not None:
            self._finish(pack)
        return self._durable_packs

    def _finish(self, pack: _OpenPack) -> None:
        failpoint("save.pack")
        self._durable_packs.append(PackFile(pack.name, pack.writer.commit()))

    def __enter__(self) -> PackWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._writers.close()
