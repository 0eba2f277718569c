"""Agreement of several registers by Paxos: all clients see one history, whatever fails and whoever competes."""

from __future__ import annotations

import os
import random
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import SOAK, until
from helpers.registers import Flaky, new_registers, record, replicated_registers, words

from ckpt.aggregator.placement.redundancy import quorum
from ckpt.aggregator.records.paxos import BATCH_PATHS
from ckpt.aggregator.records.register_update import Superseded
from ckpt.storage.base.errors import NoSpace, Outdated, Unavailable
from ckpt.storage.registers.base import (
    NO_BALLOT,
    Ballot,
    DirectChange,
    Register,
    Registers,
    RegisterValue,
)


@pytest.mark.parametrize("tolerated", [0, 1, 2, 3])
@pytest.mark.parametrize("available", range(1, 10))
def test_quorums_of_reads_and_writes_intersect(tolerated: int, available: int) -> None:
    needed = quorum(tolerated, available)
    assert 1 <= needed.members <= available
    assert 2 * needed.write > needed.members
    assert needed.read + needed.write > needed.members
    if available >= 2 * max(1, tolerated) + 1:
        assert needed.members - needed.write >= tolerated


SEEDS = [int(os.environ["CKPT_SEED"])] if "CKPT_SEED" in os.environ else range(200 if SOAK else 12)


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("members", [1, 2, 3, 5])
def test_competing_clients_see_one_history(tmp_path: Path, seed: int, members: int) -> None:
    """Four clients add words to one value over registers that lose calls. Each result is a prefix of the last value.

    The seed varies the lost calls. The order in which threads run varies, too, so a seed may not repeat a failure.
    """
    draw = random.Random(f"{seed} {members}")
    inner: dict[str, Registers] = {f"m{i}": new_registers(tmp_path / f"{i}.sqlite") for i in range(members)}
    rate = draw.choice([0.0, 0.02, 0.1, 0.25])
    results: list[tuple[str | None, list[str]]] = []
    unanswered: list[str] = []
    lock = threading.Lock()

    def client(number: int) -> None:
        mine = random.Random(f"{seed} {members} {number}")
        replicated = replicated_registers({n: Flaky(r, mine, rate) for n, r in inner.items()}, seconds=5)
        for i in range(8):
            word = f"{number}.{i}"

            def add(_: str, value: RegisterValue | None, word: str = word) -> RegisterValue | None:
                present = words(value)
                return None if word in present else RegisterValue(b"", " ".join([*present, word]).encode())

            try:
                if mine.random() < 0.3:
                    seen, added = words(replicated.read(["x"])["x"]), None
                else:
                    seen, added = words(replicated.update(["x"], add, expect_absent=mine.random() < 0.2)["x"]), word
            except Unavailable:  # a lost call, or one that a busy machine did not answer within the timeout
                with lock:
                    unanswered.append(word)
                continue
            with lock:
                results.append((added, seen))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    end = words(replicated_registers(inner).read(["x"])["x"])
    assert len(set(end)) == len(end), "no word exists twice"
    for added, seen in results:
        assert end[: len(seen)] == seen, f"seed {seed}: {seen} was returned, but the last value is {end}"
        assert added is None or added in seen
    acknowledged = {added for added, _ in results if added is not None}
    assert acknowledged <= set(end) <= acknowledged.union(unanswered)


def test_a_half_done_change_is_settled_by_a_read(tmp_path: Path) -> None:
    """The writer died after the first member. Once a read returns the change, all later reads do, whichever members answer."""
    registers: dict[str, Registers] = {f"m{i}": new_registers(tmp_path / f"{i}.sqlite") for i in range(3)}
    registers["m0"].change([DirectChange("x", NO_BALLOT, RegisterValue(b"", b"half"))], "dead")
    seen = [words(replicated_registers(registers).read(["x"])["x"]) for _ in range(5)]
    assert seen == sorted(seen), "nothing while only the other members answer, then the value, and never nothing again"
    replicated_registers(registers).settle(["x"])
    rest = registers | {"m0": Flaky(registers["m0"], random.Random(0), 1.0)}
    assert words(replicated_registers(rest).read(["x"])["x"]) == ["half"], (
        "also without the first member: a read has settled the change"
    )


@pytest.mark.parametrize("member", ["m0", "m1", "m2"])
def test_a_final_value_that_one_member_knows_is_kept(tmp_path: Path, member: str) -> None:
    """The other members may not have learned it. A competing proposal reads the final value and leaves it readable."""
    registers: dict[str, Registers] = {f"m{i}": new_registers(tmp_path / f"{i}.sqlite") for i in range(3)}
    replicated = replicated_registers(registers)
    replicated.update(["x"], lambda _, value: RegisterValue(b"", b"agreed"))
    registers[member].learn("x", RegisterValue(b"", b"agreed"))
    for register in registers.values():
        register.prepare(["x"], Ballot(1, "dead"))  # each proposal meets a promise first
    first = replicated.update(["x", "y"], lambda _, value: RegisterValue(b"", b"mine") if value is None else None)
    assert (words(first["x"]), words(first["y"])) == (["agreed"], ["mine"])
    assert words(replicated.read(["x"])["x"]) == ["agreed"]
    for register in registers.values():
        register.learn("x", RegisterValue(b"", b"agreed"))
        assert record(register, "y").accepted_ballot.round < 100, "far below the round of final values, which is 1 << 60"


def test_reads_and_changes_need_a_quorum(tmp_path: Path) -> None:
    inner: dict[str, Registers] = {f"m{i}": new_registers(tmp_path / f"{i}.sqlite") for i in range(3)}
    replicated_registers(inner).update(["x"], lambda _, value: RegisterValue(b"", b"there"))
    one = {n: r if n == "m2" else Flaky(r, random.Random(0), 1.0) for n, r in inner.items()}
    with pytest.raises(Unavailable, match=r"can't read x: 1 of the 3 members .* 2 are needed .*start the missing ones"):
        replicated_registers(one, 1).read(["x"])
    with pytest.raises(Unavailable, match="can't change x"):
        replicated_registers(one, 1).update(["x"], lambda _, value: RegisterValue(b"", b"new"))
    assert words(replicated_registers(inner).read(["x"])["x"]) == ["there"]


def test_a_damaged_record_is_replaced_by_a_change_that_reaches_it(tmp_path: Path) -> None:
    """A change returns after a majority, so the first one may not reach the damaged member."""
    inner: dict[str, Registers] = {f"m{i}": new_registers(tmp_path / f"{i}.sqlite") for i in range(3)}
    replicated = replicated_registers(inner)
    replicated.update(["x"], lambda _, value: RegisterValue(b"", b"one"))
    for register in inner.values():
        register.close()
    with sqlite3.connect(tmp_path / "0.sqlite") as db:
        db.execute("UPDATE registers SET body = 'rot'")
    db.close()
    assert words(replicated.read(["x"])["x"]) == ["one"]

    def is_replaced() -> bool:
        replicated.update(["x"], lambda _, value: RegisterValue(b"", b"two"))
        (answer,) = inner["m0"].read(["x"])
        return isinstance(answer, Register) and answer.value == RegisterValue(b"", b"two")

    until(is_replaced, "a change reaches the damaged member, too")


def test_members_that_accept_no_value_are_named(tmp_path: Path) -> None:
    """Otherwise the message would blame other clients."""

    def refuse(*_: object, **__: object) -> list[bool]:
        raise NoSpace("the disk is full")

    inner = {f"m{i}": new_registers(tmp_path / f"{i}.sqlite") for i in range(3)}
    for registers in inner.values():
        registers.accept = registers.change = refuse  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match="a was not changed within 0.5 s: m.: the disk is full"):
        replicated_registers(inner, 0.5).update(["a"], lambda _, __: RegisterValue(b"new"))


def test_a_superseded_change_may_be_accepted_if_an_earlier_batch_was(tmp_path: Path) -> None:
    replicated = replicated_registers({f"m{i}": new_registers(tmp_path / f"{i}.sqlite") for i in range(3)})
    paths = [f"p{i:05}" for i in range(BATCH_PATHS + 1)]
    outcome = replicated.update_fenced(0, paths[:1], lambda _, __: RegisterValue(b"new"))
    assert isinstance(outcome, dict)
    replica_sets = replicated._replica_sets

    def members_of(asked: Sequence[str]) -> Any:
        if paths[-1] in asked:
            raise Outdated("the members have the fence number 1 now")
        return replica_sets(asked)

    replicated._replica_sets = members_of  # type: ignore[method-assign]
    outcome = replicated.update_fenced(0, paths, lambda _, __: RegisterValue(b"new"))
    assert isinstance(outcome, Superseded)
    assert outcome.may_be_accepted
    outcome = replicated.update_fenced(0, paths[-1:], lambda _, __: RegisterValue(b"new"))
    assert isinstance(outcome, Superseded)
    assert not outcome.may_be_accepted
