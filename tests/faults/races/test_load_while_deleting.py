"""A load of the newest step while another process saves a newer one and deletes the step that is being loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.nodes import three_nodes
from helpers.states import assert_same, state_of

import ckpt
from ckpt.aggregator.interfaces.store import NamespaceStore
from ckpt.groups.threads import ThreadGroup
from ckpt.storage.base.store import Reader, Store
from ckpt.storage.local.directory import LocalStore

NEWEST, NEWER = 5, 6


class _Reader(Reader):
    def __init__(self, reader: Reader, before: Callable[[], None]) -> None:
        self._reader = reader
        self._before = before

    def __len__(self) -> int:
        return len(self._reader)

    def read_into(self, *arguments: Any, **options: Any) -> int:
        self._before()
        return self._reader.read_into(*arguments, **options)

    def close(self) -> None:
        self._reader.close()


def delay_first_reply(store: Store, point: str, meanwhile: Callable[[], None]) -> Store:
    """Return the store, changed to call `meanwhile` before its first reply about the newest step.

    point: what the delayed call reads: the commit record, the manifest, or bytes of a pack that is open already.
    """
    pending = [meanwhile]
    names = {"record": f"steps/{NEWEST}/commit.json", "manifest": f"steps/{NEWEST}/manifest/", "pack": f"steps/{NEWEST}/pack/"}

    def call_meanwhile(name: str) -> None:
        if name.startswith(names[point]) and pending:
            pending.pop()()

    class Delayed(type(store)):  # type: ignore[misc]
        def get(self, name: str) -> bytes:
            call_meanwhile(name)
            return bytes(super().get(name))

        def get_up_to(self, name: str, *limit: Any) -> bytes:
            call_meanwhile(name)
            return bytes(super().get_up_to(name, *limit))

        def open(self, name: str) -> Reader:
            return _Reader(super().open(name), lambda: call_meanwhile(name))

        def open_once(self, name: str) -> Reader:
            return _Reader(super().open_once(name), lambda: call_meanwhile(name))

    store.__class__ = Delayed
    return store


@pytest.fixture(params=["file", "ckpt"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield str(tmp_path / "run")
        return
    with three_nodes(tmp_path) as nodes:
        yield f"ckpt://{nodes}/run?redundancy=2x"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("point", ["record", "manifest", "pack"])
def test_a_load_takes_the_newer_step_where_its_step_is_deleted(url: str, point: str, ranks: int) -> None:
    for step in (4, NEWEST):
        ckpt.save(state_of(100 * step), url, step, group=None)

    def save_and_delete() -> None:
        ckpt.save(state_of(NEWER), url, NEWER, keep=1, group=None)

    def load(group: Any) -> Any:
        store = NamespaceStore(url) if url.startswith("ckpt:") else LocalStore(url)
        return ckpt.load(
            delay_first_reply(store, point, save_and_delete) if group is None or group.rank == 0 else store, group=group
        )

    groups = [None] if ranks == 1 else ThreadGroup.make(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        for loaded in pool.map(load, groups):
            # A local disk still reads a deleted file that is open. The bytes of two steps are never mixed.
            assert_same(loaded, state_of(100 * NEWEST if loaded["step"] == 100 * NEWEST else NEWER))
            assert point == "pack" or loaded["step"] == NEWER


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_takes_the_older_step_where_the_newest_is_deleted(tmp_path: Path, ranks: int) -> None:
    for step in (4, NEWEST):
        ckpt.save(state_of(step), tmp_path, step, group=None)

    def delete() -> None:
        (tmp_path / f"steps/{NEWEST}/commit.json").unlink()

    def load(group: Any) -> Any:
        store = LocalStore(tmp_path)
        return ckpt.load(delay_first_reply(store, "record", delete) if group is None or group.rank == 0 else store, group=group)

    groups = [None] if ranks == 1 else ThreadGroup.make(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        assert [loaded["step"] for loaded in pool.map(load, groups)] == [4] * ranks
