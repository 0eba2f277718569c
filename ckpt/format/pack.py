"""Packs: files of blocks, written by several threads in the order in which they come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass

from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.store import Store, Writer

PACK_BYTES = 1 << 30
"""A pack is closed beyond this size: deletion frees whole packs only, so that one block still referred to keeps at
most this much."""


@dataclass(frozen=True, slots=True)
class PackFile:
    """A pack that is durable."""

    name: str
    nbytes: int


def file_lengths(store: Store, names: Iterable[str]) -> dict[str, int]:
    """The length of each object in the folders of these."""
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
    """Appends blocks to packs named by `name_of(n)`, n = 0, 1, …; `expected_bytes` sizes the reservation.

    A context manager: leaving it without `close` throws away what is not durable.
    """

    def __init__(self, store: Store, name_of: Callable[[int], str], expected_bytes: int) -> None:
        self._store = store
        self._name_of = name_of
        self._expected_bytes = expected_bytes
        self._lock = threading.Lock()
        self._open_pack: _OpenPack | None = None
        self._count = 0
        self._durable_packs: list[PackFile] = []
        self._writers = ExitStack()

    def append(self, data: memoryview) -> tuple[str, int]:
        """Write one block; return the pack's name and the block's position in it."""
        with self._lock:
            pack = self._open_pack
            if pack is None or (pack.room < len(data) and pack.room < PACK_BYTES):
                if pack is not None:
                    pack.full = True
                    if not pack.appending:
                        self._finish(pack)
                name = self._name_of(self._count)
                self._count += 1
                writer = self._store.create(name, min(self._expected_bytes, PACK_BYTES))
                pack = self._open_pack = _OpenPack(name, self._writers.enter_context(writer))
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

    def close(self) -> list[PackFile]:
        """Make every pack durable and return them, when no append is under way any more."""
        if self._open_pack is not None:
            self._finish(self._open_pack)
            self._open_pack = None
        return self._durable_packs

    def _finish(self, pack: _OpenPack) -> None:
        failpoint("save.pack")
        self._durable_packs.append(PackFile(pack.name, pack.writer.commit()))

    def __enter__(self) -> PackWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._writers.close()
