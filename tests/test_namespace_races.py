"""What two do to one path at the same time, or one does after the other was cut off: nothing that was acknowledged is lost.

Each of these once lost something. The second actor is let in at a point where the first has read and not yet written.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from cluster import directories

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import repair as repairs
from ckpt.aggregator.maintenance import scrub as surveys
from ckpt.aggregator.maintenance.rebalance import drain_member
from ckpt.aggregator.placement.redundancy import parse_redundancy
from ckpt.storage.base.errors import Changed, NotFound, StoreError, Unavailable
from ckpt.storage.base.failpoints import set_failpoints
from ckpt.storage.registers.base import Registers, RegisterValue
from ckpt.storage.testing import random_bytes

FIRST, SECOND = random_bytes(300_000, 1), random_bytes(300_000, 2)


class Down(Registers):
    """Registers of a member that does not answer."""

    def _fails(self, *args: Any, **options: Any) -> Any:
        raise Unavailable("down")

    read = prepare = accept = change = scan = reset = mark_complete = fence = learn = join_ring = drop = collect = _fails


@pytest.fixture
def open_one(tmp_path: Path) -> Iterator[Callable[[], Namespace]]:
    """Another client of the same six directories."""
    made: list[Namespace] = []

    def open_it() -> Namespace:
        made.append(Namespace(directories(tmp_path, 6, deadline_seconds=2.0)))
        assert made[-1].ring
        return made[-1]

    yield open_it
    for namespace in made:
        namespace.close()


@pytest.fixture
def old_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that nobody names are collected at once."""
    monkeypatch.setattr(surveys, "GRACE_SECONDS", -60.0)


class Silent(Registers):
    """Registers of a member that stands still."""

    def __init__(self, over: threading.Event) -> None:
        self._over = over

    def _waits(self, *args: Any, **options: Any) -> Any:
        self._over.wait()
        raise Unavailable("it stood still")

    read = prepare = accept = change = scan = reset = mark_complete = fence = learn = join_ring = drop = collect = _waits


def swap(namespace: Namespace, member: str, registers: Registers) -> Registers:
    before = namespace._member_registers[member]
    namespace._member_registers[member] = namespace.open_members[member].registers = registers
    return before


def test_delete_by_a_member_that_missed_a_renaming(open_one: Callable[[], Namespace]) -> None:
    one, other = open_one(), open_one()
    one.put("x", FIRST)
    swap(other, one.ring.replica_set("/x").members[0], Down())
    other.rename("x", "y")
    assert not one.delete(["x"])
    assert one.get("y") == FIRST


def test_one_file_renamed_twice_at_once(open_one: Callable[[], Namespace], monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = open_one(), open_one()
    one.put("x", FIRST)
    publish = one.publish

    def late(*args: Any, **options: Any) -> None:
        other.rename("x", "c")
        publish(*args, **options)

    monkeypatch.setattr(one, "publish", late)
    one.rename("x", "b")
    monkeypatch.undo()
    assert one.get("b") == one.get("c") == FIRST
    one.delete(["b"])
    assert one.get("c") == FIRST


def test_a_renaming_that_was_cut_off_and_another(open_one: Callable[[], Namespace], old_enough: None) -> None:
    one = open_one()
    one.put("q", FIRST)
    set_failpoints("namespace.renamed=error")
    with pytest.raises(OSError, match="injected"):
        one.rename("q", "r")
    set_failpoints("")
    one.rename("q", "s")
    one.delete(["s"])
    assert one.get("r") == FIRST
    repairs.repair_namespace(one, surveys.scrub_namespace(one))
    assert one.get("r") == FIRST
    one.delete(["r"])
    repairs.repair_namespace(one, surveys.scrub_namespace(one))
    assert not any(place.inventory() for place in one.open_members.values())


def test_a_repair_of_what_was_renamed_meanwhile(open_one: Callable[[], Namespace]) -> None:
    one = open_one()
    one.put("x", FIRST)
    file = one.stat("x")
    assert file is not None
    assert file.layout is not None
    holder = file.layout.objects[0]
    one.open_members[holder.member].store.delete([holder.name])
    found = surveys.scrub_namespace(one)
    one.rename("x", "y")
    repairs.repair_namespace(one, found)
    assert one.get("y") == FIRST


def test_a_scrub_while_a_file_is_renamed(
    open_one: Callable[[], Namespace], old_enough: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = open_one()
    one.put("z", FIRST)
    read = one.read_records

    def late(names: Any) -> Any:
        monkeypatch.undo()
        one.rename("z", "a")
        return read(names)

    monkeypatch.setattr(one, "read_records", late)
    found = surveys.scrub_namespace(one)
    monkeypatch.setattr(surveys, "GRACE_SECONDS", -60.0)
    repairs.repair_namespace(one, found)
    assert one.get("a") == FIRST


def test_records_of_a_newer_version(open_one: Callable[[], Namespace], old_enough: None) -> None:
    """What can't be read names objects that nobody knows: none is deleted."""
    one = open_one()
    one.put("n", FIRST)
    value = one.read_records(["/n"])["/n"]
    assert value is not None
    newer = RegisterValue(msgpack.packb([*msgpack.unpackb(value.head), "a new field"]), value.body)
    one.update_record("n", lambda _, there: newer if there == value else None)
    found = surveys.scrub_namespace(one)
    assert found.unreadable_paths == ["n", "n", "n", "n"] or set(found.unreadable_paths) == {"n"}
    assert not found.orphans
    assert not found.is_whole


def test_a_half_done_write_and_a_scrub(open_one: Callable[[], Namespace], old_enough: None) -> None:
    """Its only trace is on a member that is away while the others are scrubbed."""
    one, other = open_one(), open_one()
    one.put("x", FIRST)
    members = one.ring.replica_set("/x").members
    for member in members[1:]:
        swap(other, member, Down())
    with pytest.raises(Unavailable):
        other.put("x", SECOND)
    there = swap(one, members[0], Down())
    assert one.get("x") == FIRST
    repairs.repair_namespace(one, surveys.scrub_namespace(one))
    assert one.get("x") == FIRST
    swap(one, members[0], there)
    fresh = open_one()
    found = fresh.get("x")
    assert found in (FIRST, SECOND)
    repairs.repair_namespace(fresh, surveys.scrub_namespace(fresh))
    assert fresh.get("x") == found


@pytest.mark.parametrize("size", [1000, 300_000])
def test_writing_on_what_was_changed(open_one: Callable[[], Namespace], size: int) -> None:
    one = open_one()
    more = memoryview(b"more" * 20_000)
    changes: list[Callable[[str], object]] = [
        lambda path: one.put(path, SECOND), lambda path: one.rename(path, f"{path}-renamed"), lambda path: one.delete([path]),
    ]  # fmt: skip
    for number, change in enumerate(changes):
        path = f"x{number}"
        one.put(path, FIRST[:size])
        with one.create(path, aligned=False, base=one.stat(path)) as writer:
            writer.append(more)
            change(path)
            with pytest.raises(Changed, match="do it again"):
                writer.commit()
    assert one.get("x0") == SECOND
    assert one.get("x1-renamed") == FIRST[:size]
    with pytest.raises(NotFound):
        one.get("x2")
    one.put("both", FIRST[:size])
    base = one.stat("both")
    for i in range(2):
        with one.create("both", aligned=False, base=base) as writer:
            writer.append(more)
            if i:
                with pytest.raises(Changed):
                    writer.commit()
            else:
                writer.commit()
    assert one.get("both") == FIRST[:size] + bytes(more)


@pytest.mark.parametrize(("others", "size", "known"), [(3, 40_000, True), (9, 40_000, True), (3, 100, True), (9, 100, False)])
def test_an_append_that_came_through_while_its_writer_stood_still(
    open_one: Callable[[], Namespace], monkeypatch: pytest.MonkeyPatch, others: int, size: int, known: bool
) -> None:
    """Others have found it on a member, and have added to it so often that the record does not know its version any more: its
    objects show that it came through, and without them that it was refused can't be said."""
    one, other = open_one(), open_one()
    first, second = FIRST[:size], SECOND[:size]
    one.put("log", first)
    there, go_on = threading.Event(), threading.Event()

    def stand_still(name: str) -> None:
        if name == "ledger.changed" and threading.current_thread() is writer and not there.is_set():
            there.set()
            assert go_on.wait(60)

    said: list[object] = []

    def write() -> None:
        try:
            with one.create("log", aligned=False, base=one.stat("log")) as writing:
                writing.append(memoryview(second))
                writing.commit()
            said.append("added")
        except StoreError as error:
            said.append(error)

    writer = threading.Thread(target=write)
    monkeypatch.setattr("ckpt.aggregator.records.paxos.failpoint", stand_still)
    writer.start()
    assert there.wait(60)
    other.settle(["/log"])
    for i in range(others):
        with other.create("log", aligned=False, base=other.stat("log")) as writing:
            writing.append(memoryview(bytes([i]) * size))
            writing.commit()
    go_on.set()
    writer.join()
    if known:
        assert said == ["added"]
    else:
        assert isinstance(said[0], Unavailable), said
        assert "whether this was added in between can't be known" in str(said[0])
    assert open_one().get("log") == first + second + b"".join(bytes([i]) * size for i in range(others))


def test_writing_on_what_is_kept_otherwise(open_one: Callable[[], Namespace]) -> None:
    one = open_one()
    one.put("e", FIRST, redundancy=parse_redundancy("4+2"))
    with one.create("e", aligned=False, base=one.stat("e")) as writer:
        writer.append(memoryview(SECOND))
        writer.commit()
    assert one.get("e") == FIRST + SECOND


@pytest.mark.parametrize("redundancy", ["2x", "3+2"])
@pytest.mark.parametrize("how", ["repair", "drain"])
def test_writing_on_what_was_moved(
    open_one: Callable[[], Namespace], monkeypatch: pytest.MonkeyPatch, redundancy: str, how: str
) -> None:
    """A repair puts pieces elsewhere, while another writes behind them."""
    one, other = open_one(), open_one()
    one.put("x", FIRST, redundancy=parse_redundancy(redundancy))
    base = one.stat("x")
    assert base is not None
    assert base.layout is not None
    with one.create("x", aligned=False, base=base) as writer:
        writer.append(memoryview(SECOND))
        lost = base.layout.objects[0]
        if how == "repair":
            other.open_members[lost.member].store.delete([lost.name])
            assert repairs.repair_namespace(other, surveys.scrub_namespace(other)).files == 1
        else:
            other.locations = tuple(s for s in other.locations if s.name != lost.member)
            assert drain_member(other, lost.member).files == 1
        moved = other.stat("x")
        assert moved is not None
        assert moved.layout != base.layout
        made = writer.publish()
    assert open_one().get("x") == FIRST + SECOND
    assert made == one.stat("x")
    assert made.layout is not None
    assert lost not in made.layout.objects
    with one.create("x", aligned=False, base=made) as writer:
        writer.append(memoryview(b"more"))
        writer.commit()
    assert one.get("x") == FIRST + SECOND + b"more"
    monkeypatch.setattr(surveys, "GRACE_SECONDS", -60.0)
    found = surveys.scrub_namespace(open_one(), verify=True)
    assert (found.damaged_files, found.orphans) == ([], {})


@pytest.mark.parametrize("redundancy", ["2x", "4+2"])
def test_writing_on_what_was_cut(open_one: Callable[[], Namespace], redundancy: str) -> None:
    one = open_one()
    whole = random_bytes(8 << 20)
    with one.create("c", parse_redundancy(redundancy), aligned=False) as writer:
        writer.write_at(0, memoryview(whole))
        writer.truncate(5 << 20)
        writer.commit()
    assert one.get("c") == whole[: 5 << 20]
    with one.create("c", aligned=False, base=one.stat("c")) as writer:
        writer.append(memoryview(b"N" * 1000))
        writer.commit()
    assert one.get("c") == whole[: 5 << 20] + b"N" * 1000


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
        with pytest.raises(StoreError, match="there already"):
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
