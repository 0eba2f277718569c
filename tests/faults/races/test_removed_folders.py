"""A writer creates files in a folder that another process removes whenever it is empty, as a cleanup does."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.folders import fast_folder
from helpers.processes import python

from ckpt.storage.base.store import Store
from ckpt.storage.local.directory import LocalStore

WRITES = 1500
REMOVER = """
import sys
from ckpt.storage.local.directory import LocalStore
store = LocalStore(sys.argv[1])
print("ready", flush=True)
while True:
    store.sweep_temporaries("other")
    store._remove_empty_folders(store.root + "/steps/7/part")
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A directory in which another process removes empty folders all the time."""
    with fast_folder(tmp_path) as fast:  # on a disk, both processes would mostly wait for it, and meet less often
        remover = python(REMOVER, fast / "r")
        assert remover.stdout is not None
        assert remover.stdout.readline() == "ready\n"
        yield LocalStore(fast / "r")
        assert remover.poll() is None
        remover.kill()
        remover.communicate()


def created(store: Store, name: str, data: bytes) -> None:
    with store.create(name) as writer:
        writer.append(memoryview(data))
        writer.commit()


WAYS: dict[str, Callable[[Store, str, bytes], None]] = {
    "put": lambda store, name, data: store.put(name, data),
    "put_new": lambda store, name, data: store.put_new(name, data),
    "publish": lambda store, name, data: store.publish(name, data, lambda: None),
    "create": created,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_file_is_written_though_its_folder_is_removed_before(store: Store, way: str) -> None:
    generator = random.getstate()
    for number in range(WRITES):
        name = f"steps/7/part/{number}"
        WAYS[way](store, name, b"bytes")
        assert store.get(name) == b"bytes"
        store.delete([name])
    assert random.getstate() == generator, "the numbers of the user's program have changed"
