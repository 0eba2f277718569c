"""The class RegisterVerbs, which answers the calls of clients to the registers of a node."""

from __future__ import annotations

from typing import Any

from ckpt.storage.base.errors import Refused
from ckpt.storage.node import wire
from ckpt.storage.registers.base import Ballot, Registers, RegisterValue


def read_only_error() -> Refused:
    """Return the error of a read-only node for a write. It answers reads, so clients must not take it as down."""
    return Refused("this node is read-only: start it without --read-only")


class RegisterVerbs:
    """Answers the verbs `registers.*`, each by the method `_verb_registers_*`. If read-only, it refuses all changes.

    Three verbs have older names than the methods of Registers: `anew` is `reset`, `complete` is `mark_complete`, and `join` is
    `join_ring`.
    """

    def __init__(self, registers: Registers, read_only: bool) -> None:
        self._registers = registers
        self._read_only = read_only

    def _verb_registers_read(self, names: list[str], fence_number: int) -> list[object]:
        return wire.encode_answers(self._registers.read(names, fence_number))

    def _verb_registers_prepare(self, names: list[str], ballot: list[Any], fence_number: int) -> list[object]:
        self._require_writable()
        return wire.encode_answers(self._registers.prepare(names, Ballot(*ballot), fence_number))

    def _verb_registers_accept(
        self, values: list[Any], ballot: list[Any], repair_damaged: bool, fence_number: int
    ) -> list[bool]:
        self._require_writable()
        return self._registers.accept(
            [(n, RegisterValue(*v)) for n, v in values], Ballot(*ballot), repair_damaged, fence_number
        )

    def _verb_registers_change(self, changes: list[Any], writer: str, fence_number: int) -> list[bool]:
        self._require_writable()
        return self._registers.change(wire.decode_changes(changes), writer, fence_number)

    def _verb_registers_scan(self, prefix: str, after: str, limit: int, fence_number: int) -> list[object]:
        found = self._registers.scan(prefix, after, max(0, min(limit, 10_000)), fence_number)
        return [[name for name, _ in found], wire.encode_answers([answer for _, answer in found])]

    def _verb_registers_anew(self) -> None:
        self._require_writable()
        self._registers.reset()

    def _verb_registers_complete(self) -> None:
        self._require_writable()
        self._registers.mark_complete()

    def _verb_registers_fence(self, fence_number: int) -> bool:
        self._require_writable()
        return self._registers.fence(fence_number)

    def _verb_registers_collect(self, expected_ballots: list[Any], fence_number: int) -> int:
        self._require_writable()
        return self._registers.collect([(name, Ballot(*ballot)) for name, ballot in expected_ballots], fence_number)

    def _verb_registers_learn(self, name: str, value: list[bytes]) -> None:
        self._require_writable()
        self._registers.learn(name, RegisterValue(*value))

    def _verb_registers_join(self, fence_number: int, kept_prefix: str) -> None:
        self._require_writable()
        self._registers.join_ring(fence_number, kept_prefix)

    def _verb_registers_drop(self, names: list[str], fence_number: int) -> None:
        self._require_writable()
        self._registers.drop(names, fence_number)

    def _require_writable(self) -> None:
        if self._read_only:
            raise read_only_error()
