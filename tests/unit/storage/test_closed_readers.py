"""A reader that is closed during a read, as by a hedged read that ends late."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt.storage.base import fd_io
from ckpt.storage.base.errors import StoreError
from ckpt.storage.local.directory import LocalStore
from ckpt.storage.testing import random_bytes, write_object

LENGTH = 1 << 20


@pytest.mark.parametrize("direct", [False, True])
def test_a_read_continues_in_its_file_although_the_reader_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    """Otherwise another file may get the number of the descriptor, and its bytes would count as damaged ones of this file."""
    store = LocalStore(tmp_path, direct=direct)
    ours, others = random_bytes(LENGTH, 1), random_bytes(LENGTH, 2)
    write_object(store, "ours", ours)
    write_object(store, "others", others)
    reader, opened = store.open("ours"), list[int]()

    def close_and_open_others(name: str) -> None:
        if name == "local.read" and not opened:
            reader.close()
            opened.extend(os.open(tmp_path / "others", os.O_RDONLY) for _ in range(4))

    monkeypatch.setattr(fd_io, "failpoint", close_and_open_others)
    buffer = bytearray(LENGTH)
    try:
        assert reader.read_into(0, memoryview(buffer)) == LENGTH
    finally:
        for fd in opened:
            os.close(fd)
    assert len(opened) == 4
    assert buffer == ours


def test_a_closed_reader_keeps_no_descriptor(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, direct=True)
    write_object(store, "a", random_bytes(LENGTH))
    before = set(os.listdir("/proc/self/fd"))
    reader = store.open("a")
    assert reader.read_into(0, memoryview(bytearray(LENGTH))) == LENGTH
    assert set(os.listdir("/proc/self/fd")) > before
    reader.close()
    assert set(os.listdir("/proc/self/fd")) <= before
    with pytest.raises(StoreError, match="Bad file descriptor"):
        reader.read_into(0, memoryview(bytearray(1)))
