"""Members of a namespace that are stopped, empty or damaged while clients write."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.nodes import directories
from helpers.races import FIRST, SECOND, Down, swap
from helpers.races import open_one as open_one

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import repair as repairs
from ckpt.aggregator.maintenance import scrub as surveys
from ckpt.storage.base.errors import StoreError, Unavailable
from ckpt.storage.base.failpoints import set_failpoints
from ckpt.storage.registers.base import Registers


class Silent(Registers):
    """Registers of a member that stands still."""

    def __init__(self, over: threading.Event) -> None:
        self._over = over

    def _waits(self, *args: Any, **options: Any) -> Any:
        self._over.wait()
        raise Unavailable("it stood still")

    read = prepare = accept = change = scan = reset = mark_complete = fence = learn = join_ring = drop = collect = _waits


@pytest.mark.parametrize("point", ["ledger.changed", "namespace.recorded", "ledger.change"])
def test_an_interrupt_while_the_record_is_written(open_one: Callable[[], Namespace], point: str) -> None:
    """Nobody knows whether the members have it: the objects stay, and the file is one or the other for good."""
    one = open_one()
    one.put("x", FIRST)
    set_failpoints(f"{point}=error")
    with pytest.raises(OSError, match="injected"):
        one.put("x", SECOND)
    set_failpoints("")
    found = open_one().get("x")
    assert found in (FIRST, SECOND)
    assert one.get("x") == found


def test_rot_in_the_head_of_a_record(open_one: Callable[[], Namespace], tmp_path: Path) -> None:
    one = open_one()
    one.put("x", FIRST)
    member = one.ring.replica_set("/x").members[0]
    one.close()
    with sqlite3.connect(tmp_path / member / "registers.sqlite") as db:
        (head,) = db.execute("SELECT head FROM registers WHERE name = '/x'").fetchone()
        db.execute("UPDATE registers SET head = ? WHERE name = '/x'", (head[:1] + b"\x02" + head[2:],))
    db.close()
    again = open_one()
    assert list(again.list()) == ["x"]
    found = surveys.scrub_namespace(again, verify=True)
    assert found.lagging_paths == ["x"]
    repairs.repair_namespace(again, found)
    assert surveys.scrub_namespace(again, verify=True).is_whole


def test_an_empty_disk_in_the_place_of_a_lost_one(open_one: Callable[[], Namespace], tmp_path: Path) -> None:
    """It must not vote that there is nothing, until it has the others' records again."""
    one = open_one()
    for i in range(10):
        one.put(f"x{i}", FIRST)
    one.close()
    for name in ("registers.sqlite", "registers.sqlite-wal", "registers.sqlite-shm"):
        (tmp_path / "disk0" / name).unlink(missing_ok=True)
    again = open_one()
    for i in range(10):
        assert again.get(f"x{i}") == FIRST
        with pytest.raises(StoreError, match="exists already"):
            again.put(f"x{i}", SECOND, new=True)
    repairs.repair_namespace(again, surveys.scrub_namespace(again))
    assert surveys.scrub_namespace(again).is_whole
    mine = [f"/x{i}" for i in range(10) if "disk0" in again.ring.replica_set(f"/x{i}").members]
    assert all(getattr(r, "value", None) is not None for r in again.open_members["disk0"].registers.read(mine))


def test_a_stopped_member_takes_not_all_threads(open_one: Callable[[], Namespace]) -> None:
    one = open_one()
    for i in range(30):
        one.put(f"x{i}", b"1")
    member = one.ring.replica_set("/x0").members[0]
    slow = threading.Event()

    class Stopped(Down):
        def read(self, names: Any, fence_number: int = 0) -> Any:
            slow.wait(20)
            raise Unavailable("stopped")

    swap(one, member, Stopped())
    done: list[int] = []

    def look() -> None:
        until = time.monotonic() + 4
        while time.monotonic() < until:
            for i in range(30):
                assert one.stat(f"x{i}") is not None
                done.append(i)

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    slow.set()
    assert len(done) > 8 * 30, "they went on"


@pytest.mark.parametrize("what", ["list", "get", "lagging", "put", "replace", "large", "delete", "rename"])
def test_nobody_waits_for_a_member_that_stands_still(
    open_one: Callable[[], Namespace], tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a process that knows of nobody yet how he is. With a deadline beyond all patience."""
    one = open_one()
    one.put("x", FIRST[:1000])
    first, second, third = one.ring.replica_set("/x").members
    still = first
    if what == "lagging":  # of two that are left one has missed a change
        down = swap(one, second, Down())
        one.put("x", SECOND[:1000])
        swap(one, second, down)
        still = third
    over = threading.Event()
    fresh = Namespace(directories(tmp_path, 6, deadline_seconds=1000.0))
    swap(fresh, still, Silent(over))
    monkeypatch.setattr(fresh.open_members[still], "info", lambda: over.wait() and None)
    monkeypatch.setattr(fresh.open_members[still].store, "create", lambda *_: over.wait())
    work: dict[str, Callable[[], object]] = {
        "list": lambda: list(fresh.list()) == ["x"],
        "get": lambda: fresh.get("x") == FIRST[:1000],
        "lagging": lambda: fresh.get("x") == SECOND[:1000],
        "put": lambda: all(fresh.put(f"new{i}", b"1", new=True) for i in range(9)),
        "replace": lambda: fresh.put("x", b"1"),
        "large": lambda: all(fresh.put(f"new{i}", FIRST) for i in range(3)),
        "delete": lambda: fresh.delete(["x"]) == ["x"],
        "rename": lambda: fresh.rename("x", "y") is None,
    }
    done: list[object] = []
    thread = threading.Thread(target=lambda: done.append(work[what]()), daemon=True)
    thread.start()
    thread.join(100)
    over.set()
    assert done
    assert done[0]
    fresh.close()
