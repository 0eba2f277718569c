"""A directory in shared memory: the memory of deleted packs is reused, and freed when other files need it."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.small_disks import small_disk as small_disk

from ckpt.storage.base.errors import NoSpace
from ckpt.storage.local.shared_memory import MemoryStore
from ckpt.storage.testing import random_bytes, write_object

PACK = random_bytes(200 << 10)


def fill(store: MemoryStore) -> list[str]:
    """Write packs until the memory is nearly full; return their names."""
    names = [f"{number}.pack" for number in range(4)]
    for name in names:
        write_object(store, name, PACK)
    return names


def test_a_larger_pack_gets_the_memory_of_all_deleted_packs(small_disk: Path) -> None:
    store = MemoryStore(small_disk)
    store.delete(fill(store))
    large = random_bytes(700 << 10)
    with store.create("large.pack", len(large)) as writer:
        writer.append(memoryview(large))
        writer.commit()
    assert store.get("large.pack") == large


@pytest.mark.parametrize("method", ["put", "put_new"])
def test_other_files_get_the_memory_of_deleted_packs(small_disk: Path, method: str) -> None:
    store = MemoryStore(small_disk)
    store.delete(fill(store))
    data = random_bytes(400 << 10)
    getattr(store, method)("manifest", data)
    assert store.get("manifest") == data


def test_packs_that_were_not_deleted_stay_when_the_memory_is_full(small_disk: Path) -> None:
    store = MemoryStore(small_disk)
    names = fill(store)
    for write in (lambda: store.put("manifest", bytes(400 << 10)), lambda: store.create("x.pack", 400 << 10)):
        with pytest.raises(NoSpace):
            write()
    assert all(store.get(name) == PACK for name in names)
