"""The agreement of several registers: whatever fails and whoever competes, one history for all."""

from __future__ import annotations

import os
import random
import sqlite3
import threading
from pathlib import Path

import pytest
from helpers.registers import Flaky, fresh, ledger, record, words

from ckpt.aggregator.placement.redundancy import quorum
from ckpt.storage.base.errors import Unavailable
from ckpt.storage.registers.base import (
    NO_BALLOT,
    Ballot,
    DirectChange,
    Record,
    Registers,
    RegisterValue,
)


@pytest.mark.parametrize("tolerated", [0, 1, 2, 3])
@pytest.mark.parametrize("available", range(1, 10))
def test_quorums_meet(tolerated: int, available: int) -> None:
    needed = quorum(tolerated, available)
    assert 1 <= needed.members <= available
    assert 2 * needed.write > needed.members
    assert needed.read + needed.write > needed.members
    if available >= 2 * max(1, tolerated) + 1:
        assert needed.members - needed.write >= tolerated


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
