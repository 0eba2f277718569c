"""Registers that fail, and checks that every implementation of registers must pass."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from ckpt.aggregator.cluster.fanout import FanOut
from ckpt.aggregator.cluster.member_health import MemberHealth
from ckpt.aggregator.placement.redundancy import Quorum
from ckpt.aggregator.records.paxos import ReplicatedRegisters
from ckpt.aggregator.records.replica_set import ReplicaSet, VotingGroup
from ckpt.storage.base.errors import Changed, Outdated, Unavailable
from ckpt.storage.registers.base import (
    NO_BALLOT,
    Ballot,
    DirectChange,
    Register,
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
    """Return empty registers in a file."""
    return new_registers(tmp_path / "r" / "registers.sqlite")


def new_registers(path: Path) -> SqliteRegisters:
    """Return the registers of a new namespace."""
    made = SqliteRegisters(str(path))
    made.mark_complete()
    return made


def record(registers: Registers, name: str) -> Register:
    """Return the record of a register, which must not be damaged."""
    (answer,) = registers.read([name])
    assert isinstance(answer, Register)
    return answer


def check_final(registers: Registers) -> None:
    """Check that a final value is changed by nobody, however high the ballot, and is recognised as final."""
    high, value = Ballot(1 << 61, "p"), RegisterValue(b"agreed")
    registers.learn("x", value)
    final = record(registers, "x")
    assert is_final(final)
    assert registers.prepare(["x"], high) == [final]
    assert registers.accept([("x", RegisterValue(b"other"))], high) == [False]
    assert registers.change([DirectChange("x", final.accepted_ballot, RegisterValue(b"other"))], "w") == [False]
    assert record(registers, "x") == final
    registers.prepare(["y"], high)
    assert not is_final(record(registers, "y"))
    registers.learn("y", value)
    assert is_final(record(registers, "y"))
    with pytest.raises(Changed, match="was agreed on before"):
        registers.learn("y", RegisterValue(b"other"))


def check_eras(registers: Registers) -> None:
    """Check that each era begins once, earlier calls are refused, and a collected register has a floor for ballots."""
    first_era, second_era = next_era(1), next_era(1, above=(1 << 32) + 7)
    assert first_era is not None
    assert second_era is not None
    registers.fence(1)
    registers.change(
        [DirectChange("/a", NO_BALLOT, RegisterValue(b"1")), DirectChange("/b", NO_BALLOT, RegisterValue(b"2"))], "w", 1
    )
    at = NO_BALLOT.next_step("w")
    registers.prepare(["/b"], Ballot(5, "p"), 1)
    assert registers.fence(first_era)
    assert not registers.fence(first_era)
    assert not registers.fence(2 - 1)
    with pytest.raises(Outdated, match="ring 1 in era 1, and the call has ring 1"):
        registers.read(["/a"], 1)
    assert registers.collect([("/a", Ballot(9, "x")), ("/none", NO_BALLOT)], first_era) == 0
    assert registers.fence(second_era)
    assert registers.collect([("/a", at), ("/b", at)], second_era) == 2, "the floor keeps a promise below it"
    assert registers.read(["/a", "/b"], second_era) == [Register(floor_ballot(second_era), NO_BALLOT, None)] * 2
    assert registers.change([DirectChange("/a", NO_BALLOT, RegisterValue(b"late"))], "v", second_era) == [False]
    late, good = Ballot(7, "late"), Ballot(second_era + 1, "x")
    assert registers.accept([("/a", RegisterValue(b"late"))], late, fence_number=second_era) == [False]
    assert registers.prepare(["/a"], late, second_era) == [Register(floor_ballot(second_era), NO_BALLOT, None)]
    assert registers.accept([("/a", RegisterValue(b"new"))], good, fence_number=second_era) == [True]
    assert registers.collect([("/a", good)], second_era) == 0, "a ballot above the floor would be lost"
    registers.fence(2)
    assert registers.read(["/b"], 2) == [Register(Ballot(2 << 32, ""), NO_BALLOT, None)], "a floor stays when the ring changes"


class Flaky(Registers):
    """Registers that lose a share `rate` of their calls, before or after the call took effect."""

    def __init__(self, inner: Registers, draw: random.Random, rate: float) -> None:
        self.inner, self.draw, self.rate = inner, draw, rate

    def _maybe(self, call: Callable[[], Any]) -> Any:
        if self.draw.random() < self.rate:
            raise Unavailable("lost on the way to the member")
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


def replicated_registers(registers: dict[str, Registers], seconds: float = 20) -> ReplicatedRegisters:
    """Return replicated registers over these members, with majorities as quorums."""
    members = tuple(registers)
    needed = Quorum(len(members), len(members) // 2 + 1, len(members) - len(members) // 2)
    replica_set = ReplicaSet((VotingGroup(members, needed),))
    return ReplicatedRegisters(
        registers, lambda paths: dict.fromkeys(paths, replica_set), FanOut(MemberHealth(0.001, 0.01)), seconds
    )


def words(value: RegisterValue | None) -> list[str]:
    """Return the words of a value."""
    return [] if value is None else value.body.decode().split()
