"""The records of many large files do not fit in one message of a node."""

from __future__ import annotations

from helpers.node_fixtures import local_node as local_node
from helpers.node_fixtures import store as store

from ckpt.storage.node.client import NodeStore
from ckpt.storage.registers.base import Ballot, DamagedRegister, RegisterValue

NAMES = ["/a", "/b", "/c", "/d"]
VALUE = RegisterValue(b"head", bytes(30 << 20))


def test_records_that_do_not_fit_in_one_message_are_read(store: NodeStore) -> None:
    """About a thousand files of 1 GiB have as many bytes of records, and a scrub or a repair reads a thousand at once."""
    registers = store.registers
    registers.mark_complete()
    assert registers.accept([(name, VALUE) for name in NAMES], Ballot(1, "a")) == [True] * len(NAMES)
    for answers in (registers.read(NAMES), registers.prepare(NAMES, Ballot(2, "b"))):
        assert not any(isinstance(answer, DamagedRegister) for answer in answers)
        assert [answer.value for answer in answers] == [VALUE] * len(NAMES)  # type: ignore[union-attr]
