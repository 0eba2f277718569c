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
from helpers.races import FIRST, SECOND, Down, replace_registers
from helpers.races import open_client as open_client
from helpers.whole_namespaces import require_whole

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import repair, scrub
from ckpt.storage.base.errors import StoreError, Unavailable
from ckpt.storage.base.failpoints import set_failpoints
from ckpt.storage.registers.base import Registers


class Silent(Registers):
    """Registers of a member that does not answer."""

    def __init__(self, test_ended: threading.Event) -> None:
        self._test_ended = test_ended

    def _wait(self, *args: Any, **options: Any) -> Any:
        self._test_ended.wait()
        raise Unavailable("the member is stopped")

    read = prepare = accept = change = scan = reset = mark_complete = fence = learn = join_ring = drop = collect = _wait


@pytest.mark.parametrize("point", ["register.changed", "namespace.recorded", "register.change"])
def test_a_write_interrupted_at_its_record_is_old_or_new_for_good(open_client: Callable[..., Namespace], point: str) -> None:
    """The client cannot know whether the members have the record: the objects stay, and the file is the old or the new one for
    good."""
    one = open_client(60.0)
    one.put("x", FIRST)
    set_failpoints(f"{point}=error")
    with pytest.raises(OSError, match="injected"):
        one.put("x", SECOND)
    set_failpoints("")
    found = open_client(60.0).get("x")
    assert found in (FIRST, SECOND)
    assert one.get("x") == found


def test_a_repair_restores_a_record_with_a_damaged_head(open_client: Callable[..., Namespace], tmp_path: Path) -> None:
    one = open_client(60.0)
    one.put("x", FIRST)
    member = one.ring.replica_set("/x").members[0]
    one.close()
    with sqlite3.connect(tmp_path / member / "registers.sqlite") as db:
        (head,) = db.execute("SELECT head FROM registers WHERE name = '/x'").fetchone()
        db.execute("UPDATE registers SET head = ? WHERE name = '/x'", (head[:1] + b"\x02" + head[2:],))
    db.close()
    reopened = open_client(60.0)
    assert list(reopened.list()) == ["x"]
    found = scrub.scrub_namespace(reopened, verify=True)
    assert found.lagging_paths == ["x"]
    repair.repair_namespace(reopened, found)
    require_whole(reopened, verify=True)


def test_a_member_with_an_empty_disk_does_not_vote_until_it_has_the_records(
    open_client: Callable[..., Namespace], tmp_path: Path
) -> None:
    """It must not vote that a record does not exist before it has the records of the other members."""
    one = open_client(60.0)
    for i in range(10):
        one.put(f"x{i}", FIRST)
    one.close()
    for name in ("registers.sqlite", "registers.sqlite-wal", "registers.sqlite-shm"):
        (tmp_path / "disk0" / name).unlink(missing_ok=True)
    reopened = open_client(60.0)
    for i in range(10):
        assert reopened.get(f"x{i}") == FIRST
        with pytest.raises(StoreError, match="exists already"):
            reopened.put(f"x{i}", SECOND, new=True)
    repair.repair_namespace(reopened, scrub.scrub_namespace(reopened))
    require_whole(reopened)
    paths_of_member = [f"/x{i}" for i in range(10) if "disk0" in reopened.ring.replica_set(f"/x{i}").members]
    assert all(getattr(r, "value", None) is not None for r in reopened.open_members["disk0"].registers.read(paths_of_member))


def test_a_stopped_member_does_not_block_all_threads(open_client: Callable[[], Namespace]) -> None:
    one = open_client()
    for i in range(30):
        one.put(f"x{i}", b"1")
    member = one.ring.replica_set("/x0").members[0]
    resume = threading.Event()

    class Stopped(Down):
        def read(self, names: Any, fence_number: int = 0) -> Any:
            resume.wait(600)
            raise Unavailable("stopped")

    replace_registers(one, member, Stopped())
    done: list[int] = []

    def stat_repeatedly() -> None:
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline:
            for i in range(30):
                assert one.stat(f"x{i}") is not None
                done.append(i)

    threads = [threading.Thread(target=stat_repeatedly) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    resume.set()
    assert len(done) > 8 * 30, "the threads did not continue"


@pytest.mark.parametrize("what", ["list", "get", "lagging", "put", "replace", "large", "delete", "rename"])
def test_no_operation_waits_for_a_stopped_member(
    open_client: Callable[[], Namespace], tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is new and has measured no member yet, and its deadline is far longer than the test."""
    one = open_client()
    one.put("x", FIRST[:1000])
    first, second, third = one.ring.replica_set("/x").members
    stopped = first
    if what == "lagging":  # of the other two members, one has missed a change
        down = replace_registers(one, second, Down())
        one.put("x", SECOND[:1000])
        replace_registers(one, second, down)
        stopped = third
    test_ended = threading.Event()
    fresh = Namespace(directories(tmp_path, 6, deadline_seconds=1000.0))
    replace_registers(fresh, stopped, Silent(test_ended))
    monkeypatch.setattr(fresh.open_members[stopped], "info", lambda: test_ended.wait() and None)
    monkeypatch.setattr(fresh.open_members[stopped].store, "create", lambda *_: test_ended.wait())
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
    thread.join(600)
    test_ended.set()
    assert done
    assert done[0]
    fresh.close()
