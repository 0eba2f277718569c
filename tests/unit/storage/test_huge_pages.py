"""Memory on huge pages."""

from __future__ import annotations

import os
import re
import sys

import pytest

from ckpt.block_io.staging_arena import Arena
from ckpt.storage.base.huge_pages import map_huge_pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="advice about memory is Linux's")


def flags_of(address: int) -> set[str]:
    """Return the flags that the kernel reports for the mapping at an address."""
    with open("/proc/self/smaps") as file:
        for line in file:
            if (found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)) is not None:
                is_mapping = int(found[1], 16) <= address < int(found[2], 16)
            elif line.startswith("VmFlags:") and is_mapping:
                return set(line.split()[1:])
    raise AssertionError(f"nothing is mapped at {address:x}")


def test_an_arena_is_private_memory_on_huge_pages_where_possible() -> None:
    memory = Arena(16 << 20).memory
    memory[:] = 1
    flags = flags_of(memory.ctypes.data + (8 << 20))
    assert "sh" not in flags, "few systems have huge pages for shared memory"
    assert "wf" in flags
    if os.path.exists("/sys/kernel/mm/transparent_hugepage"):
        assert "hg" in flags


def test_a_forked_child_gets_zeros_and_changes_nothing() -> None:
    """The child stands for a worker of a data loader that is forked in the middle of a save."""
    memory = map_huge_pages(4 << 20)
    memory[:4] = b"save"
    child = os.fork()
    if not child:
        seen = memory[:4]
        memory[:4] = b"work"
        memory.close()
        os._exit(seen != bytes(4))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert memory[:4] == b"save"
