"""Registers that fail, and checks that every implementation passes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from ckpt.aggregator.cluster.fanout import FanOut, MemberHealth
from ckpt.aggregator.placement.redundancy import Quorum
from ckpt.aggregator.records.paxos import ReplicatedRegisters
from ckpt.aggregator.records.replica_set import ReplicaSet, VotingGroup
from ckpt.storage.base.errors import Changed, Outdated, Unavailable
from ckpt.storage.registers.base import (
    NO_BALLOT,
    Ballot,
    DirectChange,
    Record,
    RegisterAnswer,
    Registers,
    RegisterValue,
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
