"""The class NodeRegisters, the registers of a node as its client uses them, over Arrow Flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from ckpt.storage.base.errors import Outdated, StoreError, Unavailable
from ckpt.storage.node import wire
from ckpt.storage.registers.base import Ballot, DirectChange, RegisterAnswer, Registers, RegisterValue

_CHANGE_BATCH_BYTES = 16 << 20
"""The bytes of register values in one call."""

T = TypeVar("T")


class CallCancelled(Unavailable):
    """Flight has cancelled a call, perhaps because its answer is longer than `wire.MESSAGE_BYTES`."""


class NodeRegisters(Registers):
    """The registers of a node.

    call: calls a verb of the node with arguments, and returns its answer.
    url: the URL of the node, for messages.
    """

    def __init__(self, call: Callable[..., Any], url: str) -> None:
        self._call = call
        self._url = url

    def read(self, names: Sequence[str], fence_number: int = 0) -> list[RegisterAnswer]:
        return self._ask(lambda batch: self._call("registers.read", batch, fence_number), list(names))

    def prepare(self, names: Sequence[str], ballot: Ballot, fence_number: int = 0) -> list[RegisterAnswer]:
        return self._ask(lambda batch: self._call("registers.prepare", batch, list(ballot), fence_number), list(names))

    def accept(
        self, values: Sequence[tuple[str, RegisterValue]], ballot: Ballot, repair_damaged: bool = False, fence_number: int = 0
    ) -> list[bool]:
        def send(batch: Sequence[tuple[str, RegisterValue]]) -> object:
            encoded = [[name, wire.encode_value(value)] for name, value in batch]
            return self._call("registers.accept", encoded, list(ballot), repair_damaged, fence_number)

        return self._send_batches(_batch_by_bytes(values, lambda item: item[1]), send)

    def change(self, changes: Sequence[DirectChange], writer: str, fence_number: int = 0) -> list[bool]:
        def send(batch: Sequence[DirectChange]) -> object:
            return self._call("registers.change", wire.encode_changes(batch), writer, fence_number)

        return self._send_batches(_batch_by_bytes(changes, lambda change: change.value), send)

    def scan(
        self, prefix: str, after: str = "", limit: int = 10_000, fence_number: int = 0
    ) -> list[tuple[str, RegisterAnswer]]:
        names, answers = self._call("registers.scan", prefix, after, limit, fence_number)
        return list(zip(names, self._decode_answers(answers, len(names)), strict=True))

    def reset(self) -> None:
        self._call("registers.anew")

    def mark_complete(self) -> None:
        self._call("registers.complete")

    def fence(self, fence_number: int) -> bool:
        return bool(self._call("registers.fence", fence_number))

    def collect(self, expected_ballots: Sequence[tuple[str, Ballot]], fence_number: int) -> int:
        done = 0
        for start in range(0, len(expected_ballots), wire.NAMES_PER_CALL):
            batch = [[name, list(ballot)] for name, ballot in expected_ballots[start : start + wire.NAMES_PER_CALL]]
            done += int(self._call("registers.collect", batch, fence_number))
        return done

    def learn(self, name: str, value: RegisterValue) -> None:
        self._call("registers.learn", name, wire.encode_value(value))

    def join_ring(self, fence_number: int, kept_prefix: str) -> None:
        self._call("registers.join", fence_number, kept_prefix)

    def drop(self, names: Sequence[str], fence_number: int) -> None:
        for start in range(0, len(names), wire.NAMES_PER_CALL):
            self._call("registers.drop", list(names[start : start + wire.NAMES_PER_CALL]), fence_number)

    def _ask(self, call: Callable[[list[str]], Any], names: list[str]) -> list[RegisterAnswer]:
        """Return the answers for these registers, in several calls if one message can't hold them all.

        Records of large files have many bytes, and Flight cancels a call with a longer answer.
        """
        try:
            return self._decode_answers(call(names), len(names))
        except Unavailable as error:
            if len(names) < 2 or not isinstance(error, CallCancelled):
                raise
        middle = len(names) // 2
        return [*self._ask(call, names[:middle]), *self._ask(call, names[middle:])]

    def _decode_answers(self, data: Any, expected: int) -> list[RegisterAnswer]:
        try:
            answers = wire.decode_answers(data)
        except (TypeError, IndexError) as error:
            raise Unavailable(
                f"{self._url} did not answer with records of registers ({error}); {wire.SAME_VERSION_ADVICE}"
            ) from error
        if len(answers) != expected:
            raise Unavailable(f"{self._url} answered for {len(answers)} of {expected} registers; {wire.SAME_VERSION_ADVICE}")
        return answers

    def _send_batches(self, batches: Iterable[Sequence[T]], send: Callable[[Sequence[T]], object]) -> list[bool]:
        found: list[bool] = []
        for batch in batches:
            try:
                found += self._check_flags(send(batch), len(batch))
            except Outdated as error:
                if not found:
                    raise
                raise StoreError(f"{self._url}: some registers may have been changed: {error}; try again") from error
        return found

    def _check_flags(self, data: object, expected: int) -> list[bool]:
        if not isinstance(data, list) or len(data) != expected:
            raise Unavailable(f"{self._url} did not answer for {expected} registers; {wire.SAME_VERSION_ADVICE}")
        return data


def _batch_by_bytes(items: Sequence[T], value: Callable[[T], RegisterValue]) -> Iterator[Sequence[T]]:
    """Yield the items in batches that fit in a message."""
    batch: list[T] = []
    total = 0
    for item in items:
        size = len(value(item).head) + len(value(item).body)
        if batch and total + size > _CHANGE_BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch
