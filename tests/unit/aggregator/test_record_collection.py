"""Records of deleted files are collected: a listing costs what exists, and no deleted file comes back."""

from __future__ import annotations

import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.nodes import directories
from helpers.registers import Flaky

from ckpt.aggregator.file_io import namespace as namespaces
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import rebalance
from ckpt.aggregator.maintenance import repair as repairs
from ckpt.aggregator.maintenance import scrub as surveys
from ckpt.aggregator.records import recently_collected, record_collection
from ckpt.aggregator.records.record_collection import collect_tombstones
from ckpt.storage.base.errors import StoreError
from ckpt.storage.registers.base import ABSENT_NAME, Ballot, RegisterAnswer, RegisterValue, floor_ballot
from ckpt.storage.registers.sqlite import SqliteRegisters


def opened(folder: Path, count: int = 3, **table: Any) -> Namespace:
    found = Namespace(directories(folder, count, **{"redundancy": "2x", "deadline_seconds": 2.0} | table))
    health = found.fan_out.health
    health._first_pause_seconds, health._max_pause_seconds, health._probe = 0.001, 0.005, None
    return found


def records(folder: Path, count: int = 3) -> int:
    """Registers of paths on all disks."""
    total = 0
    for number in range(count):
        db = sqlite3.connect(folder / f"disk{number}" / "registers.sqlite")
        total += db.execute("SELECT count(*) FROM registers WHERE name LIKE '/%'").fetchone()[0]
        db.close()
    return total


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many entries each call of a listing has looked at."""
    found: list[int] = []
    scan = SqliteRegisters.scan

    def counted(self: SqliteRegisters, *args: Any, **options: Any) -> list[tuple[str, RegisterAnswer]]:
        answers = scan(self, *args, **options)
        found.append(len(answers))
        return answers

    monkeypatch.setattr(SqliteRegisters, "scan", counted)
    return found


def entries_of_a_listing(namespace: Namespace, examined: list[int]) -> int:
    examined.clear()
    namespace.list()
    return sum(examined)


def test_a_listing_costs_what_exists(tmp_path: Path, examined: list[int]) -> None:
    namespace = opened(tmp_path)
    for number in range(60):
        namespace.put(f"run/{number}", b"x")
    namespace.delete([f"run/{number}" for number in range(2, 60)])
    assert entries_of_a_listing(namespace, examined) >= 2 * 60
    assert collect_tombstones(namespace) == 0, "they are too young"
    assert collect_tombstones(namespace, 0.0) == 58
    assert entries_of_a_listing(namespace, examined) <= 3 * 2
    assert records(tmp_path) <= 3 * 2
    assert sorted(namespace.list()) == ["run/0", "run/1"]
    namespace.put("run/7", b"again", new=True)
    assert namespace.get("run/7") == b"again"
    assert not namespace.delete(["run/9"]), "what was collected is not there"
    assert namespace.stat("run/9") is None
    namespace.close()


def test_registers_without_a_value_go_too(tmp_path: Path) -> None:
    """Who deletes what is not there leaves promises."""
    namespace = opened(tmp_path)
    namespace.put("a", b"1")
    namespace.delete([f"b{i}" for i in range(20)])
    assert records(tmp_path) > 20
    collect_tombstones(namespace, 0.0)
    assert records(tmp_path) <= 3
    namespace.close()


def test_a_listing_that_meets_too_many_lets_them_be_collected(
    tmp_path: Path, examined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespaces, "MAX_TOMBSTONES", 10)
    monkeypatch.setattr(record_collection, "MIN_AGE_SECONDS", 0.0)
    namespace = opened(tmp_path)
    for number in range(30):
        namespace.put(f"run/{number}", b"x")
    namespace.delete([f"run/{number}" for number in range(1, 30)])
    until = time.monotonic() + 60
    while entries_of_a_listing(namespace, examined) > 3:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert list(namespace.list()) == ["run/0"]
    namespace.close()


def test_a_repair_collects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_collection, "MIN_AGE_SECONDS", 0.0)
    namespace = opened(tmp_path)
    namespace.put("a", b"1")
    namespace.put("b", b"1")
    namespace.delete(["b"])
    namespace.settle(["/a", "/b"])
    assert repairs.repair_namespace(namespace, surveys.scrub_namespace(namespace)).collected == 1
    assert records(tmp_path) == 3
    assert surveys.scrub_namespace(namespace).is_whole
    namespace.close()


class Away:
    """Whether a member is cut off, and how often its calls get lost."""

    def __init__(self, namespace: Namespace, draw: random.Random) -> None:
        self._flaky = {name: Flaky(place.registers, draw, 0.0) for name, place in namespace.open_members.items()}
        for name, flaky in self._flaky.items():
            namespace.open_members[name].registers = namespace._member_registers[name] = flaky

    def set(self, member: str, rate: float) -> None:
        self._flaky[member].rate = rate


def test_a_member_that_comes_back_does_not_outvote(tmp_path: Path) -> None:
    """It has an older value with a high ballot, and missed that the file was deleted, collected and written anew."""
    namespace = opened(tmp_path)
    away = Away(namespace, random.Random(0))
    namespace.put("x", b"first")
    namespace.settle(["/x"])  # in two phases: a ballot above those of direct changes
    for member in namespace.ring.replica_set("/x").members:
        away.set(member, 1.0)
        namespace.delete(["x"])
        collect_tombstones(namespace, 0.0)
        collect_tombstones(namespace, 0.0)
        namespace.put("x", b"newer " + member.encode())
        away.set(member, 0.0)
        for other in namespace.open_members:
            away.set(other, 1.0 if other not in (member, next(m for m in namespace.open_members if m != member)) else 0.0)
        assert namespace.get("x") == b"newer " + member.encode()
        for other in namespace.open_members:
            away.set(other, 0.0)
        assert namespace.get("x") == b"newer " + member.encode()
    namespace.delete(["x"])
    assert collect_tombstones(namespace, 0.0) == 1
    assert records(tmp_path) == 0
    namespace.close()


@pytest.mark.parametrize("ends_after", [0, 1, 2])
def test_a_collection_that_ends_in_the_middle(tmp_path: Path, ends_after: int) -> None:
    """Some members have forgotten the tombstone. Whatever two answer, the file stays deleted, and what comes next stays too."""
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
    away = Away(namespace, random.Random(0))
    for content in (None, b"second"):
        if content is not None:
            namespace.put("x", content)
        for member in namespace.open_members:
            away.set(member, 1.0)
            file = namespace.stat("x")
            assert (None if file is None else file.inline_data) == content
            away.set(member, 0.0)
    namespace.delete(["x"])
    namespace.settle(["/x"])
    for name in left:
        namespace.open_members[name].registers.inner.collect = forget[name]  # type: ignore[attr-defined]
    assert collect_tombstones(namespace, 0.0) == 1
    assert records(tmp_path) == 0
    namespace.close()


def _fails(*_: object) -> int:
    raise StoreError("this member ends here")


def test_what_another_ring_left_behind_goes_before_a_tombstone(tmp_path: Path) -> None:
    """A member that keeps a file no longer still has an old record: it is forgotten first, or the file would come back when
    this member keeps it again."""
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


def test_the_ring_changes_after_a_collection(tmp_path: Path) -> None:
    """The floor stays, also on members that join: what was agreed before is read, and a tombstone goes again later."""
    namespace = opened(tmp_path)
    for number in range(12):
        namespace.put(f"f{number}", b"1")
    namespace.delete([f"f{number}" for number in range(6)])
    assert collect_tombstones(namespace, 0.0) == 6
    namespace.close()
    grown = opened(tmp_path, 5)
    assert not rebalance.rebalance_fragments(grown).failed
    assert grown.ring.epoch > 1
    assert {floors.promised for place in grown.open_members.values() for floors in place.registers.read([ABSENT_NAME])} == {
        floor_ballot(grown.ring.fence_number)
    }
    assert sorted(grown.list()) == sorted(f"f{number}" for number in range(6, 12))
    for number in range(6):
        grown.put(f"f{number}", b"2", new=True)
    assert {grown.get(path) for path in grown.list()} == {b"1", b"2"}
    grown.delete([f"f{number}" for number in range(12)])
    assert collect_tombstones(grown, 0.0) == 12
    assert records(tmp_path, 5) == 0
    assert not rebalance.remove_member(grown, "disk0").failed
    grown.put("f1", b"3")
    assert {path: grown.get(path) for path in grown.list()} == {"f1": b"3"}
    grown.close()


@pytest.mark.parametrize("seed", range(20 if os.environ.get("CKPT_SOAK") else 1))
def test_others_write_while_one_client_collects(tmp_path: Path, seed: int) -> None:
    """Each writer has a path of its own, so that it knows what it must read."""
    first = opened(tmp_path)
    assert first.ring
    over = threading.Event()
    wrong: list[str] = []

    def writer(number: int) -> None:
        client, draw = opened(tmp_path), random.Random(f"{seed} {number}")
        net = Away(client, draw)
        possible: set[bytes | None] = {None}
        for word in (b"%d" % i for i in range(30)):
            net.set(f"disk{draw.randrange(3)}", draw.choice([0.0, 0.0, 0.1]))
            what = draw.choice([word, word, None])
            try:
                before = possible
                possible = {*possible, what}
                if what is not None:
                    client.put(f"p{number}", what)
                    possible = {what}
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


SEEDS = [int(os.environ["CKPT_SEED"])] if "CKPT_SEED" in os.environ else range(300 if os.environ.get("CKPT_SOAK") else 6)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_history_with_collections(tmp_path: Path, seed: int) -> None:
    """Two clients write, delete and read a few paths while members are cut off, come back, and lose calls, and deletions are
    collected meanwhile. What was acknowledged is read until something newer was written, or may have been."""
    check_history(tmp_path, seed, lambda namespace: collect_tombstones(namespace, 0.0))


def check_history(folder: Path, seed: int, forget: Callable[[Namespace], object], steps: int = 60) -> None:
    draw = random.Random(f"collection {seed}")
    count = draw.choice([2, 3, 3, 5])
    clients = [opened(folder, count, redundancy=draw.choice(["1x", "2x"])) for _ in range(2)]
    assert clients[0].ring
    clients[1].put("begin", b"")
    nets = [Away(client, draw) for client in clients]
    paths = [f"p{i}" for i in range(3)]
    possible: dict[str, set[bytes | None]] = {path: {None} for path in paths}
    done: list[str] = []

    def step(number: int) -> None:
        which = draw.randrange(2)
        client, path, what = clients[which], draw.choice(paths), draw.random()
        word = f"{number}".encode()
        try:
            if what < 0.25:
                member = f"disk{draw.randrange(count)}"
                rate = draw.choice([0.0, 0.0, 0.2, 1.0])
                for net in nets if draw.random() < 0.5 else nets[which : which + 1]:
                    net.set(member, rate)
                done.append(f"{member} of {which} loses {rate}")
            elif what < 0.45:
                rate = draw.choice([0.0, 0.05, None])
                for member in range(count) if rate is not None else ():
                    nets[which].set(f"disk{member}", rate)
                done.append(f"{which} forgets while members lose {rate}")
                forget(client)
            elif what < 0.65:
                done.append(f"{which} writes {path} = {number}")
                possible[path].add(word)
                client.put(path, word)
                possible[path] = {word}
            elif what < 0.8:
                done.append(f"{which} deletes {path}")
                before = set(possible[path])
                possible[path].add(None)
                if client.delete([path]):
                    possible[path] = {None}
                else:  # it has changed nothing: a put that was not answered may still come through
                    possible[path] = before
                    assert None in before, f"seed {seed}: {path} was {before}\n" + "\n".join(done)
            else:
                done.append(f"{which} reads {path}")
                check(client, path)
        except StoreError as error:
            done.append(f"  {type(error).__name__}")

    def check(client: Namespace, path: str) -> None:
        file = client.stat(path)
        found = None if file is None else file.inline_data
        assert found in possible[path], f"seed {seed}: {path} is {found!r}, not {possible[path]}\n" + "\n".join(done)

    for number in range(steps):
        step(number)
    for net in nets:
        for member in range(count):
            net.set(f"disk{member}", 0.0)
    forget(clients[0])
    for path in paths:
        check(clients[1], path)
        check(clients[0], path)
    listed = clients[0].list()
    for path in paths:
        check(clients[0], path)
        assert (path in listed) == (clients[0].stat(path) is not None)
    for client in clients:
        client.close()


def test_names_that_were_collected_are_known_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are too many the oldest are forgotten, and nobody relies on what is not known any more."""
    monkeypatch.setattr(recently_collected, "_MAX_NAMES", 3)
    namespace = Namespace(directories(tmp_path, 3))
    namespace.put("a", b"1")
    assert not recently_collected.is_collected_since(namespace, "a", 1)
    for number, names in ((3, ["/a", "/b"]), (4, ["/c"])):
        recently_collected.record_collection(namespace, number, names)
    for path, number, expected in (("a", 2, True), ("a", 3, False), ("c", 3, True), ("d", 2, False)):
        assert recently_collected.is_collected_since(namespace, path, number) == expected, (path, number)
    recently_collected.record_collection(namespace, 5, ["/e"])
    assert recently_collected.is_collected_since(namespace, "d", 2), "what was collected by 3 is not known any more"
    assert not recently_collected.is_collected_since(namespace, "d", 3)
    namespace.update_register(recently_collected.COLLECTED_REGISTER, lambda _, value: RegisterValue(b"what no version writes"))
    assert recently_collected.is_collected_since(namespace, "d", 9)
    recently_collected.record_collection(namespace, 10, ["/f"])
    assert not recently_collected.is_collected_since(namespace, "d", 10)
    assert recently_collected.is_collected_since(namespace, "d", 9)
    namespace.close()
