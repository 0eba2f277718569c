"""Records of deleted files are collected: a listing costs what exists, and no deleted file comes back."""

from __future__ import annotations

import os
import random
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.collections_of_tombstones import count_collected
from helpers.lossy_calls import LossyCalls
from helpers.nodes import directories
from helpers.processes import SOAK
from helpers.whole_namespaces import require_whole

from ckpt.aggregator.file_io import namespace as namespaces
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import rebalance, repair, scrub
from ckpt.aggregator.records import tombstone_collection
from ckpt.aggregator.records.tombstone_collection import collect_tombstones
from ckpt.storage.base.errors import StoreError
from ckpt.storage.registers.base import ABSENT_NAME, Ballot, RegisterAnswer, floor_ballot
from ckpt.storage.registers.sqlite import SqliteRegisters


def opened(folder: Path, count: int = 3, **table: Any) -> Namespace:
    """Return a namespace on `count` disks that retries failed members at once."""
    found = Namespace(directories(folder, count, **{"redundancy": "2x", "deadline_seconds": 30.0} | table))
    health = found.fan_out.health
    health._first_pause_seconds, health._max_pause_seconds, health._probe = 0.001, 0.005, None
    return found


def records(folder: Path, count: int = 3) -> int:
    """Return the number of registers of paths on all disks."""
    total = 0
    for number in range(count):
        db = sqlite3.connect(folder / f"disk{number}" / "registers.sqlite")
        total += db.execute("SELECT count(*) FROM registers WHERE name LIKE '/%'").fetchone()[0]
        db.close()
    return total


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each scan of registers appends its number of entries."""
    found: list[int] = []
    scan = SqliteRegisters.scan

    def counted(self: SqliteRegisters, *args: Any, **options: Any) -> list[tuple[str, RegisterAnswer]]:
        answers = scan(self, *args, **options)
        found.append(len(answers))
        return answers

    monkeypatch.setattr(SqliteRegisters, "scan", counted)
    return found


def entries_of_a_listing(namespace: Namespace, examined: list[int]) -> int:
    """Return how many entries of registers one listing examines."""
    examined.clear()
    namespace.list()
    return sum(examined)


def test_a_listing_costs_no_more_than_the_files_that_exist(tmp_path: Path, examined: list[int]) -> None:
    namespace = opened(tmp_path)
    for number in range(60):
        namespace.put(f"run/{number}", b"x")
    namespace.delete([f"run/{number}" for number in range(2, 60)])
    assert entries_of_a_listing(namespace, examined) >= 2 * 60
    assert collect_tombstones(namespace) == 0, "the tombstones are too young"
    assert count_collected(namespace, 58) == 58
    assert entries_of_a_listing(namespace, examined) <= 3 * 2
    assert records(tmp_path) <= 3 * 2
    assert sorted(namespace.list()) == ["run/0", "run/1"]
    namespace.put("run/7", b"again", new=True)
    assert namespace.get("run/7") == b"again"
    assert not namespace.delete(["run/9"]), "a collected file does not exist"
    assert namespace.stat("run/9") is None
    namespace.close()


def test_registers_without_a_value_are_collected(tmp_path: Path) -> None:
    """The deletion of a file that does not exist leaves promises."""
    namespace = opened(tmp_path)
    namespace.put("a", b"1")
    namespace.delete([f"b{i}" for i in range(20)])
    assert records(tmp_path) > 20
    collect_tombstones(namespace, 0.0)
    assert records(tmp_path) <= 3
    namespace.close()


def test_a_listing_with_too_many_tombstones_starts_a_collection(
    tmp_path: Path, examined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespaces, "MAX_TOMBSTONES", 10)
    monkeypatch.setattr(tombstone_collection, "MIN_AGE_SECONDS", 0.0)
    namespace = opened(tmp_path)
    for number in range(30):
        namespace.put(f"run/{number}", b"x")
    namespace.delete([f"run/{number}" for number in range(1, 30)])
    deadline = time.monotonic() + 600
    while entries_of_a_listing(namespace, examined) > 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert list(namespace.list()) == ["run/0"]
    namespace.close()


def test_a_repair_collects_tombstones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tombstone_collection, "MIN_AGE_SECONDS", 0.0)
    namespace = opened(tmp_path)
    namespace.put("a", b"1")
    namespace.put("b", b"1")
    namespace.delete(["b"])
    namespace.settle(["/a", "/b"])
    assert repair.repair_namespace(namespace, scrub.scrub_namespace(namespace)).collected == 1
    assert records(tmp_path) == 3
    require_whole(namespace)
    namespace.close()


def test_a_returning_member_does_not_outvote_the_others(tmp_path: Path) -> None:
    """It has an older value with a high ballot, and missed that the file was deleted, collected and written again."""
    namespace = opened(tmp_path)
    calls = LossyCalls(namespace, random.Random(0))
    namespace.put("x", b"first")
    namespace.settle(["/x"])  # in two phases: a ballot above those of direct changes
    for member in namespace.ring.replica_set("/x").members:
        calls.set(member, 1.0)
        namespace.delete(["x"])
        collect_tombstones(namespace, 0.0)
        collect_tombstones(namespace, 0.0)
        namespace.put("x", b"newer " + member.encode())
        calls.set(member, 0.0)
        for other in namespace.open_members:
            calls.set(other, 1.0 if other not in (member, next(m for m in namespace.open_members if m != member)) else 0.0)
        assert namespace.get("x") == b"newer " + member.encode()
        for other in namespace.open_members:
            calls.set(other, 0.0)
        assert namespace.get("x") == b"newer " + member.encode()
    namespace.delete(["x"])
    assert count_collected(namespace, 1) == 1
    assert records(tmp_path) == 0
    namespace.close()


@pytest.mark.parametrize("ends_after", [0, 1, 2])
def test_an_interrupted_collection_keeps_the_file_deleted(tmp_path: Path, ends_after: int) -> None:
    """Some members have dropped the tombstone. Whichever two answer, the file stays deleted, and a later file stays, too."""
    namespace = opened(tmp_path)
    namespace.put("x", b"first")
    namespace.settle(["/x"])
    namespace.delete(["x"])
    namespace.settle(["/x"])
    left = list(namespace.open_members)[ends_after:]
    forget = {name: namespace.open_members[name].registers.collect for name in left}
    for name in left:
        namespace.open_members[name].registers.collect = _fails  # type: ignore[method-assign]
    collect_tombstones(namespace, 0.0)
    assert records(tmp_path) == len(left)
    calls = LossyCalls(namespace, random.Random(0))
    for content in (None, b"second"):
        if content is not None:
            namespace.put("x", content)
        for member in namespace.open_members:
            calls.set(member, 1.0)
            file = namespace.stat("x")
            assert (None if file is None else file.inline_data) == content
            calls.set(member, 0.0)
    namespace.delete(["x"])
    namespace.settle(["/x"])
    for name in left:
        namespace.open_members[name].registers.inner.collect = forget[name]  # type: ignore[attr-defined]
    assert count_collected(namespace, 1) == 1
    assert records(tmp_path) == 0
    namespace.close()


def _fails(*_: object) -> int:
    """Raise StoreError, as a member that fails."""
    raise StoreError("this member fails")


def test_a_stray_record_is_dropped_before_its_tombstone(tmp_path: Path) -> None:
    """A member outside the replica set still has an old record: it is dropped first, or the file would exist again when
    the member joins the replica set."""
    namespace = opened(tmp_path, 5)
    path = next(f"f{i}" for i in range(100) if len({*namespace.ring.replica_set(f"/f{i}").members} & {"disk3", "disk4"}) == 0)
    stray = namespace.open_members["disk4"].registers
    namespace.put(path, b"old")
    value = namespace.read_records([f"/{path}"])[f"/{path}"]
    assert value is not None
    stray.accept([(f"/{path}", value)], Ballot(77, "other"))
    namespace.delete([path])
    namespace.settle([f"/{path}"])
    assert namespace.stat(path) is None
    for _ in range(2):
        collect_tombstones(namespace, 0.0)
    assert records(tmp_path, 5) == 0
    rebalance.rebalance_fragments(opened(tmp_path, 5))
    assert not namespace.list()
    namespace.close()


@pytest.mark.slow
def test_a_ring_change_after_a_collection_keeps_the_floor(tmp_path: Path) -> None:
    """Members that join get the floor, too: values agreed before are read, and tombstones are collected again later."""
    namespace = opened(tmp_path)
    for number in range(12):
        namespace.put(f"f{number}", b"1")
    namespace.delete([f"f{number}" for number in range(6)])
    assert count_collected(namespace, 6) == 6
    namespace.close()
    grown = opened(tmp_path, 5)
    assert not rebalance.rebalance_fragments(grown).failed
    assert grown.ring.epoch > 1
    assert {
        floors.promised_ballot
        for opened_member in grown.open_members.values()
        for floors in opened_member.registers.read([ABSENT_NAME])
    } == {floor_ballot(grown.ring.fence_number)}
    assert sorted(grown.list()) == sorted(f"f{number}" for number in range(6, 12))
    for number in range(6):
        grown.put(f"f{number}", b"2", new=True)
    assert {grown.get(path) for path in grown.list()} == {b"1", b"2"}
    grown.delete([f"f{number}" for number in range(12)])
    assert count_collected(grown, 12) == 12
    assert records(tmp_path, 5) == 0
    assert not rebalance.remove_member(grown, "disk0").failed
    grown.put("f1", b"3")
    assert {path: grown.get(path) for path in grown.list()} == {"f1": b"3"}
    grown.close()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20 if SOAK else 1))
def test_clients_write_correctly_while_another_collects(tmp_path: Path, seed: int) -> None:
    """Each writer has a path of its own, so that it knows which values it may read."""
    first = opened(tmp_path)
    assert first.ring
    over = threading.Event()
    wrong: list[str] = []

    def writer(number: int) -> None:
        client, draw = opened(tmp_path), random.Random(f"{seed} {number}")
        calls = LossyCalls(client, draw)
        possible: set[bytes | None] = {None}
        for word in (b"%d" % i for i in range(30)):
            calls.set(f"disk{draw.randrange(3)}", draw.choice([0.0, 0.0, 0.1]))
            content = draw.choice([word, word, None])
            try:
                before = possible
                possible = {*possible, content}
                if content is not None:
                    client.put(f"p{number}", content)
                    possible = {content}
                else:
                    possible = {None} if client.delete([f"p{number}"]) else before
            except StoreError:
                pass
            try:
                file = client.stat(f"p{number}")
            except StoreError:
                continue
            if (found := None if file is None else file.inline_data) not in possible:
                wrong.append(f"p{number} is {found!r}, not {possible}")
        client.close()

    def collector() -> None:
        while not over.is_set():
            try:
                collect_tombstones(first, 0.0)
            except StoreError:
                continue

    writers = [threading.Thread(target=writer, args=(number,)) for number in range(3)]
    threads = [*writers, threading.Thread(target=collector)]
    for thread in threads:
        thread.start()
    for thread in writers:
        thread.join()
    over.set()
    threads[-1].join()
    first.close()
    assert not wrong, wrong


class History:
    """Operations of two clients on a few paths, and the values that each path may have."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._seed, self._draw = seed, random.Random(f"collection {seed}")
        self._count = self._draw.choice([2, 3, 3, 5])
        self.clients = [opened(folder, self._count, redundancy=self._draw.choice(["1x", "2x"])) for _ in range(2)]
        assert self.clients[0].ring
        self.clients[1].put("begin", b"")
        self._calls = [LossyCalls(client, self._draw) for client in self.clients]
        self.paths = [f"p{i}" for i in range(3)]
        self._possible: dict[str, set[bytes | None]] = {path: {None} for path in self.paths}
        self._done: list[str] = []

    def step(self, number: int) -> None:
        """Do something at random: disconnect a member, collect tombstones, write `number`, delete or read."""
        client, path, choice = self._draw.randrange(2), self._draw.choice(self.paths), self._draw.random()
        try:
            if choice < 0.25:
                self._lose_calls(client)
            elif choice < 0.45:
                self._collect(client)
            elif choice < 0.65:
                self._write(client, path, number)
            elif choice < 0.8:
                self._delete(client, path)
            else:
                self._done.append(f"{client} reads {path}")
                self.check(client, path)
        except StoreError as error:
            self._done.append(f"  {type(error).__name__}")

    def reconnect(self) -> None:
        """Let no call get lost any more."""
        for calls in self._calls:
            for member in range(self._count):
                calls.set(f"disk{member}", 0.0)

    def check(self, client: int, path: str) -> None:
        """Check that a client reads a value that the path may have."""
        file = self.clients[client].stat(path)
        found = None if file is None else file.inline_data
        assert found in self._possible[path], self._message(f"{path} is {found!r}, not {self._possible[path]}")

    def _message(self, wrong: str) -> str:
        return f"seed {self._seed}: {wrong}\n" + "\n".join(self._done)

    def _lose_calls(self, client: int) -> None:
        member = f"disk{self._draw.randrange(self._count)}"
        rate = self._draw.choice([0.0, 0.0, 0.2, 1.0])
        for calls in self._calls if self._draw.random() < 0.5 else [self._calls[client]]:
            calls.set(member, rate)
        self._done.append(f"{member} of {client} loses {rate}")

    def _collect(self, client: int) -> None:
        rate = self._draw.choice([0.0, 0.05, None])
        for member in range(self._count) if rate is not None else ():
            self._calls[client].set(f"disk{member}", rate)
        self._done.append(f"{client} collects while members lose {rate}")
        collect_tombstones(self.clients[client], 0.0)

    def _write(self, client: int, path: str, number: int) -> None:
        self._done.append(f"{client} writes {path} = {number}")
        word = f"{number}".encode()
        self._possible[path].add(word)
        self.clients[client].put(path, word)
        self._possible[path] = {word}

    def _delete(self, client: int, path: str) -> None:
        self._done.append(f"{client} deletes {path}")
        before = set(self._possible[path])
        self._possible[path].add(None)
        if self.clients[client].delete([path]):
            self._possible[path] = {None}
        else:  # nothing was deleted: a put without an answer may still take effect
            self._possible[path] = before
            assert None in before, self._message(f"{path} was {before}")


SEEDS = [int(os.environ["CKPT_SEED"])] if "CKPT_SEED" in os.environ else range(300 if SOAK else 6)


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
def test_clients_see_one_history_while_deletions_are_collected(tmp_path: Path, seed: int) -> None:
    """Two clients write, delete and read a few paths while members are disconnected, return, and lose calls, and deletions are
    collected meanwhile. An acknowledged value is read until a newer one was written, or may have been."""
    history = History(tmp_path, seed)
    for number in range(60):
        history.step(number)
    history.reconnect()
    collect_tombstones(history.clients[0], 0.0)
    for path in history.paths:
        history.check(1, path)
        history.check(0, path)
    listed = history.clients[0].list()
    for path in history.paths:
        history.check(0, path)
        assert (path in listed) == (history.clients[0].stat(path) is not None)
    for client in history.clients:
        client.close()
