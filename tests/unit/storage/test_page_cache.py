"""What is in the page cache is found also where the file system has no reads that do not wait."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterator

import pytest

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
