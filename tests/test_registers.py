"""Registers, and the agreement of several of them: whatever fails and whoever competes, one history for all."""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.aggregator.cluster.fanout import FanOut, MemberHealth
from ckpt.aggregator.placement.redundancy import Quorum, quorum
from ckpt.aggregator.records.paxos import ReplicatedRegisters
from ckpt.aggregator.records.replica_set import ReplicaSet, VotingGroup
from ckpt.storage.base.errors import Changed, Outdated, StoreError, Unavailable
from ckpt.storage.registers.base import (
    NO_BALLOT,
    Ballot,
    DamagedRecord,
    DirectChange,
    Record,
    RegisterAnswer,
    Registers,
    RegisterValue,
    decode_ballot,
    encode_ballot,
    floor_ballot,
    is_final,
)
from ckpt.storage.registers.fence_numbers import next_era
from ckpt.storage.registers.sqlite import SqliteRegisters

BALLOTS = st.builds(
    Ballot, st.integers(0, 10**12), st.text("0123456789abcdef", max_size=16), st.integers(0, 10**6),
    st.text("0123456789abcdef", max_size=16),
)  # fmt: skip


@pytest.fixture
def registers(tmp_path: Path) -> SqliteRegisters:
    return fresh(tmp_path / "r" / "registers.sqlite")


def fresh(path: Path) -> SqliteRegisters:
    """Registers of a namespace that was just made."""
    made = SqliteRegisters(str(path))
    made.mark_complete()
    return made


def record(registers: Registers, name: str) -> Record:
    (answer,) = registers.read([name])
    assert isinstance(answer, Record)
    return answer


@given(BALLOTS)
def test_ballots_are_kept(ballot: Ballot) -> None:
    assert decode_ballot(encode_ballot(ballot)) == ballot


def test_the_order_of_ballots() -> None:
    first = Ballot(1, "a")
    direct = first.next_step("x")
    assert NO_BALLOT < NO_BALLOT.next_step("x") < first < direct < direct.next_step("w") < Ballot(1, "b") < Ballot(2, "")


def test_an_empty_register(registers: SqliteRegisters) -> None:
    assert registers.read(["a", "b"]) == [Record(), Record()]
    assert registers.scan("") == []


def test_an_empty_disk_does_not_vote(tmp_path: Path) -> None:
    registers = SqliteRegisters(str(tmp_path / "r" / "new.sqlite"))
    assert isinstance(registers.read(["a"])[0], DamagedRecord)
    assert registers.scan("") == []
    assert not (tmp_path / "r").exists(), "reading makes nothing"
    assert isinstance(registers.prepare(["a"], Ballot(1, "x"))[0], DamagedRecord)
    assert registers.change([DirectChange("a", NO_BALLOT, RegisterValue(b"1"))], "w") == [False]
    registers.mark_complete()
    assert registers.read(["a"]) == [Record()]


def test_promises(registers: SqliteRegisters) -> None:
    low, high = Ballot(1, "a"), Ballot(2, "a")
    assert registers.prepare(["x"], high) == [Record(high, NO_BALLOT, None)]
    assert registers.prepare(["x"], low) == [Record(high, NO_BALLOT, None)], "a lower one is told of the higher"
    assert registers.accept([("x", RegisterValue(b"h", b"b"))], low) == [False]
    assert registers.accept([("x", RegisterValue(b"h", b"b"))], high) == [True]
    assert record(registers, "x") == Record(high, high, RegisterValue(b"h", b"b"))
    assert registers.prepare(["x"], Ballot(3, "")) == [Record(Ballot(3, ""), high, RegisterValue(b"h", b"b"))]


def check_final(registers: Registers) -> None:
    """What is agreed for ever is not changed by anybody, however high the ballot, and is told from what is not."""
    high, value = Ballot(1 << 61, "p"), RegisterValue(b"agreed")
    registers.learn("x", value)
    there = record(registers, "x")
    assert is_final(there)
    assert registers.prepare(["x"], high) == [there]
    assert registers.accept([("x", RegisterValue(b"other"))], high) == [False]
    assert registers.change([DirectChange("x", there.accepted, RegisterValue(b"other"))], "w") == [False]
    assert record(registers, "x") == there
    registers.prepare(["y"], high)
    assert not is_final(record(registers, "y"))
    registers.learn("y", value)
    assert is_final(record(registers, "y"))
    with pytest.raises(Changed, match="was agreed on before"):
        registers.learn("y", RegisterValue(b"other"))


def test_what_is_final(registers: SqliteRegisters) -> None:
    check_final(registers)


def check_eras(registers: Registers) -> None:
    """Each era begins once; calls of the ones before are refused; what was collected takes no ballot below the floor."""
    one, two = next_era(1), next_era(1, above=(1 << 32) + 7)
    assert one is not None
    assert two is not None
    registers.fence(1)
    registers.change(
        [DirectChange("/a", NO_BALLOT, RegisterValue(b"1")), DirectChange("/b", NO_BALLOT, RegisterValue(b"2"))], "w", 1
    )
    at = NO_BALLOT.next_step("w")
    registers.prepare(["/b"], Ballot(5, "p"), 1)
    assert registers.fence(one)
    assert not registers.fence(one)
    assert not registers.fence(2 - 1)
    with pytest.raises(Outdated, match="ring 1 in era 1, not 1"):
        registers.read(["/a"], 1)
    assert registers.collect([("/a", Ballot(9, "x")), ("/none", NO_BALLOT)], one) == 0
    assert registers.fence(two)
    assert registers.collect([("/a", at), ("/b", at)], two) == 2, "a promise below the floor is kept by the floor"
    assert registers.read(["/a", "/b"], two) == [Record(floor_ballot(two), NO_BALLOT, None)] * 2
    assert registers.change([DirectChange("/a", NO_BALLOT, RegisterValue(b"late"))], "v", two) == [False]
    late, good = Ballot(7, "late"), Ballot(two + 1, "x")
    assert registers.accept([("/a", RegisterValue(b"late"))], late, fence_number=two) == [False]
    assert registers.prepare(["/a"], late, two) == [Record(floor_ballot(two), NO_BALLOT, None)]
    assert registers.accept([("/a", RegisterValue(b"new"))], good, fence_number=two) == [True]
    assert registers.collect([("/a", good)], two) == 0, "above the floor: its ballot would be lost"
    registers.fence(2)
    assert registers.read(["/b"], 2) == [Record(Ballot(2 << 32, ""), NO_BALLOT, None)], "a floor stays when the ring changes"


def test_eras(registers: SqliteRegisters) -> None:
    check_eras(registers)


def test_direct_changes(registers: SqliteRegisters) -> None:
    first = DirectChange("x", NO_BALLOT, RegisterValue(b"1"))
    assert registers.change([first, DirectChange("y", NO_BALLOT, RegisterValue(b"2"))], "w") == [True, True]
    assert registers.change([first], "v") == [False], "it is not empty any more"
    at = record(registers, "x").accepted
    assert at == NO_BALLOT.next_step("w")
    assert registers.change([DirectChange("x", at, RegisterValue(b"3"))], "v") == [True]
    registers.prepare(["x"], Ballot(1, "p"))
    now = record(registers, "x")
    assert registers.change([DirectChange("x", now.accepted, RegisterValue(b"4"))], "v") == [False], "a promise was given"
    assert now.value == RegisterValue(b"3")


def test_listing(registers: SqliteRegisters) -> None:
    names = ["a", "a/1", "a/2", "a0", "b", "ä/1", "a/\U0001f600"]
    registers.change([DirectChange(n, NO_BALLOT, RegisterValue(n.encode(), b"body")) for n in names], "w")
    assert [n for n, _ in registers.scan("")] == sorted(names)
    assert [n for n, _ in registers.scan("a/")] == ["a/1", "a/2", "a/\U0001f600"]
    assert [n for n, _ in registers.scan("a/", "a/1", 1)] == ["a/2"]
    found = dict(registers.scan_all(""))["b"]
    assert isinstance(found, Record)
    assert found.value == RegisterValue(b"b"), "the body is left out"


@pytest.mark.parametrize("column", ["promised", "accepted", "head", "body"])
def test_rot_does_not_vote(registers: SqliteRegisters, column: str) -> None:
    registers.change([DirectChange("x", NO_BALLOT, RegisterValue(b"head", b"body"))], "w")
    registers.close()
    with sqlite3.connect(registers._path) as db:
        db.execute(f"UPDATE registers SET {column} = x'00ff'")
    db.close()
    (answer,) = registers.read(["x"])
    assert isinstance(answer, DamagedRecord)
    assert isinstance(registers.prepare(["x"], Ballot(9, ""))[0], DamagedRecord)
    assert registers.change([DirectChange("x", NO_BALLOT, RegisterValue(b"1"))], "v") == [False]
    assert registers.accept([("x", RegisterValue(b"1"))], Ballot(9, "")) == [False]
    assert registers.accept([("x", RegisterValue(b"1"))], Ballot(9, ""), repair_damaged=True) == [True]
    assert record(registers, "x").value == RegisterValue(b"1")


def test_a_damaged_file(registers: SqliteRegisters) -> None:
    registers.change([DirectChange(f"x{i}", NO_BALLOT, RegisterValue(os.urandom(500))) for i in range(100)], "w")
    registers.close()
    with open(registers._path, "r+b") as file:
        file.write(b"\xff" * 30_000)
    with pytest.raises(StoreError, match="damaged: run `ckpt-node admin repair`"):
        registers.read(["x1"])
    registers.reset()
    assert isinstance(registers.read(["x1"])[0], DamagedRecord), "lost is not empty"
    assert registers.accept([("x1", RegisterValue(b"1"))], Ballot(1, "a"), repair_damaged=True) == [True]
    registers.mark_complete()
    assert record(registers, "x1").value == RegisterValue(b"1")
    assert registers.read(["x2"]) == [Record()]
    assert [*Path(registers._path).parent.glob("*.damaged-*")], "what there was is kept"


def test_a_value_that_is_too_long(registers: SqliteRegisters) -> None:
    with pytest.raises(StoreError, match="a register takes"):
        registers.change(
            [
                DirectChange("y", NO_BALLOT, RegisterValue(b"")),
                DirectChange("x", NO_BALLOT, RegisterValue(b"", bytes(33 << 20))),
            ],
            "w",
        )
    assert registers.read(["x", "y"]) == [Record(), Record()], "all of a batch or nothing"


@pytest.mark.parametrize("point", ["registers.commit", "registers.committed"])
def test_killed_in_a_batch(tmp_path: Path, point: str) -> None:
    program = (
        "import sys; from ckpt.storage.registers.sqlite import SqliteRegisters; from ckpt.storage.registers.base import *\n"
        "SqliteRegisters(sys.argv[1]).change([DirectChange(f'x{i}', NO_BALLOT, RegisterValue(b'v')) for i in range(50)], 'w')\n"
    )
    path = str(tmp_path / "r.sqlite")
    fresh(Path(path)).close()
    environment = os.environ | {"CKPT_FAILPOINTS": f"{point}=kill"}
    done = subprocess.run([sys.executable, "-c", program, path], env=environment, check=False)
    assert done.returncode == -9
    there = SqliteRegisters(path).scan("")
    assert len(there) == (50 if point == "registers.committed" else 0)


# --- several of them -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tolerated", [0, 1, 2, 3])
@pytest.mark.parametrize("available", range(1, 10))
def test_quorums_meet(tolerated: int, available: int) -> None:
    needed = quorum(tolerated, available)
    assert 1 <= needed.members <= available
    assert 2 * needed.write > needed.members
    assert needed.read + needed.write > needed.members
    if available >= 2 * max(1, tolerated) + 1:
        assert needed.members - needed.write >= tolerated


class Flaky(Registers):
    """Registers whose calls get lost, before or after they were done."""

    def __init__(self, inner: Registers, draw: random.Random, rate: float) -> None:
        self.inner, self.draw, self.rate = inner, draw, rate

    def _maybe(self, call: Callable[[], Any]) -> Any:
        if self.draw.random() < self.rate:
            raise Unavailable("lost on the way there")
        answer = call()
        if self.draw.random() < self.rate:
            raise Unavailable("lost on the way back")
        return answer

    def read(self, names: Sequence[str], fence_number: int = 0) -> list[RegisterAnswer]:
        return self._maybe(lambda: self.inner.read(names, fence_number))  # type: ignore[no-any-return]

    def prepare(self, names: Sequence[str], ballot: Ballot, fence_number: int = 0) -> list[RegisterAnswer]:
        return self._maybe(lambda: self.inner.prepare(names, ballot, fence_number))  # type: ignore[no-any-return]

    def accept(
        self, values: Sequence[tuple[str, RegisterValue]], ballot: Ballot, repair_damaged: bool = False, fence_number: int = 0
    ) -> list[bool]:
        return self._maybe(lambda: self.inner.accept(values, ballot, repair_damaged, fence_number))  # type: ignore[no-any-return]

    def change(self, changes: Sequence[DirectChange], writer: str, fence_number: int = 0) -> list[bool]:
        return self._maybe(lambda: self.inner.change(changes, writer, fence_number))  # type: ignore[no-any-return]

    def scan(
        self, prefix: str, after: str = "", limit: int = 10_000, fence_number: int = 0
    ) -> list[tuple[str, RegisterAnswer]]:
        return self._maybe(lambda: self.inner.scan(prefix, after, limit, fence_number))

    def reset(self) -> None:
        self.inner.reset()

    def mark_complete(self) -> None:
        self._maybe(self.inner.mark_complete)

    def fence(self, fence_number: int) -> bool:
        return bool(self._maybe(lambda: self.inner.fence(fence_number)))

    def collect(self, expected_ballots: Sequence[tuple[str, Ballot]], fence_number: int) -> int:
        return int(self._maybe(lambda: self.inner.collect(expected_ballots, fence_number)))

    def learn(self, name: str, value: RegisterValue) -> None:
        self._maybe(lambda: self.inner.learn(name, value))

    def join_ring(self, fence_number: int, kept_prefix: str) -> None:
        self._maybe(lambda: self.inner.join_ring(fence_number, kept_prefix))

    def drop(self, names: Sequence[str], fence_number: int) -> None:
        self._maybe(lambda: self.inner.drop(names, fence_number))


def ledger(registers: dict[str, Registers], seconds: float = 20) -> ReplicatedRegisters:
    members = tuple(registers)
    needed = Quorum(len(members), len(members) // 2 + 1, len(members) - len(members) // 2)
    keepers = ReplicaSet((VotingGroup(members, needed),))
    return ReplicatedRegisters(
        registers, lambda paths: dict.fromkeys(paths, keepers), FanOut(MemberHealth(0.001, 0.01)), seconds
    )


def words(value: RegisterValue | None) -> list[str]:
    return [] if value is None else value.body.decode().split()


SEEDS = [int(os.environ["CKPT_SEED"])] if "CKPT_SEED" in os.environ else range(200 if os.environ.get("CKPT_SOAK") else 12)


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("members", [1, 2, 3, 5])
def test_one_history(tmp_path: Path, seed: int, members: int) -> None:
    """Four clients add words to one value, over registers that lose calls. What each was told is a beginning of the end."""
    draw = random.Random(f"{seed} {members}")
    inner: dict[str, Registers] = {f"m{i}": fresh(tmp_path / f"{i}.sqlite") for i in range(members)}
    rate = draw.choice([0.0, 0.02, 0.1, 0.25])
    told: list[tuple[str | None, list[str]]] = []
    lock = threading.Lock()

    def client(number: int) -> None:
        mine = random.Random(f"{seed} {members} {number}")
        book = ledger({n: Flaky(r, mine, rate) for n, r in inner.items()}, 5)
        for i in range(8):
            word = f"{number}.{i}"

            def add(_: str, value: RegisterValue | None, word: str = word) -> RegisterValue | None:
                there = words(value)
                return None if word in there else RegisterValue(b"", " ".join([*there, word]).encode())

            try:
                if mine.random() < 0.3:
                    seen, who = words(book.read(["x"])["x"]), None
                else:
                    seen, who = words(book.update(["x"], add, expect_absent=mine.random() < 0.2)["x"]), word
            except Unavailable:
                continue
            with lock:
                told.append((who, seen))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    end = words(ledger(inner).read(["x"])["x"])
    assert len(set(end)) == len(end), "no word is there twice"
    for who, seen in told:
        assert end[: len(seen)] == seen, f"seed {seed}: {seen} was told, {end} is the end"
        assert who is None or who in seen
    if rate == 0:
        assert sum(who is not None for who, _ in told) == len(end)


def test_a_half_done_change_is_settled(tmp_path: Path) -> None:
    """Its author died after the first member. Whoever has seen it sees it for ever, whichever members answer."""
    registers: dict[str, Registers] = {f"m{i}": fresh(tmp_path / f"{i}.sqlite") for i in range(3)}
    registers["m0"].change([DirectChange("x", NO_BALLOT, RegisterValue(b"", b"half"))], "dead")
    seen = [words(ledger(registers).read(["x"])["x"]) for _ in range(5)]
    assert seen == sorted(seen), "nothing, as long as only others were asked; then it, and never nothing again"
    ledger(registers).settle(["x"])
    rest = registers | {"m0": Flaky(registers["m0"], random.Random(0), 1.0)}
    assert words(ledger(rest).read(["x"])["x"]) == ["half"], "without the first member too: a read has settled it"


@pytest.mark.parametrize("who", ["m0", "m1", "m2"])
def test_one_knows_that_it_is_final(tmp_path: Path, who: str) -> None:
    """The others may not have heard of it. A proposal beside it says what it is, and leaves them so that they can be told."""
    registers: dict[str, Registers] = {f"m{i}": fresh(tmp_path / f"{i}.sqlite") for i in range(3)}
    book = ledger(registers)
    book.update(["x"], lambda _, value: RegisterValue(b"", b"agreed"))
    registers[who].learn("x", RegisterValue(b"", b"agreed"))
    for register in registers.values():
        register.prepare(["x"], Ballot(1, "dead"))  # each proposal meets a promise first
    first = book.update(["x", "y"], lambda _, value: RegisterValue(b"", b"mine") if value is None else None)
    assert (words(first["x"]), words(first["y"])) == (["agreed"], ["mine"])
    assert words(book.read(["x"])["x"]) == ["agreed"]
    for register in registers.values():
        register.learn("x", RegisterValue(b"", b"agreed"))
        assert record(register, "y").accepted.round < 100, "no ballot of others goes by it"


def test_too_few_members(tmp_path: Path) -> None:
    inner: dict[str, Registers] = {f"m{i}": fresh(tmp_path / f"{i}.sqlite") for i in range(3)}
    ledger(inner).update(["x"], lambda _, value: RegisterValue(b"", b"there"))
    one = {n: r if n == "m2" else Flaky(r, random.Random(0), 1.0) for n, r in inner.items()}
    with pytest.raises(Unavailable, match=r"can't read x: 1 of the 3 members .* 2 are needed .*start the missing ones"):
        ledger(one, 1).read(["x"])
    with pytest.raises(Unavailable, match="can't change x"):
        ledger(one, 1).update(["x"], lambda _, value: RegisterValue(b"", b"new"))
    assert words(ledger(inner).read(["x"])["x"]) == ["there"]


def test_a_damaged_record_is_healed_by_the_next_change(tmp_path: Path) -> None:
    inner: dict[str, Registers] = {f"m{i}": fresh(tmp_path / f"{i}.sqlite") for i in range(3)}
    book = ledger(inner)
    book.update(["x"], lambda _, value: RegisterValue(b"", b"one"))
    for register in inner.values():
        register.close()
    with sqlite3.connect(tmp_path / "0.sqlite") as db:
        db.execute("UPDATE registers SET body = 'rot'")
    db.close()
    assert words(book.read(["x"])["x"]) == ["one"]
    book.update(["x"], lambda _, value: RegisterValue(b"", b"two"))
    (healed,) = inner["m0"].read(["x"])
    assert isinstance(healed, Record)
    assert healed.value == RegisterValue(b"", b"two")
