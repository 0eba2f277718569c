"""What is in the page cache is found also where the file system has no reads that do not wait."""

from __future__ import annotations

import errno
import os
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.storage.base import page_cache
from ckpt.storage.base.errors import StoreError
from ckpt.storage.base.fd_io import DescriptorReader
from ckpt.storage.base.page_cache import in_page_cache, read_cached
from ckpt.storage.testing import random_bytes

MIB = 1 << 20


@pytest.fixture
def memory_file() -> Iterator[int]:
    """Yield a file of tmpfs with 1 MiB of bytes, and a hole of 1 MiB."""
    if not os.path.ismount("/dev/shm"):
        pytest.skip("no tmpfs at /dev/shm")
    if tuple(map(int, platform.release().split(".")[:2])) < (6, 5):
        pytest.skip("cachestat(2) is in Linux 6.5 and later")
    with tempfile.TemporaryFile(prefix="ckpt-test-", dir="/dev/shm") as file:
        file.write(random_bytes(MIB))
        file.truncate(2 * MIB)
        yield file.fileno()


def test_bytes_of_a_file_system_in_memory_are_cached(memory_file: int) -> None:
    buffer = bytearray(MIB)
    assert in_page_cache(memory_file, 0)
    assert in_page_cache(memory_file, 100, MIB - 100)
    assert read_cached(memory_file, 0, memoryview(buffer)) == MIB
    assert buffer == os.pread(memory_file, MIB, 0)


def test_a_range_is_cached_only_with_its_last_page(memory_file: int) -> None:
    if in_page_cache(memory_file, 2 * MIB - 1):
        pytest.skip("this file system has reads that do not wait")
    assert not in_page_cache(memory_file, 0, MIB + 1)
    assert read_cached(memory_file, 4096, memoryview(bytearray(MIB))) == 0


def test_nothing_is_cached_behind_the_end(memory_file: int) -> None:
    assert read_cached(memory_file, 2 * MIB, memoryview(bytearray(10))) == 0


def test_a_failed_copy_from_the_page_cache_is_an_error_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS and FUSE know no reads that do not wait, so a plain read follows. It may fail, and a load then tries another copy."""
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))

    def preadv(fd: int, buffers: object, position: int, flags: int = 0) -> int:
        raise OSError(errno.EOPNOTSUPP if flags else errno.EIO, "as from a network file system")

    monkeypatch.setattr(page_cache, "_are_pages_cached", lambda *_: True)
    with DescriptorReader(os.open(path, os.O_RDONLY), str(path)) as reader:
        monkeypatch.setattr(os, "preadv", preadv)
        with pytest.raises(StoreError, match=f"reading {path}"):
            reader.read_cached(0, memoryview(bytearray(4096)))
